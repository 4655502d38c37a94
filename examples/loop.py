"""What the training loops of the examples share: progress bar, the line of a step, the last words."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from typing import Any

from corpus import Corpus
from launch import World
from report import Step
from tqdm import tqdm


def batches(text: Corpus, args: argparse.Namespace, world: World) -> tqdm:
    """An iteration's token ids [sequences, seq_length + 1] each, under a progress bar on rank 0."""
    rows = text.batches(
        seq_length=args.seq_length,
        batch_size=args.global_batch_size,
        seed=args.seed,
        iterations=args.train_iters,
    )
    return bar(rows, args.train_iters, world)


def bar(iterations: Iterable[Any], total: int, world: World, *, name: str | None = None) -> tqdm:
    """A progress bar on rank 0."""
    return tqdm(
        iterations,
        total=total,
        desc=name,
        unit="step",
        disable=None if world.rank == 0 else True,  # None: shown on a terminal, log lines elsewhere
    )


def show(step: Step, progress: tqdm, args: argparse.Namespace, world: World, *, loss_name: str) -> None:
    """Beside the bar, or where there is none in a line every so many iterations."""
    progress.set_postfix_str(f"loss {step.loss:.3f}, entropy {step.entropy:.3f} nats", refresh=False)
    say_in_intervals(
        f"{loss_name} {step.loss:.4f} | entropy {step.entropy:.4f} nats",
        step.iteration,
        progress,
        args,
        world,
    )


def say_in_intervals(
    line: str,
    iteration: int,
    progress: tqdm,
    args: argparse.Namespace,
    world: World,
    *,
    name: str = "iteration",
) -> None:
    """Where there is no bar: the line of the first, the last and every so many iterations."""
    last = progress.total
    if progress.disable and (iteration % args.log_interval == 0 or iteration in (1, last)):
        world.say(f"{name} {iteration:{len(str(last))}}/{last} | {line}")


def last_words(steps: Sequence[Step], args: argparse.Namespace) -> list[str]:
    """What was learnt, and where it can be seen."""
    last = steps[-10:]
    loss, entropy = (math.fsum(getattr(s, name) for s in last) / len(last) for name in ("loss", "entropy"))
    return [
        f"Loss {steps[0].loss:.2f} -> {loss:.2f}, entropy {steps[0].entropy:.2f} -> {entropy:.2f} nats a "
        f"token (last {len(last)} iterations); ln V = {math.log(args.vocab_size):.2f}.",
        f"Plot: {args.save / 'plot.png'} (both curves start at ln V, every token equally likely, and fall); "
        f"numbers: {args.save / 'metrics.jsonl'}",
    ]

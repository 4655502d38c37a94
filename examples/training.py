"""The training loop: Megatron's schedule and optimizer, and `EntropyLoss`."""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import gpt as megatron_gpt
import loop
import report
import torch
import torch.distributed as dist
from compare_stock import Comparison, Head, Sums, entropy_aware_head
from corpus import END_OF_TEXT_ID, Corpus
from gpt import ModelInputs
from launch import World
from megatron.core import __version__ as megatron_version
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func

from mcore_entropy import EntropyConfig, swap_output_layer
from mcore_entropy.megatron.loss import EntropyLoss


def forward_step(
    batches: Iterator[ModelInputs], model: Any, *, head: Head, loss_func: EntropyLoss
) -> tuple[Any, Any]:
    inputs = next(batches)
    return head(model, inputs), partial(loss_func, inputs.loss_mask)


def compute_gradients(
    head: Head,
    *,
    model: DistributedDataParallel,
    micro_batches: Sequence[ModelInputs],
    loss_func: EntropyLoss,
) -> Sums:
    """Leaves the gradients of all ranks' micro-batches in main_grad; returns their loss and entropy."""
    model.zero_grad_buffer()
    tokens = micro_batches[0].tokens
    logged = get_forward_backward_func()(
        forward_step_func=partial(forward_step, head=head, loss_func=loss_func),
        data_iterator=iter(micro_batches),
        model=[model],
        num_microbatches=len(micro_batches),
        seq_length=tokens.size(1),
        micro_batch_size=tokens.size(0),
        forward_only=False,
    )
    # Each report of each micro-batch is [sum, number of tokens].
    sums = torch.stack([torch.stack([report["lm loss"], report["entropy"]]) for report in logged]).sum(0)
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    (loss, tokens), (entropy, _) = sums.tolist()
    return Sums(loss / max(tokens, 1), entropy / max(tokens, 1), int(tokens))


def train(args: argparse.Namespace, world: World, text: Corpus) -> int:
    """Trains, fills the folder --save, and returns the exit code: 1 where --compare-stock fails."""
    config = megatron_gpt.transformer_config(args)
    gpt = megatron_gpt.build_model(args, config, world)
    entropy_config = EntropyConfig(chunk_size=args.chunk_size, entropy_coeff=args.entropy_coeff)
    loss_func = EntropyLoss(entropy_config)
    if args.compare_stock:  # it swaps and restores at every step
        comparison = Comparison(gpt, entropy_config)
        run_step = comparison.step
    else:
        comparison = None
        head = entropy_aware_head(swap_output_layer(gpt, entropy_config))

        def run_step(compute: Callable[[Head], Sums]) -> Sums:
            return compute(head)

    model = megatron_gpt.wrap_for_training(gpt, config)
    optimizer = megatron_gpt.build_optimizer(args, model)
    scheduler = megatron_gpt.build_schedule(args, optimizer)
    world.say(*describe(args, world, megatron_gpt.parameter_count(gpt)), f"Text: {text.summary}")

    steps: list[report.Step] = []
    progress = loop.batches(text, args, world)
    for iteration, rows in enumerate(progress, start=1):
        start = time.perf_counter()
        micro_batches = [
            ModelInputs.from_rows(micro_batch, end_of_text=END_OF_TEXT_ID, device=world.device)
            for micro_batch in rows_of_this_rank(rows, args)
        ]
        compute = partial(compute_gradients, model=model, micro_batches=micro_batches, loss_func=loss_func)
        optimizer.zero_grad()
        sums = run_step(compute)
        scheduler.step(increment=1)
        optimizer.step()

        learning_rate = max(group["lr"] for group in optimizer.param_groups)
        seconds = time.perf_counter() - start
        steps.append(report.Step(iteration, sums.loss, sums.entropy, learning_rate, sums.tokens, seconds))
        loop.show(steps[-1], progress, args, world, loss_name="lm loss")
    progress.close()

    if world.rank == 0:
        (args.save / "tokenizer.json").write_text(text.tokenizer_json, encoding="utf-8")
        report.write_json_lines(steps, args.save / "metrics.jsonl")
        report.plot(steps, args.save / "plot.png", vocab_size=args.vocab_size, title=plot_title(args))
    checkpoint = megatron_gpt.save_checkpoint(gpt, world, args)
    if comparison is not None:
        world.say(*comparison.report())
    world.say(
        *loop.last_words(steps, args),
        f"Checkpoint (torch_dist): {checkpoint}; tokenizer: {args.save / 'tokenizer.json'}",
    )
    return 0 if comparison is None or comparison.passed() else 1


def rows_of_this_rank(rows: torch.Tensor, args: argparse.Namespace) -> torch.Tensor:
    """A data-parallel rank's share of a global batch: [micro-batches, micro-batch size, seq_length + 1]."""
    shares = rows.view(-1, args.data_parallel_size, args.micro_batch_size, rows.size(1))
    return shares[:, parallel_state.get_data_parallel_rank()]


def describe(args: argparse.Namespace, world: World, parameters: int) -> list[str]:
    return [
        f"Python {platform.python_version()}, torch {torch.__version__}, megatron-core {megatron_version}; "
        f"{world.where()}; {parallelism(args)}",
        f"GPT: {args.num_layers} layers, hidden {args.hidden_size}, vocabulary {args.vocab_size:,} "
        f"({args.vocab_size // args.tensor_model_parallel_size:,} a rank), {parameters:,} parameters in "
        f"{'bf16' if args.bf16 else 'fp32'}; {args.train_iters} iterations of "
        f"{args.global_batch_size} x {args.seq_length} tokens",
    ]


def plot_title(args: argparse.Namespace) -> str:
    bonus = f", entropy coefficient {args.entropy_coeff:g}" if args.entropy_coeff else ""
    return f"GPT of {args.num_layers} layers, hidden {args.hidden_size}; {parallelism(args)}{bonus}"


def parallelism(args: argparse.Namespace) -> str:
    sequence = " with sequence parallelism" if args.sequence_parallel else ""
    return f"TP {args.tensor_model_parallel_size}{sequence}, DP {args.data_parallel_size}"

"""The GRPO loop: a supervised warm-up, then iterations of answers, rewards and updates."""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass

import gpt as megatron_gpt
import grpo
import grpo_report
import loop
import report
import sums
import torch
import torch.distributed as dist
from compare_stock import VALUE_TOLERANCE, Worst
from grpo import EntropyBonus, Means, Policy, Rollout
from grpo_report import Step
from launch import World
from megatron.core import __version__ as megatron_version
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from mcore_entropy import EntropyConfig, swap_output_layer
from mcore_entropy.rl import token_mean


def train(args: argparse.Namespace, world: World) -> int:
    """Trains, fills the folder --save, and returns the exit code: 1 where --compare-stock fails."""
    config = megatron_gpt.transformer_config(args)
    gpt = megatron_gpt.build_model(args, config, world)
    handle = swap_output_layer(gpt, EntropyConfig())
    policy = Policy(megatron_gpt.wrap_for_training(gpt, config), handle, args.temperature)
    world.say(*describe(args, world, megatron_gpt.parameter_count(gpt)))

    warm_up(policy, args, world)
    reference = frozen_copy(gpt, args, world)
    optimizer = megatron_gpt.build_optimizer(args, policy.model)
    scheduler = megatron_gpt.build_schedule(args, optimizer, decay="constant")
    bonus = EntropyBonus(args.entropy_coeff, args.target_entropy, args.entropy_coeff_step)
    comparison = Comparison(policy)
    log = grpo_report.Log(args.save) if world.rank == 0 else None
    steps: list[Step] = []
    progress = loop.bar(questions(args, world), args.train_iters, world)
    for iteration, (prompts, noise) in enumerate(progress, start=1):
        start = time.perf_counter()
        rollout = grpo.collect(policy, reference, prompts, noise, args.group_size)
        if args.compare_stock and (iteration == 1 or iteration % args.compare_stock == 0):
            comparison.run(rollout)
        scheduler.step(increment=1)
        updates, norms = [], []
        for part in rollout.parts(args.updates):
            updates.append(grpo.compute_gradients(policy, part, args, bonus.coefficient))
            _, norm, _ = optimizer.step()
            norms.append(norm)
        means = Means(*torch.tensor(updates).mean(0).tolist())
        reward, answers, length = summary_of(rollout, args)
        seconds = time.perf_counter() - start
        steps.append(
            Step(
                iteration,
                reward=reward,
                **means._asdict(),
                distinct_answers=answers,
                answer_length=length,
                entropy_coeff=bonus.coefficient,
                gradient_norm=sum(norms) / len(norms),
                seconds=seconds,
            )
        )
        bonus.observe(means.entropy)
        if log is not None:
            log.add(steps[-1])
        line = f"reward {reward:.3f} | entropy {means.entropy:.3f} nats | KL {means.kl:.3f}"
        progress.set_postfix_str(line.replace(" |", ","), refresh=False)
        loop.say_in_intervals(f"{line} | clipped {means.clip_fraction:.3f}", iteration, progress, args, world)
    progress.close()

    if log is not None:
        log.close()
        report.write_json_lines(steps, args.save / "metrics.jsonl")
        grpo_report.plot({bonus_in_words(args): steps}, args.save / "plot.png", args.group_size)
    checkpoint = megatron_gpt.save_checkpoint(gpt, world, args)
    if args.compare_stock:
        world.say(comparison.verdict())
    world.say(*last_words(steps, args), f"Checkpoint (torch_dist): {checkpoint}")
    return 0 if comparison.passed() else 1


def warm_up(policy: Policy, args: argparse.Namespace, world: World) -> None:
    """Shows the policy solved problems, so that some of its answers are right and rewards tell them apart."""
    if not args.warmup_iters:
        return
    schedule_of = argparse.Namespace(**vars(args) | {"lr": args.warmup_lr, "train_iters": args.warmup_iters})
    optimizer = megatron_gpt.build_optimizer(schedule_of, policy.model)
    scheduler = megatron_gpt.build_schedule(schedule_of, optimizer)
    generator = torch.Generator().manual_seed(args.seed)
    data_parallel = (parallel_state.get_data_parallel_group(),)
    progress = loop.bar(range(1, args.warmup_iters + 1), args.warmup_iters, world, name="warm-up")
    for iteration in progress:
        rows = sums.examples(args.prompts * args.group_size, generator)
        inputs = grpo.model_inputs(rows_of_this_rank(rows, args).to(world.device))
        policy.model.zero_grad_buffer()
        statistics = policy.statistics(inputs, entropy=False)
        loss = token_mean(-statistics.log_probs, inputs.loss_mask, groups=data_parallel)
        loss.backward()
        finalize_model_grads([policy.model])
        optimizer.step()
        scheduler.step(increment=1)
        line = f"loss {loss.item():.4f}"
        progress.set_postfix_str(line, refresh=False)
        loop.say_in_intervals(line, iteration, progress, args, world, name="warm-up")
    progress.close()


def frozen_copy(gpt: GPTModel, args: argparse.Namespace, world: World) -> Policy:
    """An independent model with the same weights, and a swapped head of its own: the reference."""
    copy = megatron_gpt.build_model(args, gpt.config, world)
    copy.load_state_dict(gpt.state_dict())
    copy.requires_grad_(False)
    return Policy(copy, swap_output_layer(copy, EntropyConfig()), args.temperature)


def questions(args: argparse.Namespace, world: World) -> Iterator[tuple[Tensor, Tensor]]:
    """An iteration's prompts, each as often as a group is large, and the noise to sample with.

    Every rank draws what all need and takes its own rows: the ranks of a tensor-parallel group get the same,
    and the numbers do not depend on the layout.
    """
    generator = torch.Generator().manual_seed(args.seed + 1)
    for _ in range(args.train_iters):
        prompts = sums.prompts(args.prompts, generator).repeat_interleave(args.group_size, 0)
        noise = torch.empty(len(prompts), sums.ANSWER_LENGTH, sums.VOCABULARY)
        noise.exponential_(generator=generator)
        yield tuple(rows_of_this_rank(rows, args).to(world.device) for rows in (prompts, noise))


def rows_of_this_rank(rows: Tensor, args: argparse.Namespace) -> Tensor:
    return rows.chunk(args.data_parallel_size)[parallel_state.get_data_parallel_rank()]


def summary_of(rollout: Rollout, args: argparse.Namespace) -> tuple[float, float, float]:
    """Over all ranks: mean reward, distinct right answers to a prompt, length of an answer."""
    right = rollout.rewards.view(-1, args.group_size).tolist()
    written = sums.answers(rollout.tokens)
    groups = [written[i : i + args.group_size] for i in range(0, len(written), args.group_size)]
    distinct = sum(
        len({answer for answer, value in zip(*pair, strict=True) if value})
        for pair in zip(groups, right, strict=True)
    )
    totals = torch.tensor(
        [float(rollout.rewards.sum()), distinct, sum(map(len, written)), len(written), len(groups)],
        dtype=torch.float64,
        device=rollout.tokens.device,
    )
    dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
    reward, distinct, length, answers, prompts = totals.tolist()
    return reward / answers, distinct / prompts, length / answers


@dataclass
class Comparison:
    """--compare-stock: log-probs and entropies against those of the stock logits, gathered and dense."""

    policy: Policy
    iterations: int = 0

    def __post_init__(self) -> None:
        # As a share of the largest logit, whose rounding both carry; see compare_stock.
        self.worst = {name: Worst(VALUE_TOLERANCE[torch.float32]) for name in ("log-prob", "entropy")}

    @torch.no_grad()
    def run(self, rollout: Rollout) -> None:
        inputs = grpo.model_inputs(rollout.tokens)
        counted = inputs.loss_mask
        ours = self.policy.statistics(inputs, entropy=True)
        logits = self.policy.logits(rollout.tokens)[counted]
        log_p = logits.double().log_softmax(-1)
        log_probs = log_p.gather(-1, inputs.labels[counted][:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        self.iterations += 1
        for name, of_head, of_logits in (
            ("log-prob", ours.log_probs, log_probs),
            ("entropy", ours.entropy, entropy),
        ):
            largest = torch.stack([(of_head[counted] - of_logits).abs().max(), logits.abs().max().double()])
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # of all ranks: they end with one exit code
            self.worst[name].add(*largest.tolist())

    def passed(self) -> bool:
        return all(worst.passed() for worst in self.worst.values())

    def verdict(self) -> str:
        log_prob, entropy = (
            f"{name} of a token within {worst.absolute:.1e} nats ({worst.share:.1e} of the largest logit"
            for name, worst in self.worst.items()
        )
        return (
            f"Entropy-aware against stock head, {self.iterations} iteration(s): {log_prob}), {entropy}; "
            f"allowed: {VALUE_TOLERANCE[torch.float32]:.0e}). {'PASSED' if self.passed() else 'FAILED'}"
        )


def bonus_in_words(args: argparse.Namespace) -> str:
    if args.target_entropy is not None:
        return f"target entropy {args.target_entropy:g}"
    return f"entropy coefficient {args.entropy_coeff:g}" if args.entropy_coeff else "no entropy bonus"


def describe(args: argparse.Namespace, world: World, parameters: int) -> list[str]:
    return [
        f"Python {platform.python_version()}, torch {torch.__version__}, megatron-core {megatron_version}; "
        f"{world.where()}; TP {args.tensor_model_parallel_size}, DP {args.data_parallel_size}",
        f"GPT: {args.num_layers} layers, hidden {args.hidden_size}, {parameters:,} parameters; "
        f"{args.warmup_iters} iterations of warm-up, then {args.train_iters} of {args.prompts} prompts x "
        f"{args.group_size} answers, {args.updates} update(s) each; {args.loss} loss, {bonus_in_words(args)}",
    ]


def last_words(steps: list[Step], args: argparse.Namespace) -> list[str]:
    first, last = (grpo_report.mean_step(part) for part in (steps[:10], steps[-10:]))
    return [
        f"Reward {first['reward']:.2f} -> {last['reward']:.2f}, entropy {first['entropy']:.2f} -> "
        f"{last['entropy']:.2f} nats a token, distinct right answers to a prompt "
        f"{first['distinct_answers']:.1f} -> {last['distinct_answers']:.1f} of {args.group_size} (means of "
        "10 iterations)",
        f"Plot: {args.save / 'plot.png'}; numbers: {args.save / 'metrics.jsonl'}; "
        f"tensorboard --logdir {args.save / 'tensorboard'}",
    ]

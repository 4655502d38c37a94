"""The training loop of a wrapped Hugging Face model: micro-batches, global means, and what is logged.

b sequences of a micro-batch, s tokens of each; a sequence has one token more than it has predictions.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import llama
import loop
import report
import torch
import torch.distributed as dist
import transformers
from corpus import END_OF_TEXT_ID, Corpus
from launch import World
from torch import Tensor, nn

from mcore_entropy import EntropyConfig
from mcore_entropy.adapters.huggingface import swap_lm_head
from mcore_entropy.swap_handle import SwapHandle

# The largest difference of loss and of entropy that --compare-stock allows, as a share of their value.
# fp32: both add up V exponentials and H products, in orders of their own; a sum of n terms is off by about
#   eps * sqrt(n), 6e-8 * 64 for V = 4096.
# bf16: the stock head rounds each logit by up to 2^-9 of it; the mean over tokens evens most of that out.
# A wrong mask, label or scale makes a difference of order 1.
TOLERANCE = {False: 1e-5, True: 1e-3}  # by --bf16
IGNORED = -100


class MicroBatch(NamedTuple):
    """The labels are the tokens themselves: the model predicts label t + 1 at t, the first one nowhere."""

    input_ids: Tensor  # [b, s + 1]
    labels: Tensor  # [b, s + 1]

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(*(tensor.to(device, non_blocking=True) for tensor in self))

    def counted_tokens(self) -> int:
        return int((self.labels[:, 1:] != IGNORED).sum())


class Means(NamedTuple):
    """One iteration over all ranks: means of loss and entropy, in nats, over so many tokens."""

    loss: float
    entropy: float
    tokens: int


@dataclass(frozen=True)
class Step(report.Step):
    gradient_norm: float  # of the whole model, before it is clipped


class Trainer:
    """A swapped and wrapped model, and how its gradients are computed."""

    def __init__(self, args: argparse.Namespace, world: World) -> None:
        self.args, self.world = args, world
        model = llama.build_model(args, world)
        self.parameters = model.num_parameters()
        config = EntropyConfig(chunk_size=args.chunk_size, entropy_coeff=args.entropy_coeff)
        self.handle: SwapHandle = swap_lm_head(model, config)  # before anything wraps the model
        self.model: nn.Module = llama.wrap(model, args)
        self.largest_difference = {"loss": 0.0, "entropy": 0.0}
        self.comparisons = 0

    def compute_gradients(self, micro_batches: Sequence[MicroBatch], *, compare: bool) -> Means:
        """Leaves in .grad those of the mean loss over all ranks' tokens.

        The micro-batches lie on the CPU, and each goes to the device when its turn comes.
        """
        tokens = torch.tensor(sum(micro_batch.counted_tokens() for micro_batch in micro_batches))
        dist.all_reduce(tokens)  # every rank divides by the tokens of all
        num_items = max(int(tokens), 1)
        ours = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        stock = torch.zeros_like(ours)
        for i, micro_batch in enumerate(micro_batches, start=1):
            input_ids, labels = micro_batch.to(self.world.device)
            if compare:
                stock += self.stock_sums(input_ids, labels)
            with llama.gradient_accumulation(self.model, last=i == len(micro_batches)):
                # The mask is in the labels' places; a masked token's statistics are 0 and cost nothing.
                with llama.precision(self.args, self.world), self.handle.request(mask=labels != IGNORED):
                    output = self.model(input_ids=input_ids, labels=labels, num_items_in_batch=num_items)
                # FSDP and DDP take the mean of the ranks' gradients; wanted is their sum.
                (output.loss * self.world.size).backward()
            ours += torch.stack([-output.log_probs.detach().sum(), output.entropy.detach().sum()])
        if compare:
            self.compare(ours, stock)
        dist.all_reduce(ours)
        loss, entropy = (ours / num_items).tolist()
        return Means(loss, entropy, int(tokens))

    @torch.no_grad()
    def stock_sums(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Sums of loss and entropy the plain way: without labels the swapped model gives the stock logits."""
        with llama.precision(self.args, self.world):
            logits = self.model(input_ids=input_ids).logits
        log_p = logits[:, :-1].float().log_softmax(-1)
        targets = labels[:, 1:]
        counted = targets != IGNORED
        loss = -log_p.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return torch.stack([loss[counted].sum(), entropy[counted].sum()]).double()

    def compare(self, ours: Tensor, stock: Tensor) -> None:
        """Keeps the largest difference on any rank, of its own tokens. A NaN counts as infinite."""
        share = ((ours - stock).abs() / stock).nan_to_num(nan=math.inf).cpu()
        dist.all_reduce(share, op=dist.ReduceOp.MAX)
        self.comparisons += 1
        for name, value in zip(self.largest_difference, share.tolist(), strict=True):
            self.largest_difference[name] = max(self.largest_difference[name], value)

    def agrees(self) -> bool:
        return all(value <= TOLERANCE[self.args.bf16] for value in self.largest_difference.values())

    def verdict(self) -> str:
        loss, entropy = (f"{name} within {value:.1e}" for name, value in self.largest_difference.items())
        return (
            f"Entropy-aware against stock head, {self.comparisons} iteration(s): on any rank {loss} of its "
            f"value, {entropy} (allowed: {TOLERANCE[self.args.bf16]:.0e}). "
            f"{'PASSED' if self.agrees() else 'FAILED'}"
        )


def train(args: argparse.Namespace, world: World, text: Corpus) -> int:
    """Trains, fills the folder --save, and returns the exit code: 1 where --compare-stock fails."""
    trainer = Trainer(args, world)
    model = trainer.model
    optimizer, scheduler = llama.build_optimizer(args, model)  # of the parameters that the wrapper made
    world.say(*describe(args, world, trainer.parameters), f"Text: {text.summary}")

    steps: list[Step] = []
    progress = loop.batches(text, args, world)
    for iteration, rows in enumerate(progress, start=1):
        start = time.perf_counter()
        compare = bool(args.compare_stock) and (iteration == 1 or iteration % args.compare_stock == 0)
        optimizer.zero_grad()
        means = trainer.compute_gradients(micro_batches(rows, args, world), compare=compare)
        gradient_norm = llama.clip_gradients(model, args.clip_grad)
        [learning_rate] = scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()

        seconds = time.perf_counter() - start
        steps.append(
            Step(iteration, means.loss, means.entropy, learning_rate, means.tokens, seconds, gradient_norm)
        )
        loop.show(steps[-1], progress, args, world, loss_name="loss")
    progress.close()

    if world.rank == 0:
        report.write_json_lines(steps, args.save / "metrics.jsonl")
        report.plot(steps, args.save / "plot.png", vocab_size=args.vocab_size, title=plot_title(args, world))
    checkpoint = llama.save_checkpoint(model, text, world, args)
    if args.compare_stock:
        world.say(trainer.verdict())
    world.say(
        *loop.last_words(steps, args),
        f"Checkpoint, model and tokenizer: LlamaForCausalLM.from_pretrained({str(checkpoint)!r})",
    )
    return 0 if trainer.agrees() else 1


def micro_batches(rows: Tensor, args: argparse.Namespace, world: World) -> list[MicroBatch]:
    """This rank's share of a global batch [*, s + 1], on the CPU, and pinned where it is to go to a GPU."""
    input_ids = rows.view(-1, world.size, args.micro_batch_size, rows.size(1))[:, world.rank]
    labels = input_ids.clone()
    labels[..., 1:][input_ids[..., :-1] == END_OF_TEXT_ID] = IGNORED  # nothing tells how a document starts
    if world.device.type == "cuda":
        input_ids, labels = input_ids.pin_memory(), labels.pin_memory()
    return [MicroBatch(*pair) for pair in zip(input_ids, labels, strict=True)]


def describe(args: argparse.Namespace, world: World, parameters: int) -> list[str]:
    return [
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}; {world.where()}; {parallelism(args, world)}",
        f"Llama: {args.num_layers} layers, hidden {args.hidden_size}, vocabulary {args.vocab_size:,}, "
        f"{parameters:,} parameters; {args.train_iters} iterations of "
        f"{args.global_batch_size} x {args.seq_length} tokens",
    ]


def plot_title(args: argparse.Namespace, world: World) -> str:
    bonus = f", entropy coefficient {args.entropy_coeff:g}" if args.entropy_coeff else ""
    return f"Llama of {args.num_layers} layers, hidden {args.hidden_size}; {parallelism(args, world)}{bonus}"


def parallelism(args: argparse.Namespace, world: World) -> str:
    accumulated = args.global_batch_size // (args.micro_batch_size * world.size)
    precision = "bf16" if args.bf16 else "fp32"
    return (
        f"{args.parallel.upper()} on {world.size} rank{'s' * (world.size > 1)}, {precision}, "
        f"{accumulated} micro-batch{'es' * (accumulated > 1)} an iteration"
    )

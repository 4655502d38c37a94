"""An RL update step and a log-prob pass of a whole model: time and peak memory of the heads that people use.

python -m tests.benchmarks.rl_step --tokens 16384 32768        # Qwen2.5-0.5B's shapes, on a GPU
python -m tests.benchmarks.rl_step --shape 7b --tokens 16384   # four layers of Qwen2.5-7B's
python -m tests.benchmarks.rl_step --head-alone                # the same on hidden states that exist

The update is forward, loss = -(log_prob · advantage) - 0.01 · entropy, backward, with the layers
checkpointed; the pass is the old policy's log-probs and entropy, without a graph. Every head sees the same
tokens, first all of them, then with a mask that leaves the share --masked out.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mcore_entropy import EntropyConfig, linear_log_probs_and_entropy
from mcore_entropy.adapters.huggingface import swap_lm_head
from mcore_entropy.swap_handle import SwapHandle
from tests.benchmarks.qwen2 import SHAPES, build, eager_statistics
from tests.benchmarks.timing import interleaved
from tests.benchmarks.training_step import bytes_before, peak_gib_beyond

CHUNK = 2048


@dataclass
class Batch:
    """ids [b, s]; advantage [b, s - 1] in the places of the labels; counted, bool [b, s - 1].

    hidden [b, s - 1, H], a leaf, where the head is measured alone.
    """

    ids: Tensor
    advantage: Tensor
    counted: Tensor
    hidden: Tensor


Statistics = Callable[[Batch], tuple[Tensor, Tensor]]  # log-probs and entropy, [b, s - 1] both


def eager(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """What most loops do."""
    return eager_statistics(model, batch.ids)


def _entropy_of_chunk(logits: Tensor) -> Tensor:
    logits = logits.float()
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


def chunked(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probs by row, entropy by checkpointed chunks: the usual options against running out of memory."""
    logits = model(input_ids=batch.ids).logits[:, :-1]
    log_probs = [
        row.float().log_softmax(-1).gather(-1, label[:, None])[:, 0]
        for row, label in zip(logits, batch.ids[:, 1:], strict=True)
    ]
    chunks = logits.flatten(0, 1).split(CHUNK)
    entropy = [checkpoint(_entropy_of_chunk, chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(log_probs), torch.cat(entropy).view(batch.counted.shape)


def _dense(hidden: Tensor, weight: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, weight).float()
    normalizer = logits.logsumexp(-1)
    log_probs = logits.gather(-1, label[..., None]).squeeze(-1) - normalizer
    return log_probs, normalizer - (logits.softmax(-1) * logits).sum(-1)


_compiled_dense = torch.compile(_dense, dynamic=False)


def compiled(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """torch.compile of the eager head."""
    hidden = model.model(input_ids=batch.ids).last_hidden_state[:, :-1]
    return _compiled_dense(hidden, model.lm_head.weight, batch.ids[:, 1:])


def ours(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The swapped head, on every token."""
    output = model(input_ids=batch.ids, labels=batch.ids)
    return output.log_probs[:, :-1], output.entropy[:, :-1]


def ours_masked(model: Any, handle: SwapHandle, batch: Batch) -> tuple[Tensor, Tensor]:
    """The swapped head, on the tokens that count."""
    with handle.request(mask=torch.nn.functional.pad(batch.counted, (1, 0))):  # in the places of the labels
        return ours(model, batch)


def compiled_head(weight: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return _compiled_dense(batch.hidden, weight, batch.ids[:, 1:])


def our_head(weight: Tensor, masked: bool, batch: Batch) -> tuple[Tensor, Tensor]:
    statistics = linear_log_probs_and_entropy(
        batch.hidden, weight, batch.ids[:, 1:], mask=batch.counted if masked else None
    )
    assert statistics.entropy is not None
    return statistics.log_probs, statistics.entropy


def masked_after(statistics: Statistics) -> Statistics:
    """What a head that knows no mask does with one: everything, then a choice."""

    def chosen(batch: Batch) -> tuple[Tensor, Tensor]:
        log_probs, entropy = statistics(batch)
        return log_probs.where(batch.counted, 0.0), entropy.where(batch.counted, 0.0)

    return chosen


def update(statistics: Statistics, batch: Batch) -> Tensor:
    log_probs, entropy = statistics(batch)
    loss = -(log_probs * batch.advantage).mean() - 0.01 * entropy.mean()
    loss.backward()
    return loss.detach()


@torch.no_grad()
def log_prob_pass(statistics: Statistics, batch: Batch) -> Tensor:
    log_probs, entropy = statistics(batch)
    return torch.stack((log_probs.mean(), entropy.mean()))


def peak_gib(run: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """Its result, and the peak beyond what there was before; weights and gradients were."""
    run()
    gc.collect()
    before = bytes_before()
    result = run()
    return result, peak_gib_beyond(before)


def measure(batch: Batch, heads: dict[str, Statistics], rounds: int) -> None:
    for what, step in (("update", update), ("log-prob pass", log_prob_pass)):
        runs: dict[str, Callable[[], Tensor]] = {
            name: partial(step, statistics, batch) for name, statistics in heads.items()
        }
        peaks = {name: peak_gib(run) for name, run in runs.items()}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            times = interleaved(dict(runs), rounds, at_least_ms=200.0)
        else:
            times = dict.fromkeys(runs, 0.0)
        for name, (result, peak) in peaks.items():
            numbers = " ".join(f"{number:.4f}" for number in result.flatten().tolist())
            print(f"| {what} | {name} | {times[name]:.0f} | {peak:.2f} | {numbers} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--masked", type=float, default=0.6, help="share of the tokens that do not count")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--head-alone", action="store_true")
    args = parser.parse_args()
    stock, swapped = build(args.shape, args.device), build(args.shape, args.device)
    handle = swap_lm_head(swapped, EntropyConfig())
    every_token: dict[str, Statistics] = {
        "eager, fp32": partial(eager, stock),
        "chunked + checkpoint": partial(chunked, stock),
        "torch.compile": partial(compiled, stock),
        "ours": partial(ours, swapped),
    }
    some_tokens: dict[str, Statistics] = {
        "torch.compile": masked_after(partial(compiled, stock)),
        "ours": partial(ours_masked, swapped, handle),
        "ours, the mask unused": masked_after(partial(ours, swapped)),
    }
    if args.head_alone:
        weight = stock.lm_head.weight
        every_token = {
            "torch.compile": partial(compiled_head, weight),
            "ours": partial(our_head, weight, False),
        }
        some_tokens = {
            "torch.compile": masked_after(every_token["torch.compile"]),
            "ours": partial(our_head, weight, True),
            "ours, the mask unused": masked_after(every_token["ours"]),
        }
    print(f"torch {torch.__version__}, transformers {transformers.__version__}; {args}")
    for tokens in args.tokens:
        shape = (tokens // args.sequence_length, args.sequence_length)
        ids = torch.randint(0, stock.config.vocab_size, shape, device=args.device)
        advantage = torch.randn(shape[0], shape[1] - 1, device=args.device)
        counted = torch.rand_like(advantage) >= args.masked
        hidden = torch.randn(*advantage.shape, stock.config.hidden_size, device=args.device).bfloat16()
        hidden.requires_grad_().grad = torch.zeros_like(hidden)
        torch._dynamo.reset()
        print(f"\n{tokens} tokens, all of them\n\n| | head | ms | peak GiB | result |\n|---|---|---|---|---|")
        measure(Batch(ids, advantage, torch.ones_like(counted), hidden), every_token, args.rounds)
        print(f"\n{tokens} tokens, {counted.float().mean():.1%} of them count\n")
        measure(Batch(ids, advantage, counted, hidden), some_tokens, args.rounds)


if __name__ == "__main__":
    main()

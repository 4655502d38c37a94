"""Log-prob and entropy of bf16 logits that exist, beside one read and one copy of them.

    python -m tests.benchmarks.given_logits [--shapes 8192,152064 ...]

The kernels alone: a forward is one launch, a backward two. Times are taken in turn
(tests/benchmarks/timing.py).
"""

from __future__ import annotations

import argparse

import torch

import mcore_entropy as me
from mcore_entropy.backends.interface import LogitRows, RowGradients, RowInputs, TokenSelection
from mcore_entropy.backends.triton.rows import logits_gradient, logits_statistics
from mcore_entropy.statistics import Wanted, finish, gradient_coefficients
from tests.benchmarks.timing import interleaved

SHAPES = ((8192, 152064), (16384, 38016))


def measure(tokens: int, vocab: int, rounds: int) -> str:
    torch.manual_seed(0)
    logits = torch.randn(tokens, vocab, device="cuda").bfloat16()
    out = torch.empty_like(logits)
    target = torch.randint(0, vocab, (tokens,), device="cuda")
    rows, everything, inputs = LogitRows(logits), TokenSelection(0, tokens), RowInputs(target, 1.0)
    wanted = Wanted()
    statistics = logits_statistics(rows, everything, inputs, wanted)
    normalizer, _, entropy, _ = finish(statistics, wanted, vocab)
    g_lp, g_h = torch.randn(tokens, device="cuda"), torch.randn(tokens, device="cuda") * 0.01
    gradients = RowGradients(normalizer, gradient_coefficients(g_lp, g_h, entropy, None, 1.0))
    leaf = logits.detach().requires_grad_()

    def whole_step() -> None:
        leaf.grad = None
        result = me.vocab_parallel_log_probs_and_entropy(leaf, target)
        torch.autograd.backward([result.log_probs, result.entropy], [g_lp, g_h])

    ms = interleaved(
        {
            "read": lambda: torch.amax(logits.view(-1)),
            "copy": lambda: out.copy_(logits),
            "forward": lambda: logits_statistics(rows, everything, inputs, wanted),
            "backward": lambda: logits_gradient(rows, everything, inputs, gradients, out),
            "whole step": whole_step,
        },
        rounds,
    )
    return (
        f"{tokens} x {vocab}: read {ms['read']:.3f} ms, copy {ms['copy']:.3f} ms; "
        f"forward / read {ms['forward'] / ms['read']:.3f}, "
        f"backward / copy {ms['backward'] / ms['copy']:.3f}, "
        f"the public function's whole step / (read + copy) "
        f"{ms['whole step'] / (ms['read'] + ms['copy']):.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", help="N,V each")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    shapes = SHAPES
    if options.shapes:
        shapes = tuple(tuple(int(x) for x in spec.split(",")) for spec in options.shapes)
    for tokens, vocab in shapes:
        print(measure(tokens, vocab, options.rounds), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

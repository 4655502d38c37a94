"""The fused head beside what people write today, interleaved in one process: time and peak memory.

    python -m tests.benchmarks.fused_head [--tokens 4096 --hidden 512 --vocab 32000 --dtype float32]

Eager is ``hidden @ weight.T`` -> log_softmax -> log-prob and entropy, by autograd. Both do a forward and a
backward with upstream gradients for both results. Checked against fp64 before anything is timed.

Time: median over rounds of wall time; in each round one runs right after the other, in alternating order,
and the ratio quoted is the median of the rounds' ratios. Memory: the peak of what is allocated beyond the
inputs, from the allocator's own trace on the CPU and its counters on CUDA; it includes the gradients of
hidden and weight.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import mcore_entropy

Results = tuple[Tensor, Tensor]


def eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Results:
    log_p = torch.log_softmax((hidden @ weight.t()).float(), -1)
    return log_p.gather(1, target.unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def fused(hidden: Tensor, weight: Tensor, target: Tensor) -> Results:
    result = mcore_entropy.linear_log_probs_and_entropy(hidden, weight, target)
    assert result.entropy is not None
    return result.log_probs, result.entropy


class Case:
    """Inputs on one device, and what is timed on them."""

    def __init__(self, tokens: int, hidden: int, vocab: int, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.device = device
        self.hidden = normal(tokens, hidden).to(device, dtype).requires_grad_()
        self.weight = (2 * normal(vocab, hidden) / hidden**0.5).to(device, dtype).requires_grad_()
        self.target = torch.randint(vocab, (tokens,), generator=generator).to(device)
        self.upstream = [normal(tokens).to(device), (0.01 * normal(tokens)).to(device)]

    def step(self, head: Callable[..., Results]) -> None:
        self.hidden.grad = self.weight.grad = None
        torch.autograd.backward(head(self.hidden, self.weight, self.target), self.upstream)

    def check(self, rows: int = 256) -> dict[str, float]:
        """Largest errors of the fused head against fp64, relative to the largest entry."""
        hidden = self.hidden.detach()[:rows].requires_grad_()
        weight = self.weight.detach().requires_grad_()
        wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
        upstream = [g[:rows] for g in self.upstream]
        names = ("log_probs", "entropy", "hidden gradient", "weight gradient")
        ours = fused(hidden, weight, self.target[:rows])
        log_p = torch.log_softmax(wide[0] @ wide[1].t(), -1)
        right = log_p.gather(1, self.target[:rows, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
        ours += torch.autograd.grad(ours, [hidden, weight], upstream)
        right += torch.autograd.grad(right, wide, [g.double() for g in upstream])
        return {
            name: ((mine.double() - truth).abs().max() / truth.abs().max()).item()
            for name, mine, truth in zip(names, ours, right, strict=True)
        }

    def seconds(self, head: Callable[..., Results]) -> float:
        self._synchronize()
        start = time.perf_counter()
        self.step(head)
        self._synchronize()
        return time.perf_counter() - start

    def peak_mib(self, head: Callable[..., Results]) -> float:
        self.hidden.grad = self.weight.grad = None
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.step(head)
            return (torch.cuda.max_memory_allocated() - before) / 2**20
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            self.step(head)
        events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
        now = peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            now += event.nbytes()
            peak = max(peak, now)
        return peak / 2**20

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, options.dtype)
    case = Case(options.tokens, options.hidden, options.vocab, dtype, device)
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    print(
        f"{device} {name}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"N={options.tokens} H={options.hidden} V={options.vocab} {options.dtype}"
    )
    errors = case.check()
    print("largest relative error against fp64: " + ", ".join(f"{k} {v:.1e}" for k, v in errors.items()))
    # fp32 results throughout; gradients are rounded to the inputs' dtype.
    limit = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}[options.dtype]
    assert max(errors.values()) < limit, "the fused head is wrong here: nothing is timed"

    heads = {"eager": eager, "fused": fused}
    for head in heads.values():
        case.step(head)
    seconds: dict[str, list[float]] = {label: [] for label in heads}
    for i in range(options.rounds):
        for label in list(heads) if i % 2 == 0 else list(reversed(heads)):
            seconds[label].append(case.seconds(heads[label]))
    peaks = {label: case.peak_mib(head) for label, head in heads.items()}
    print(f"{'':8}{'seconds':>10}{'peak MiB':>10}")
    for label in heads:
        print(f"{label:8}{statistics.median(seconds[label]):10.3f}{peaks[label]:10.0f}")
    ratios = sorted(f / e for f, e in zip(seconds["fused"], seconds["eager"], strict=True))
    print(
        f"{'ratio':8}{statistics.median(ratios):10.3f}{peaks['fused'] / peaks['eager']:10.3f}"
        f"   (time {ratios[0]:.3f} to {ratios[-1]:.3f} over {options.rounds} rounds)"
    )


if __name__ == "__main__":
    main()

"""Peak memory and time of a model's training step, as the benchmarks of whole models measure them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

Losses = Callable[[], Tensor]  # a step's loss, a number with a graph


def measure(losses: Losses, rounds: int) -> tuple[float, float, float]:
    """Loss, peak GiB beyond what there is before the step (0 without a GPU), and median seconds."""
    losses().backward()
    before = bytes_before()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        loss = losses()
        loss.backward()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return loss.item(), peak_gib_beyond(before), statistics.median(seconds)


def bytes_before() -> int:
    """What is allocated before a step, with the peak set back; 0 without a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_gib_beyond(before: int) -> float:
    """The peak since `bytes_before`, beyond what it gave."""
    return (torch.cuda.max_memory_allocated() - before) / 2**30

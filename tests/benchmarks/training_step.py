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
    on_gpu = torch.cuda.is_available()
    losses().backward()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        loss = losses()
        loss.backward()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return loss.item(), (torch.cuda.max_memory_allocated() - before) / 2**30, statistics.median(seconds)

"""How the GPU benchmarks measure: every operation in turn, round after round, in alternating order.

A GPU under a power limit runs faster or slower by several per cent with what ran just before: only times
taken in turn in one process can be divided by each other.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

Operations = dict[str, Callable[[], Any]]


def timed(run: Callable[[], Any]) -> float:
    """Milliseconds between two events on the current stream."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def interleaved(operations: Operations, rounds: int) -> dict[str, float]:
    """Median milliseconds of each; it runs once untimed before its timed run of a round."""
    times: dict[str, list[float]] = {name: [] for name in operations}
    for name, run in list(operations.items()):
        try:
            run()
            torch.cuda.synchronize()
        except Exception as error:  # a peer that does not run here must not end the others' measurement
            print(f"{name} does not run: {error!r:.200}")
            del operations[name]
    for number in range(rounds):
        names = list(operations)
        for name in names if number % 2 else reversed(names):
            operations[name]()
            times[name].append(timed(operations[name]))
    return {name: statistics.median(times[name]) for name in operations}

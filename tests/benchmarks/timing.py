"""How the GPU benchmarks measure: every operation in turn, round after round, in alternating order.

A GPU under a power limit runs faster or slower by several per cent with what ran just before: only times
taken in turn in one process can be divided by each other, and a single run after a pause flatters what draws
much power. So each operation runs for a while before and while it is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

Operations = dict[str, Callable[[], Any]]


def _alone(milliseconds: float) -> float:
    return milliseconds


def sustained(run: Callable[[], Any], at_least_ms: float, agreed: Callable[[float], float] = _alone) -> float:
    """Milliseconds of one run, of as many back to back as take the time given; as many before, untimed."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    repeats = max(round(at_least_ms / agreed(start.elapsed_time(stop))), 1)
    for _ in range(repeats):
        run()
    start.record()
    for _ in range(repeats):
        run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / repeats


def interleaved(
    operations: Operations,
    rounds: int,
    at_least_ms: float = 60.0,
    agreed: Callable[[float], float] = _alone,
) -> dict[str, float]:
    """Median milliseconds of each over the rounds.

    `agreed` makes one duration of the ranks' own, so that all of them run a collective equally often.
    """
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
            times[name].append(sustained(operations[name], at_least_ms, agreed))
    return {name: statistics.median(times[name]) for name in operations}

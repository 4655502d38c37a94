"""The comparison as a picture: a step's time and its peak memory, a bar for each head."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from mcore_entropy.cli.benchmark.comparison import Row
from mcore_entropy.cli.benchmark.heads import OURS
from mcore_entropy.cli.benchmark.problem import Problem

_OURS, _OTHERS = "#0b6e99", "#9aa5ad"
_BACKWARD = 0.55  # opacity


def draw(rows: Sequence[Row], problem: Problem, machine: dict[str, str], path: Path) -> None:
    """Write the picture of the heads that were timed; the file's ending says in which format."""
    from matplotlib.figure import Figure  # without pyplot: no display, no state

    timed = [row for row in rows if row.timed][::-1]
    names = [row.name for row in timed]
    colours = [_OURS if row.name == OURS else _OTHERS for row in timed]
    forward = [statistics.median(row.forward_ms) for row in timed]
    backward = [statistics.median(row.backward_ms) for row in timed]
    peaks = [(row.peak_bytes or 0) / 2**20 for row in timed]

    figure = Figure(figsize=(9, 1.9 + 0.45 * len(timed)), layout="constrained")
    time, memory = figure.subplots(1, 2, sharey=True)
    time.barh(names, forward, color=colours)
    bars = time.barh(names, backward, left=forward, color=colours, alpha=_BACKWARD)
    time.bar_label(bars, [f"{statistics.median(row.step_ms):.1f}" for row in timed], padding=3)
    time.set_xlabel("ms a step: forward, then (lighter) backward")
    bars = memory.barh(names, peaks, color=colours)
    memory.bar_label(bars, [f"{peak:.0f}" for peak in peaks], padding=3)
    memory.set_xlabel("peak MiB beyond the inputs")
    for axes in (time, memory):
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{problem.describe()}\n{machine['device']}, torch {machine['torch']}", fontsize=9)
    figure.savefig(path, dpi=150)

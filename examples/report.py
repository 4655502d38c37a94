"""What a run leaves to look at: one JSON line a step, and a plot of loss and entropy."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Step:
    """One iteration; loss and entropy are means over its tokens, in nats."""

    iteration: int
    loss: float
    entropy: float
    learning_rate: float
    tokens: int
    seconds: float


def write_json_lines(steps: Sequence[Any], path: Path) -> None:
    """One line for each step, a dataclass."""
    path.write_text("".join(json.dumps(asdict(step)) + "\n" for step in steps), encoding="utf-8")


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """Each value's mean with its neighbours, up to `reach` on either side; no more after than before it."""
    windows = (values[max(0, i - reach) : i + min(reach, i) + 1] for i in range(len(values)))
    return [math.fsum(window) / len(window) for window in windows]


def plot(steps: Sequence[Step], path: Path, *, vocab_size: int, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    iterations = [step.iteration for step in steps]
    reach = min(5, len(steps) // 20)
    for name, label, color in (
        ("entropy", "entropy of the predicted distribution", "#d1661a"),
        ("loss", "loss: $-\\ln\\,p$(next token)", "#1f5fa8"),
    ):
        values = [getattr(step, name) for step in steps]
        axes.plot(iterations, values, color=color, alpha=0.3 if reach else 0, linewidth=0.9)
        marker = "o" if len(steps) == 1 else None
        axes.plot(iterations, smooth(values, reach), marker=marker, color=color, linewidth=2.0, label=label)
    uniform = math.log(vocab_size)
    axes.axhline(uniform, color="#555555", linestyle=(0, (4, 3)), linewidth=1.0)
    axes.annotate(
        f"$\\ln\\,V$ = {uniform:.2f}: all {vocab_size:,} tokens equally likely",
        (1, uniform),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 4),
        textcoords="offset points",
        horizontalalignment="right",
        color="#555555",
        fontsize=9,
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("iteration" + (f" (thick: mean over {2 * reach + 1})" if reach else ""))
    axes.set_ylabel("nats per token")
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_ylim(bottom=0, top=1.1 * max(uniform, *(step.loss for step in steps)))
    axes.margins(x=0.01)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", frameon=False)
    figure.savefig(path)

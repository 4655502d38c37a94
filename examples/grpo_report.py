"""What GRPO runs leave to look at: TensorBoard's events, and a plot of one run or of several.

python examples/grpo_report.py RUN [RUN ...] --output plot.png     draws finished runs into one plot
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from report import smooth

COLORS = ("#1f5fa8", "#d1661a", "#3b8132", "#7b4fa3")
PANELS = (
    ("reward", "mean reward"),
    ("entropy", "entropy, nats per token"),
    ("distinct_answers", "distinct right answers to a prompt"),
    ("kl", "KL to the reference, nats per token"),
)


@dataclass(frozen=True)
class Step:
    """One iteration: means over its answers, or over their tokens and the updates."""

    iteration: int
    reward: float
    loss: float
    entropy: float
    high_entropy: float
    kl: float
    clip_fraction: float
    zero_gradient: float
    distinct_answers: float
    answer_length: float
    entropy_coeff: float
    gradient_norm: float
    seconds: float


class Log:
    """TensorBoard's events of a run, in FOLDER/tensorboard."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def add(self, step: Step) -> None:
        for name, value in asdict(step).items():
            if name != "iteration":
                self._writer.add_scalar(f"grpo/{name}", value, step.iteration)

    def close(self) -> None:
        self._writer.close()


def mean_step(steps: Sequence[Step]) -> dict[str, float]:
    """Every number's mean over these iterations."""
    rows = [asdict(step) for step in steps]
    return {name: math.fsum(row[name] for row in rows) / len(rows) for name in rows[0]}


def plot(runs: Mapping[str, Sequence[Step]], path: Path, group_size: int | None = None) -> None:
    """A panel for each of PANELS, a line in it for each run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 2, sharex=True)
    for axes, (name, title) in zip(grid.flat, PANELS, strict=True):
        for (label, steps), color in zip(runs.items(), COLORS, strict=False):
            values = [getattr(step, name) for step in steps]
            iterations = [step.iteration for step in steps]
            reach = min(5, len(steps) // 20)
            axes.plot(iterations, values, color=color, alpha=0.25 if reach else 0, linewidth=0.8)
            axes.plot(iterations, smooth(values, reach), color=color, linewidth=2.0, label=label)
        if name == "distinct_answers" and group_size is not None:
            title = f"{title} (of {group_size})"
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_ylim(bottom=0, top=1.02 if name == "reward" else None)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.margins(x=0.01)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[1]:
        axes.set_xlabel("iteration")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.savefig(path)


def read(folder: Path) -> list[Step]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [Step(**json.loads(line)) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder --save of grpo_gpt.py")
    parser.add_argument("--labels", nargs="+", metavar="TEXT", help="of the runs (their folders' names)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    labels = args.labels or [folder.name for folder in args.runs]
    if len(labels) != len(args.runs) or len(args.runs) > len(COLORS):
        parser.error(f"at most {len(COLORS)} runs, and a label for each")
    try:
        runs = {label: read(folder) for label, folder in zip(labels, args.runs, strict=True)}
    except OSError as error:
        parser.error(f"cannot read {error.filename}: {error.strerror}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    plot(runs, args.output)


if __name__ == "__main__":
    main()

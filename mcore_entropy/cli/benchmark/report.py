"""The comparison's result for people, as a table and one sentence, and for programs, as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mcore_entropy.cli.benchmark.comparison import Row
from mcore_entropy.cli.benchmark.heads import EAGER, OURS
from mcore_entropy.cli.benchmark.problem import Problem

_MIB = 2**20
# Ratios to eager between which nobody would notice a difference.
_SAME_TIME = (0.95, 1.05)
_LESS_MEMORY = 0.9


def table(rows: Sequence[Row], problem: Problem) -> Group:
    """A line for each head that was right, and one for each that was not, with its reason."""
    eager = _row(rows, EAGER)
    shown = Table(pad_edge=False, box=None, header_style="bold")
    shown.add_column("\nhead", no_wrap=True)
    for heading in (
        "forward\nms",
        "backward\nms",
        "both\nms",
        "÷\neager",
        "peak\nMiB",
        "÷\neager",
        "\nerror",
    ):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row.timed:
            shown.add_row(escape(row.name), *_times(row, eager), *_memory(row, eager), _error(row))
        elif row.reason is None:
            shown.add_row(escape(row.name), *6 * ("",), _error(row))
    parts: list[Any] = [shown]
    partly = [row for row in rows if row.reason is None and len(row.gives) == 1]
    for row in partly:
        what = {"loss": "the mean loss", "log_probs": "log-prob"}[row.gives[0]]
        parts.append(Text(f"{row.name} gives {what} alone, no entropy."))
    parts += [Text(f"{row.name}: {row.reason}") for row in rows if row.reason is not None]
    if any(row.timed for row in rows):
        gradients = problem.gradient_bytes / _MIB
        parts.append(
            Text(
                "Times are medians over the rounds, forward with a graph; a peak is what a step holds beyond "
                f"its inputs, of which the gradients it ends with are {gradients:.0f} MiB.",
                style="dim",
            )
        )
    parts.append(
        Text(
            "Error: the largest against fp64, as a share of the largest value or of a gradient's row's norm.",
            style="dim",
        )
    )
    return Group(*parts)


def _times(row: Row, eager: Row | None) -> list[str]:
    medians = [statistics.median(times) for times in (row.forward_ms, row.backward_ms, row.step_ms)]
    ratio = ""
    if eager is not None and eager.timed:
        ratio = f"{statistics.median(row.ratios_to(eager)):.2f}"
    return [*(f"{milliseconds:.1f}" for milliseconds in medians), ratio]


def _memory(row: Row, eager: Row | None) -> list[str]:
    assert row.peak_bytes is not None
    ratio = ""
    if eager is not None and eager.timed and eager.peak_bytes:
        ratio = f"{row.peak_bytes / eager.peak_bytes:.2f}"
    return [f"{row.peak_bytes / _MIB:.0f}", ratio]


def _error(row: Row) -> str:
    return f"{max(row.errors.values()):.0e}"


def verdict(rows: Sequence[Row]) -> str:
    """Whether ours helps here, in one sentence."""
    ours, eager = _row(rows, OURS), _row(rows, EAGER)
    assert ours is not None
    if ours.reason is not None:
        return (
            f"mcore-entropy does not work here ({ours.reason}): please report it with `mcore-entropy doctor`."
        )
    if not ours.timed:
        return "mcore-entropy is right here; nothing was timed."
    assert ours.peak_bytes is not None
    peak = f"{ours.peak_bytes / _MIB:.0f} MiB"
    if eager is None:
        return f"mcore-entropy runs here with a peak of {peak}; eager was not asked for."
    if not eager.timed:
        return f"Eager does not run at this size ({eager.reason}); mcore-entropy does, with a peak of {peak}."
    assert eager.peak_bytes is not None
    time = statistics.median(ours.ratios_to(eager))
    memory = ours.peak_bytes / eager.peak_bytes
    in_time = f"in {time:.2f} of its time"
    if _SAME_TIME[0] <= time <= _SAME_TIME[1]:
        in_time = "in the same time"
    if memory <= _LESS_MEMORY:
        change = f"the head's peak falls from {eager.peak_bytes / _MIB:.0f} to {peak}"
        if time <= _SAME_TIME[1]:
            return f"It helps here: against eager {change}, {in_time}."
        return f"It helps here where memory is short: against eager {change}, {in_time}."
    if time < _SAME_TIME[0]:
        return (
            f"It helps here, in time alone: it does eager's work {in_time}, with {memory:.2f} of its memory."
        )
    return (
        f"It does not help at this size: {memory:.2f} of eager's memory, {in_time}; it pays off with more "
        "tokens or a larger vocabulary."
    )


def as_json(rows: Sequence[Row], problem: Problem, machine: dict[str, str], rounds: int) -> dict[str, Any]:
    """Everything that was measured; null for what was not, and for errors that are no number."""
    eager = _row(rows, EAGER)
    return {
        "machine": machine,
        "problem": {
            "tokens": problem.tokens,
            "hidden_size": problem.hidden_size,
            "vocab_size": problem.vocab_size,
            "dtype": str(problem.dtype).removeprefix("torch."),
            "device": str(problem.device),
            "tensor_parallel": problem.ranks,
            "masked": problem.masked,
            "gradient_bytes": problem.gradient_bytes,
        },
        "rounds": rounds,
        "heads": [_head_as_json(row, eager) for row in rows],
        "verdict": verdict(rows),
    }


def _head_as_json(row: Row, eager: Row | None) -> dict[str, Any]:
    errors = {name: error if math.isfinite(error) else None for name, error in row.errors.items()}
    found: dict[str, Any] = {
        "name": row.name,
        "gives": list(row.gives),
        "reason": row.reason,
        "errors": errors,
    }
    if not row.timed:
        return found
    found |= {
        "forward_ms": statistics.median(row.forward_ms),
        "backward_ms": statistics.median(row.backward_ms),
        "both_ms": statistics.median(row.step_ms),
        "both_ms_of_rounds": row.step_ms,
        "peak_bytes": row.peak_bytes,
    }
    if eager is not None and eager.timed and row.peak_bytes is not None and eager.peak_bytes:
        ratios = row.ratios_to(eager)
        found["time_to_eager"] = statistics.median(ratios)
        found["time_to_eager_range"] = [min(ratios), max(ratios)]
        found["memory_to_eager"] = row.peak_bytes / eager.peak_bytes
    return found


def _row(rows: Sequence[Row], name: str) -> Row | None:
    return next((row for row in rows if row.name == name), None)

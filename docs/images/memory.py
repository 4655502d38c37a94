"""Draws memory.png: the peaks of an RL update step, out of the table in docs/performance.md.

python docs/images/memory.py
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parents[1]
HEADS = (
    "eager fp32",
    "chunked and checkpointed entropy",
    "torch.compile of the eager head",
    "**swapped head**",
)


def peaks(model: str) -> dict[str, float]:
    """GiB of each head's update, from the model's rows "| model | head | ms, GiB | …"."""
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    section = text.split("## An RL update step on one H200")[1]
    rows = section.split(f"| {model} |", 1)[1]
    found = {}
    for head in HEADS:
        match = re.search(rf"{re.escape(head)} \| \**[\d.]+, ([\d.]+)", rows)
        if match is None:
            raise SystemExit(f"docs/performance.md has no row of {head!r} for {model!r} any more")
        found[head.strip("*")] = float(match[1])
    return found


def main() -> None:
    found = peaks("0.5B, 16384")
    figure, axes = plt.subplots(figsize=(7.5, 2.3), dpi=130)
    bars = axes.barh(list(found), list(found.values()), color=["#9aa5b1"] * 3 + ["#1f6feb"])
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.invert_yaxis()
    axes.set_xlim(0, max(found.values()) * 1.1)
    axes.set_xlabel("peak GiB beyond weights and gradients")
    axes.set_title("RL update, Qwen2.5-0.5B's shapes, 16384 tokens, bf16, one H200", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / "images/memory.png", bbox_inches="tight")


if __name__ == "__main__":
    main()

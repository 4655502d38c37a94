"""Examples as users run them: in processes of their own, under torchrun or without."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_example(
    program: str, *arguments: str, ranks: int | None = 2, cwd: Path
) -> subprocess.CompletedProcess[str]:
    """`torchrun PROGRAM`, or `python PROGRAM` for ranks=None; on the CPU, in `cwd`."""
    # Under `torchrun -m pytest` the environment is that of a rank.
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cwd)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    launcher = []
    if ranks is not None:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / program), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,  # a hang, not a busy machine
    )


def metrics(folder: Path) -> list[dict[str, float]]:
    """What a run left in metrics.jsonl, a step each."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_learns(steps: list[dict[str, float]], *, iterations: int, vocabulary: int) -> None:
    """Loss and entropy start at ln V, where every token is equally likely, and fall."""
    assert [step["iteration"] for step in steps] == list(range(1, iterations + 1))
    uniform = math.log(vocabulary)
    assert all(0 < step["entropy"] <= uniform for step in steps)
    assert steps[0]["loss"] == pytest.approx(uniform, abs=0.3)
    assert steps[0]["entropy"] == pytest.approx(uniform, abs=0.1)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert steps[-1]["entropy"] < steps[0]["entropy"] - 0.1

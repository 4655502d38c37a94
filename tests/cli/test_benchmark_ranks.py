"""`mcore-entropy benchmark` on two ranks: what fails or is wrong on one is measured on none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        [*TORCHRUN, *arguments], capture_output=True, text=True, check=False, timeout=200, env=environment
    )


def test_a_head_that_fails_on_one_rank_is_measured_on_none(tmp_path: Path) -> None:
    result = torchrun("-m", "tests.cli.planted", str(tmp_path / "rows"))
    assert result.returncode == 0, result.stderr
    first, second = (json.loads((tmp_path / f"rows.{rank}").read_text()) for rank in (0, 1))
    assert first == second
    reasons = {name: reason for name, (reason, _, _) in first.items()}
    assert reasons["fails_in_forward"] == "on rank 1 of 2: RuntimeError: planted"
    assert reasons["fails_in_backward"] == "on rank 0 of 2: out of memory"
    assert reasons["wrong_on_one"].startswith("wrong: entropy is off by 1")
    assert reasons["fails_when_timed"] == "on rank 1 of 2: RuntimeError: planted late"
    assert {name for name, (_, _, timed) in first.items() if timed} == {"eager", "mcore-entropy"}
    assert first["eager"] == first["mcore-entropy"] == [None, 2, True]


def test_command_under_torchrun(tmp_path: Path) -> None:
    size = ["--tokens", "64", "--hidden-size", "16", "--vocab-size", "256", "--repeats", "1"]
    path = tmp_path / "result.json"
    options = ["--tensor-parallel", "2", "--heads", "eager,mcore-entropy", "--masked", "0.5"]
    result = torchrun("-m", "mcore_entropy.cli", "benchmark", *size, *options, "--json", str(path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("64 tokens") == 1  # one rank speaks
    found = json.loads(path.read_text())
    assert found["problem"]["tensor_parallel"] == 2
    assert [head["reason"] for head in found["heads"]] == [None, None]
    assert "Traceback" not in result.stderr


def test_a_users_mistake_is_told_once() -> None:
    result = torchrun("-m", "mcore_entropy.cli", "benchmark", "--vocab-size", "255")
    assert result.returncode != 0  # torchrun's own
    assert result.stderr.count("expected a multiple of the 2 ranks, got 255") == 1

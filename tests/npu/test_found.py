"""What is said about Ascend's software where it is missing, broken or there; and the self-check."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_entropy.adapters import npu
from tests.npu.operator import registered


def run_it(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mcore_entropy.adapters.npu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def installed(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    """torch-npu is installed, and importing it does this."""
    monkeypatch.setattr(npu, "version", lambda _: "2.13.0")
    monkeypatch.setattr(npu.importlib.util, "find_spec", lambda _: object())

    def import_module(_: str) -> Any:
        if error is not None:
            raise error

    monkeypatch.setattr(npu.importlib, "import_module", import_module)


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(npu, "version", missing)
    here = npu.found()
    assert not here.usable
    assert here.torch_npu.startswith("not installed: pip install torch-npu")
    assert "torch has no operator" in here.fused_cross_entropy


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libhccl.so: cannot open shared object file: No such file or directory"),
        RuntimeError("Failed to load the backend extension: torch_npu"),
        OSError("libascendcl.so"),
    ],
    ids=["ImportError", "RuntimeError", "OSError"],
)
def test_installed_without_a_driver(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, error)
    here = npu.found()
    assert not here.usable
    assert here.torch_npu == f"2.13.0, which cannot be imported: {error}"


@pytest.mark.parametrize("available", [False, True])
def test_installed(available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    fake = SimpleNamespace(is_available=lambda: available, get_device_name=lambda _: "Ascend910B3")
    monkeypatch.setattr(torch, "npu", fake, raising=False)
    monkeypatch.setenv("HCCL_DETERMINISTIC", "true")
    with registered():
        here = npu.found()
    assert here.usable is available
    assert here.device == ("Ascend910B3" if available else here.device)
    assert available or "set_env.sh" in here.device
    assert here.fused_cross_entropy == "available"
    assert here.settings["HCCL_DETERMINISTIC"] == "true"


def test_self_check_rehearsed_on_the_cpu(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run = run_it("--self-check", "--device", "cpu", "--report", str(report))
    assert run.returncode == 0, run.stdout + run.stderr
    written = json.loads(report.read_text())
    assert len(written["checks"]) == 21
    assert all(check["passed"] for check in written["checks"])
    assert written["found"]["torch"] == torch.__version__


def test_without_a_device_there_is_nothing_to_check() -> None:
    run = run_it("--self-check")
    assert run.returncode == 1
    assert "There is no NPU to check" in run.stdout
    assert run.stderr == ""

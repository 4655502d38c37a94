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
from mcore_entropy.self_check import Result
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
        AttributeError("module 'torch' has no attribute '_C_something'"),
    ],
    ids=["ImportError", "RuntimeError", "OSError", "AttributeError"],
)
def test_installed_without_a_driver(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, error)
    monkeypatch.setattr(torch, "__version__", "2.13.1+cpu")
    here = npu.found()
    assert not here.usable
    assert here.torch_npu == f"2.13.0, which cannot be imported: {type(error).__name__}: {error}"


def test_torch_npu_of_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, ImportError("undefined symbol"))
    monkeypatch.setattr(torch, "__version__", "2.8.0+cpu")
    assert npu.found().torch_npu.endswith("it is for torch 2.13, and torch is 2.8.0+cpu")


def test_a_device_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_device_name(_: int) -> str:
        raise RuntimeError("aclInit, error code 507008")

    installed(monkeypatch, None)
    fake = SimpleNamespace(is_available=lambda: True, get_device_name=get_device_name)
    monkeypatch.setattr(torch, "npu", fake, raising=False)
    here = npu.found()
    assert not here.usable
    assert here.device == "none: the first NPU cannot be used: RuntimeError: aclInit, error code 507008"


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
    assert written["device"] == "cpu"
    assert "This was a rehearsal" in run.stdout
    assert "Please send" not in run.stdout


def test_a_rehearsal_leaves_the_operator_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch-npu's has no form for the CPU."""
    asked = []
    monkeypatch.setattr(
        npu, "run_checks", lambda device, backends, dtypes, runs: asked.extend(backends) or []
    )
    with registered():
        npu.main(["--self-check", "--device", "cpu", "--report", str(tmp_path / "report.json")])
    assert asked == ["npu"]


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    """It is said after the first check, without a traceback."""
    run = run_it("--self-check", "--device", "cpu", "--report", str(tmp_path))
    assert run.returncode == 1
    assert "The report cannot be written" in run.stdout.splitlines()[-1]
    assert run.stderr == ""


def test_the_report_so_far_survives_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any, **__: Any) -> Any:
        yield Result("the first", True, "")
        raise SystemExit("an abort")

    monkeypatch.setattr(npu, "run_checks", crash)
    report = tmp_path / "report.json"
    with pytest.raises(SystemExit, match="an abort"):
        npu.main(["--self-check", "--device", "cpu", "--report", str(report)])
    assert [check["name"] for check in json.loads(report.read_text())["checks"]] == ["the first"]


@pytest.mark.parametrize("device", ["cuda", "banana"])
def test_a_device_of_another_kind(device: str) -> None:
    run = run_it("--self-check", "--device", device)
    assert run.returncode == 2
    assert f"--device: expected npu, npu:1 and so on, or cpu, got {device}" in run.stderr


@pytest.mark.parametrize("device", ["npu", "npu:1"])
def test_without_a_device_there_is_nothing_to_check(device: str) -> None:
    run = run_it("--self-check", "--device", device)
    assert run.returncode == 1
    assert "There is no NPU to check" in run.stdout
    assert run.stderr == ""

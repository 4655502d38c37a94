"""`mcore-entropy doctor`: what it says of a machine in order and of one where something is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_entropy.adapters import npu
from mcore_entropy.cli import doctor
from mcore_entropy.cli.doctor import Finding, State
from tests.unit.cases import put_torch_backend_off

COMMAND = [sys.executable, "-m", "mcore_entropy.cli"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MCORE_ENTROPY_")}
    clean |= {"COLUMNS": "200", **environment}
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, env=clean)


def wrong(findings: Any) -> list[Finding]:
    return [finding for finding in findings if finding.state is State.WRONG]


def test_a_machine_in_order() -> None:
    result = run("doctor", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    found = {(line["section"], line["name"]): line for line in json.loads(result.stdout)}
    assert found["Versions", "torch"]["text"].startswith(torch.__version__)
    assert found["Versions", "megatron-core"]["text"] == version("megatron-core")
    assert "backend torch" in found["Devices", "cpu"]["text"]
    assert found["Megatron", "swap_output_layer"]["state"] == "ok"
    assert "agree with dense fp64 in 14 checks" in found["Self-test", "cpu"]["text"]


def test_a_variable_that_nothing_reads() -> None:
    result = run("doctor", MCORE_ENTROPY_CHECK="1")
    assert result.returncode == 1
    (line,) = [line for line in result.stdout.splitlines() if "WRONG" in line]
    assert (
        " ".join(line.split()) == "WRONG MCORE_ENTROPY_CHECK nothing reads it; known are MCORE_ENTROPY_CHECKS"
    )
    assert "Traceback" not in result.stderr


def test_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("MCORE_ENTROPY_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MCORE_ENTROPY_CHECKS", "yes")
    (finding,) = wrong(doctor._switches())
    assert "expected 0 or 1, got 'yes'" in finding.text
    monkeypatch.setenv("MCORE_ENTROPY_CHECKS", "1")
    assert not wrong(doctor._switches())


def test_the_default_that_torch_npu_sets_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def named() -> list[str]:
        return [finding.name for finding in doctor._switches()]

    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in named()
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in named()


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_a_gpu_that_torch_cannot_use(cuda: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (finding,) = wrong(doctor._devices())
    assert ("the driver does not answer it" if cuda else "built without CUDA") in finding.text


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_gpu_that_is_hidden_from_torch(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert not wrong(doctor._devices())


def test_an_npu_without_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(npu, "version", missing)
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/davinci_manager")
    (finding,) = wrong(doctor._npu())
    assert "there is an Ascend NPU, and torch-npu is not installed" in finding.text


def test_a_triton_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise AttributeError("module 'triton' has no attribute 'jit'")

    monkeypatch.setattr(doctor, "select", broken)
    (finding,) = wrong([doctor._backend_of(torch.device("cpu"), "a CPU")])
    assert "AttributeError: module 'triton' has no attribute 'jit'; reinstall triton" in finding.text


def test_torch_npu_without_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> Any:
        raise ImportError("libhccl.so: cannot open shared object file")

    monkeypatch.setattr(npu, "version", lambda _: "2.13.0")
    monkeypatch.setattr(npu.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(npu.importlib, "import_module", import_module)
    (finding,) = wrong(doctor._npu())
    assert "libhccl.so" in finding.text
    assert "set_env.sh, install the torch-npu of torch's version, or uninstall torch-npu" in finding.text
    assert finding.text.count("libhccl.so") == 1


def test_megatron_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'packaging'")

    monkeypatch.setattr(doctor.importlib, "import_module", import_module)
    (finding,) = wrong(doctor._megatron())
    assert "No module named 'packaging'" in finding.text
    assert "pip install 'mcore-entropy[megatron]'" in finding.text


def test_megatron_without_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Models:
        class GPTModel:
            def forward(self) -> None: ...

    monkeypatch.setattr(doctor.importlib, "import_module", lambda name: Models)
    (finding,) = wrong(doctor._megatron())
    assert "has no _postprocess and no compute_language_model_loss" in finding.text


def test_without_optional_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        if package == "mcore-entropy":
            return "0.1.0"
        raise PackageNotFoundError

    monkeypatch.setattr(doctor, "version", missing)
    monkeypatch.setattr(npu, "version", missing)
    found = [*doctor._versions(), *doctor._devices(), *doctor._megatron()]
    assert not wrong(found)
    assert "pip install 'mcore-entropy[megatron]'" in " ".join(finding.text for finding in found)


def test_a_backend_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    put_torch_backend_off(monkeypatch)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = wrong(doctor._self_test())
    assert any("logits: values" in finding.text for finding in found)


def test_without_typer() -> None:
    code = "import sys; sys.modules['typer'] = None; from mcore_entropy.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "mcore-entropy's command line needs typer: pip install 'mcore-entropy[cli]'\n"

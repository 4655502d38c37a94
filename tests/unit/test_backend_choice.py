"""Which backend a call gets, and what is refused by name."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

import mcore_entropy as me
from mcore_entropy import backends
from tests.unit.cases import make_linear, make_target

CPU = torch.device("cpu")


def test_torch_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert backends.select(me.Execution(), CPU, torch.bfloat16).name == "torch"


def test_triton_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match=r"'triton' cannot run here: it needs an NVIDIA GPU.*on cpu"):
        backends.select(me.Execution(backend="triton"), CPU, torch.bfloat16)


def test_triton_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'mcore-entropy\[triton\]'"):
        backends.select(me.Execution(backend="triton"), CPU, torch.bfloat16)


def test_older_gpus_get_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    gpu = torch.device("cuda", 0)
    assert backends.select(me.Execution(), gpu, torch.float16).name == "torch"
    with pytest.raises(ValueError, match=r"8\.0 or newer, and cuda:0 has 7\.5"):
        backends.select(me.Execution(backend="triton"), gpu, torch.float16)


def test_fp64_is_torchs() -> None:
    with pytest.raises(ValueError, match="its statistics are fp32, and the tensors are fp64"):
        backends.select(me.Execution(backend="triton"), CPU, torch.float64)


def test_unknown() -> None:
    with pytest.raises(ValueError, match=r"'auto' or one of \['torch', 'triton', 'npu', .*, got 'cuda'"):
        backends.select(me.Execution(backend="cuda"), CPU, torch.float32)


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter's backend keeps logits"
)
def test_torch_keeps_no_logits() -> None:
    hidden, weight, _ = make_linear(torch.bfloat16)
    with pytest.raises(ValueError, match="logits_budget_mib: expected 0 on the torch backend"):
        me.linear_log_probs_and_entropy(
            hidden, weight, make_target((24,), 517), execution=me.Execution(logits_budget_mib=1)
        )

"""The self-check on the CPU: it passes, and it finds a backend that is a little off and one that raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcore_entropy.backends import TorchBackend
from mcore_entropy.self_check import run_checks
from tests.unit.cases import put_torch_backend_off


def test_it_passes() -> None:
    results = list(
        run_checks(torch.device("cpu"), ["torch"], [torch.float32, torch.float16, torch.bfloat16], runs=2)
    )
    assert len(results) == 21
    assert [result.line() for result in results if not result.passed] == []


def test_it_finds_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is a little off, and one that raises."""
    put_torch_backend_off(monkeypatch)
    results = list(run_checks(torch.device("cpu"), ["torch"], [torch.float32, torch.bfloat16], runs=2))
    assert not any(result.passed for result in results if result.name.endswith(": values"))

    def broken(*_: Any) -> Any:
        raise RuntimeError("AI Core exception")

    monkeypatch.setattr(TorchBackend, "tile_statistics", staticmethod(broken))
    results = list(run_checks(torch.device("cpu"), ["torch"], [torch.float32, torch.bfloat16], runs=2))
    assert not any(result.passed for result in results)
    assert results[0].detail == "RuntimeError: AI Core exception"

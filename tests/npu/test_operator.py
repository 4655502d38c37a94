"""The npu backend with Ascend's operator, which a CPU implementation of its contract stands for."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_entropy as me
from mcore_entropy import backends
from mcore_entropy.backends.npu import cross_entropy
from tests.npu import operator
from tests.unit.cases import check_linear, check_logits, make_linear, make_logits, make_target

NPU: Any = SimpleNamespace(type="npu")  # torch knows this type of device once torch-npu is imported
FUSED = me.Execution(backend="npu_fused")
METRICS = ("sum_pi_squared", "varentropy", "max_prob")


@pytest.fixture(autouse=True)
def _operator() -> Iterator[None]:
    with operator.registered():
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("metrics", [(), METRICS])
def test_logits_against_fp64(dtype: torch.dtype, metrics: tuple[str, ...]) -> None:
    x = make_logits(301, dtype)
    target = make_target(x.shape[:-1], 301)
    mask = torch.arange(target.numel()).view(target.shape) % 3 != 0
    check_logits(
        "log-probs and entropy", x, target, execution=FUSED, metrics=metrics, temperature=0.7, mask=mask
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_head_against_fp64(dtype: torch.dtype) -> None:
    hidden, weight, bias = make_linear(dtype)
    execution = me.Execution(backend="npu_fused", workspace_mib=1)
    target = make_target(hidden.shape[:-1], weight.shape[0])
    check_linear(hidden, weight, target, bias=bias, softcap=5.0, execution=execution, metrics=METRICS)


def test_an_offset_costs_nothing() -> None:
    """ln S is the loss itself: no difference of large numbers."""
    x = make_logits(301, torch.float32) + 500.0
    check_logits("log-probs and entropy", x, make_target(x.shape[:-1], 301), execution=FUSED)


def test_rows_that_are_odd() -> None:
    x = torch.randn(5, 7)
    x[1] = -torch.inf
    x[2, :6] = -torch.inf
    x[3, 2] = torch.nan
    x[4, 2] = torch.inf
    target = torch.tensor([0, 1, 6, 2, 2])
    ours, torchs = (
        me.vocab_parallel_log_probs_and_entropy(x, target, metrics=METRICS, execution=me.Execution(backend=b))
        for b in ("npu_fused", "torch")
    )
    for name in ("log_probs", "entropy"):
        value = getattr(ours, name)
        assert value[2] == 0
        assert value[[1, 3, 4]].isnan().all()
        torch.testing.assert_close(value, getattr(torchs, name), equal_nan=True)


def test_labels_stay_inside_and_rows_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in faults on either; ignored and foreign targets, and more rows than fit one call."""
    monkeypatch.setattr(cross_entropy, "MOST_ROWS", 10)
    monkeypatch.setattr(operator, "MOST_ROWS", 10)
    x = make_logits(301, torch.float32)
    target = make_target(x.shape[:-1], 301)
    target.view(-1)[:3] = -100
    check_logits("log-probs and entropy", x, target, execution=FUSED)


def test_an_empty_call() -> None:
    result = me.vocab_parallel_log_probs_and_entropy(
        torch.zeros(0, 5), torch.zeros(0, dtype=torch.long), execution=FUSED
    )
    assert result.log_probs.shape == result.entropy.shape == (0,)


def test_the_operator_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    op = torch.ops.npu.npu_cross_entropy_loss

    def seen(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(x.shape)
        return op(x, *args, **kwargs)

    monkeypatch.setattr(torch.ops.npu, operator.NAME, seen)
    x = torch.randn(4, 9)
    me.vocab_parallel_entropy(x, execution=FUSED)
    assert calls == [(4, 9)]
    me.vocab_parallel_entropy(x, execution=me.Execution(backend="npu"))
    assert len(calls) == 1


def test_traps_of_the_stand_in() -> None:
    """It rounds, faults and does not differentiate as the documentation says of the operator."""
    op = torch.ops.npu.npu_cross_entropy_loss
    x = torch.randn(3, 50).bfloat16()
    loss, log_p, *_ = op(x, torch.tensor([0, 1, 2]), reduction="none")
    assert loss.dtype == log_p.dtype == torch.bfloat16
    assert op(x, torch.tensor([0, 1, 2]))[0].shape == (1,)
    for label in (-100, 50):
        with pytest.raises(operator.Fault, match="outside"):
            op(x, torch.tensor([0, 1, label]), reduction="none")


def test_which_backend_is_chosen() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert backends.select(me.Execution(), NPU, dtype).name == "npu"
    assert backends.select(FUSED, NPU, torch.float32).name == "npu_fused"
    with pytest.raises(ValueError, match="'npu_fused' cannot run here: its operator does not take fp64"):
        backends.select(FUSED, NPU, torch.float64)
    with pytest.raises(ValueError, match="expected 0 on the npu backend"):
        backends.select(me.Execution(backend="npu", logits_budget_mib=1), NPU, torch.float32)

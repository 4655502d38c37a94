"""A constant added to all logits of a row changes nothing, so a row's gradient sums to zero."""

from __future__ import annotations

import pytest
import torch

from tests.metamorphic.calls import (
    COLUMNS,
    WIDTH,
    N,
    assert_close,
    assert_same,
    evaluate,
    make_call,
    make_call_on_grid,
    on_grid,
    rounding,
    truth_of,
)
from tests.unit.cases import DTYPES, dtype_name

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
# Multiples of the grid's step that bf16 holds, and the grid's numbers beside them.
SHIFTS = torch.tensor([0.0, 32.0, -40.0, 16.0]).repeat(N // 4)[:, None]


@every_dtype
def test_logits_to_the_bit(dtype: torch.dtype) -> None:
    """z - m is exact, and so is the same."""
    call = make_call_on_grid("logits", dtype)
    x = call.inputs["logits"]
    shifted = x + SHIFTS.to(dtype)
    assert torch.equal(shifted.double(), x.double() + SHIFTS)
    assert_same(evaluate(call), evaluate(call.given(logits=shifted)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
@pytest.mark.parametrize("shift", [2.0**15, -(2.0**15)])
def test_logits_by_much_to_the_bit(dtype: torch.dtype, shift: float) -> None:
    """An uncentred T would lose all its digits."""
    call = make_call_on_grid("logits", dtype)
    assert_same(evaluate(call), evaluate(call.given(logits=call.inputs["logits"] + shift)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
@pytest.mark.parametrize("shift", [0.3, -77.7, 500.1])
def test_logits_within_rounding(dtype: torch.dtype, shift: float) -> None:
    """The sum of a logit and the constant is rounded: half an ulp of the largest |z|."""
    call = make_call("logits", dtype)
    shifted = call.given(logits=call.inputs["logits"] + shift)
    assert_close(shifted, evaluate(call), evaluate(shifted))


@every_dtype
def test_a_constant_in_the_bias_to_the_bit(dtype: torch.dtype) -> None:
    call = make_call_on_grid("head", dtype)
    shifted = call.given(bias=call.inputs["bias"] + 16)
    assert_same(evaluate(call), evaluate(shifted))


@every_dtype
def test_one_vector_added_to_every_row_of_the_weight(dtype: torch.dtype) -> None:
    """It adds hidden times that vector to all logits of a token. Hidden's gradient gains the vector times
    the sum of the logits' gradient, which is zero in exact arithmetic alone."""
    call = make_call_on_grid("head", dtype)
    vector = on_grid(WIDTH, step=0.25, most=2.0, dtype=dtype, seed=5)
    shifted = call.given(weight=call.inputs["weight"] + vector)
    results, others = evaluate(call), evaluate(shifted)
    assert_same(results, others, tuple(name for name in results if name != "d hidden"))
    assert_close(shifted, results, others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
def test_a_rows_gradient_sums_to_zero(dtype: torch.dtype) -> None:
    call = make_call("logits", dtype)
    total = evaluate(call)["d logits"].double().sum(-1)
    unit = torch.finfo(dtype).eps
    allowed = rounding(call)["d logits"].sum(-1) + COLUMNS * unit * truth_of(call).sizes["logits"].sum(-1)
    assert bool((total.abs() <= allowed).all())

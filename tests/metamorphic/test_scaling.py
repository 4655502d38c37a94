"""Factors that cancel: temperature and logits, a transform and its logits, hidden and weight, upstream.

A power of two moves exponents alone, so that both sides are the same to the bit. (Not where a gradient
leaves its dtype's normal range.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import reference as ref
from tests.metamorphic.calls import (
    Call,
    N,
    Results,
    assert_close,
    assert_same,
    evaluate,
    make_call,
    make_call_on_grid,
    results_of,
    rounding,
)
from tests.unit.cases import DTYPES, dtype_name

# fp16's gradients are subnormal where p is small, and lose bits there.
every_dtype = pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float16], ids=dtype_name)
every_form = pytest.mark.parametrize("form", ["logits", "head"])
WIDE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)


def with_logits_times(call: Call, factor: float | torch.Tensor) -> Call:
    """The same call of logits that are `factor` (a number, or one a token) times these."""
    per_row = torch.as_tensor(factor, dtype=call.dtype).reshape(-1, 1)
    if "logits" in call.inputs:
        return call.given(logits=call.inputs["logits"] * per_row)
    assert isinstance(factor, float), "a bias cannot be scaled token by token"
    scaled = {name: x * factor for name, x in call.inputs.items() if name != "hidden"}
    return call.given(**scaled)


def carried_back(results: Results, factor: float | torch.Tensor) -> Results:
    """Gradients for the logits before `with_logits_times`; hidden's is the same either way."""
    per_row = torch.as_tensor(factor, dtype=torch.float64).reshape(-1, 1)
    factors = {"d logits": per_row, "d weight": per_row, "d bias": per_row[0]}
    return {
        name: (x.double() * factors[name]).to(x.dtype) if name in factors else x
        for name, x in results.items()
    }


@every_dtype
@every_form
@pytest.mark.parametrize("tau", [0.25, 0.5, 2.0, 4.0])
def test_temperature_of_a_power_of_two_to_the_bit(form: str, dtype: torch.dtype, tau: float) -> None:
    call = make_call(form, dtype)
    divided = evaluate(with_logits_times(call, 1 / tau))
    assert_same(evaluate(call.with_options(temperature=tau)), carried_back(divided, 1 / tau))


@every_dtype
def test_temperature_of_each_token_to_the_bit(dtype: torch.dtype) -> None:
    tau, call = torch.tensor([0.5, 1.0, 2.0, 4.0]).repeat(N // 4), make_call("logits", dtype)
    divided = evaluate(with_logits_times(call, 1 / tau))
    assert_same(evaluate(call.with_options(temperature=tau)), carried_back(divided, 1 / tau))


@WIDE
@every_form
@pytest.mark.parametrize("tau", [0.3, 0.7, 1.1, 3.0])
def test_any_temperature_within_rounding(form: str, dtype: torch.dtype, tau: float) -> None:
    call = make_call(form, dtype)
    at_tau, divided = call.with_options(temperature=tau), evaluate(with_logits_times(call, 1 / tau))
    assert_close(at_tau, evaluate(at_tau), carried_back(divided, 1 / tau))


@every_form
def test_one_temperature_for_all_or_for_each(form: str) -> None:
    """A number, or a tensor of none or of one dimension."""
    call = make_call(form, torch.float32)
    number = evaluate(call.with_options(temperature=0.7))
    assert_same(number, evaluate(call.with_options(temperature=torch.full((N,), 0.7))))
    assert_same(number, results_of(call, call.inputs, temperature=torch.tensor(0.7)))


TRANSFORMS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    # Options of one side; of the other, whose logits are times a factor.
    "a scale is a temperature's inverse": ({"scale": 2.0}, {"temperature": 0.5}, 1.0),
    "a scale is a factor on the logits": ({"scale": 0.25}, {}, 0.25),
    "a scale before a softcap": ({"scale": 4.0, "softcap": 30.0}, {"softcap": 30.0}, 4.0),
    "a softcap with its logits": (
        {"softcap": 5.0, "temperature": 0.7},
        {"softcap": 10.0, "temperature": 1.4},
        2.0,
    ),
    "a scale with a softcap and a temperature": (
        {"scale": 0.5, "softcap": 15.0, "temperature": 2.0},
        {"scale": 1.0, "softcap": 15.0, "temperature": 2.0},
        0.5,
    ),
}


@every_dtype
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_to_the_bit(name: str, dtype: torch.dtype) -> None:
    options, others, factor = TRANSFORMS[name]
    call = make_call("head", dtype)
    scaled = evaluate(with_logits_times(call, factor).with_options(**others))
    assert_same(evaluate(call.with_options(**options)), carried_back(scaled, factor))


@WIDE
def test_a_softcap_far_above_the_logits_is_none(dtype: torch.dtype) -> None:
    """softcap tanh(l / softcap) is l (1 - (l / softcap)^2 / 3), below an ulp here."""
    call = make_call("head", dtype)
    softcap = 2.0**20 if dtype == torch.float32 else 2.0**36
    assert_close(call, evaluate(call), evaluate(call.with_options(softcap=softcap)))


@every_dtype
@pytest.mark.parametrize("factor", [0.125, 2.0, 16.0])
def test_hidden_times_a_factor_and_weight_over_it_to_the_bit(dtype: torch.dtype, factor: float) -> None:
    call = make_call("head", dtype)
    hidden, weight = call.inputs["hidden"] * factor, call.inputs["weight"] / factor
    others = evaluate(call.given(hidden=hidden, weight=weight))
    others["d hidden"] = others["d hidden"] * factor
    others["d weight"] = others["d weight"] / factor
    assert_same(evaluate(call), others)


@every_dtype
@every_form
def test_gradients_are_linear_in_upstream(form: str, dtype: torch.dtype) -> None:
    """Times a power of two to the bit; the sum of both parts within rounding."""
    call = make_call(form, dtype)
    g_lp, g_h = call.upstream
    results, doubled = evaluate(call), evaluate(replace(call, upstream=(2 * g_lp, 2 * g_h)))
    parts = [
        evaluate(replace(call, upstream=pair))
        for pair in ((g_lp, torch.zeros_like(g_h)), (torch.zeros_like(g_lp), g_h))
    ]
    for name in (f"d {name}" for name in call.inputs):
        assert_same({name: 2 * results[name]}, {name: doubled[name]})
        total = parts[0][name].double() + parts[1][name].double()
        # Each part is rounded on its own, and may be larger than their sum.
        unit = torch.finfo(dtype).eps
        allowed = 2 * rounding(call)[name] + unit * (parts[0][name].abs() + parts[1][name].abs()).double()
        assert bool(((total - results[name].double()).abs() <= allowed).all()), name


def test_logits_and_the_head_are_one() -> None:
    """On the grid, where a product is exact, the head is the function of its own logits, to the bit."""
    head = make_call_on_grid("head", torch.float32)
    logits = head.inputs["hidden"] @ head.inputs["weight"].T + head.inputs["bias"]
    of_logits = evaluate(replace(head, inputs={"logits": logits}))
    assert_same(evaluate(head), of_logits, ("log_probs", "entropy", *ref.METRICS))

"""The order of the vocabulary and of the tokens means nothing, and a token may come twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.metamorphic.calls import (
    COLUMNS,
    Call,
    N,
    Results,
    assert_close,
    assert_same,
    evaluate,
    logits_call,
    make_call,
    make_call_on_grid,
)
from tests.unit.cases import DTYPES, dtype_name, make_logits

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
every_form = pytest.mark.parametrize("form", ["logits", "head"])
PER_TOKEN = ("log_probs", "entropy", "sum_pi_squared", "varentropy", "max_prob", "d logits", "d hidden")
PERMUTATION = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(7))
ORDER = torch.randperm(N, generator=torch.Generator().manual_seed(8))


def with_permuted_vocabulary(call: Call) -> Call:
    """Column j is what column PERMUTATION[j] was."""
    place = torch.empty_like(PERMUTATION)
    place[PERMUTATION] = torch.arange(COLUMNS)
    permuted = {
        name: x[..., PERMUTATION] if name == "logits" else x if name == "hidden" else x[PERMUTATION]
        for name, x in call.inputs.items()
    }
    return replace(call, inputs=permuted, target=place[call.target])


def vocabulary_permuted_back(results: Results) -> Results:
    back = dict(results)
    for name in ("d logits", "d weight", "d bias"):
        if name in results:
            original = torch.empty_like(results[name])
            original.index_copy_(-1 if name == "d logits" else 0, PERMUTATION, results[name])
            back[name] = original
    return back


@every_dtype
@every_form
def test_permuted_vocabulary(form: str, dtype: torch.dtype) -> None:
    call = make_call(form, dtype).with_options(temperature=0.7)
    permuted = evaluate(with_permuted_vocabulary(call))
    assert_close(call, evaluate(call), vocabulary_permuted_back(permuted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=dtype_name)
def test_permuted_vocabulary_to_the_bit(dtype: torch.dtype) -> None:
    """Logits of which e^(z-m) is 1 or, 300 lower, exactly 0 in fp32: sums of them are exact in any order."""
    call = logits_call(torch.where(make_logits(COLUMNS, dtype) > 1.0, 2.0, -298.0).to(dtype))
    permuted = evaluate(with_permuted_vocabulary(call))
    assert_same(evaluate(call), vocabulary_permuted_back(permuted))


@every_dtype
@every_form
def test_tokens_in_another_order(form: str, dtype: torch.dtype) -> None:
    call = make_call(form, dtype).with_options(temperature=torch.linspace(0.6, 1.5, N))
    ordered, results = evaluate(call.rows(ORDER)), evaluate(call)
    back = {name: in_order_again(x) if name in PER_TOKEN else x for name, x in ordered.items()}
    assert_close(call, results, back)


def in_order_again(x: Tensor) -> Tensor:
    original = torch.empty_like(x)
    original[ORDER] = x
    return original


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
def test_a_token_twice_with_half_the_upstream_gradient(form: str, dtype: torch.dtype) -> None:
    """Each copy has the token's values and half its gradient; sums over tokens stay what they were."""
    call = make_call(form, dtype)
    halved = replace(call, upstream=tuple(g / 2 for g in call.upstream))
    results, doubled = evaluate(call), evaluate(halved.rows(torch.arange(N).repeat(2)))
    for copy in (slice(0, N), slice(N, 2 * N)):
        of_copy = {name: x[copy] if name in PER_TOKEN else x for name, x in doubled.items()}
        for name in ("d logits", "d hidden"):
            if name in of_copy:
                of_copy[name] = 2 * of_copy[name]
        assert_close(call, results, of_copy)


@every_form
def test_neighbours_of_other_numbers_to_the_bit(form: str) -> None:
    """What stands in the other rows, NaN and infinities too, is nothing to a row of the same batch."""
    call, own = make_call_on_grid(form, torch.float32), torch.arange(N) % 3 != 0
    name = "logits" if form == "logits" else "hidden"
    x = call.inputs[name].clone()
    x[~own] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30]).repeat(x.shape[1])[: x.shape[1]]
    results, beside = evaluate(call), evaluate(call.given(**{name: x}))
    for value in ("log_probs", "entropy", f"d {name}"):
        assert_same({value: results[value][own]}, {value: beside[value][own]})

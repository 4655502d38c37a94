"""Columns that do not count and tokens that are left out, whatever they hold, might as well not be there.

Left out or absent, the same rows and columns reach the same kernels: the same bits. Columns at -inf count
with p = 0: they add zeros to the sums, in another grouping.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mcore_entropy as me
from tests.metamorphic.calls import (
    COLUMNS,
    WIDTH,
    Call,
    N,
    assert_close,
    assert_same,
    evaluate,
    make_call,
)
from tests.unit.cases import DTYPES, INF, NAN, dtype_name, make_linear, make_logits

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
every_form = pytest.mark.parametrize("form", ["logits", "head"])
PER_TOKEN = ("log_probs", "entropy", "sum_pi_squared", "varentropy", "max_prob", "d logits", "d hidden")
PADDING = 37


def with_columns(call: Call, filling: float) -> Call:
    """PADDING columns more, that hold `filling`."""
    if "logits" in call.inputs:
        x = call.inputs["logits"]
        return call.given(logits=torch.cat([x, x.new_full((N, PADDING), filling)], 1))
    weight, bias = call.inputs["weight"], call.inputs["bias"]
    return call.given(
        weight=torch.cat([weight, weight.new_ones(PADDING, WIDTH)]),
        bias=torch.cat([bias, bias.new_full((PADDING,), filling)]),
    )


@every_dtype
@every_form
@pytest.mark.parametrize("filling", [0.0, 3e4, NAN, INF])
def test_columns_beyond_the_vocabulary_to_the_bit(form: str, dtype: torch.dtype, filling: float) -> None:
    call = make_call(form, dtype).with_options(vocab_size=COLUMNS, temperature=0.7)
    results, padded = evaluate(call), evaluate(with_columns(call, filling))
    for name in ("d logits", "d weight", "d bias"):
        if name in padded:
            axis = 1 if name == "d logits" else 0
            padded[name], beyond = padded[name].split([COLUMNS, PADDING], axis)
            assert not beyond.any(), f"{name} of the padding"
    assert_same(results, padded)


@every_dtype
@every_form
def test_columns_at_minus_infinity(form: str, dtype: torch.dtype) -> None:
    call = make_call(form, dtype).with_options(temperature=0.7)
    results, padded = evaluate(call), evaluate(with_columns(call, -INF))
    for name in ("d logits", "d weight", "d bias"):
        if name in padded:
            axis = 1 if name == "d logits" else 0
            padded[name], dead = padded[name].split([COLUMNS, PADDING], axis)
            assert not dead.any(), f"{name} of the dead columns"
    assert_close(call, results, padded)


def with_tokens_between(call: Call) -> tuple[Call, torch.Tensor]:
    """Every third token is one more, of other numbers; and where the call's own are."""
    name = "logits" if "logits" in call.inputs else "hidden"
    more = N // 2
    if name == "logits":
        others = make_logits(COLUMNS, call.dtype, rows=more, seed=77)
    else:
        others, _, _ = make_linear(call.dtype, rows=more, width=WIDTH, seed=77)
    own = torch.arange(N + more) % 3 != 2
    x = call.inputs[name]
    rows = x.new_empty(N + more, x.shape[1])
    rows[own], rows[~own] = x, others

    def spread(per_token: torch.Tensor, filling: float) -> torch.Tensor:
        return per_token.new_full((N + more,), filling).masked_scatter_(own, per_token)

    g_lp, g_h = call.upstream
    wider = replace(call, target=spread(call.target, 1), upstream=(spread(g_lp, 0.6), spread(g_h, 0.4)))
    return wider.given(**{name: rows}), own


def at_own(results: dict[str, torch.Tensor], own: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: x[own] if name in PER_TOKEN else x for name, x in results.items()}


@every_dtype
@every_form
def test_masked_tokens_to_the_bit(form: str, dtype: torch.dtype) -> None:
    """Without their rows the tiles are those of the call without these tokens."""
    call = make_call(form, dtype)
    wider, own = with_tokens_between(call)
    name = "logits" if form == "logits" else "hidden"
    wider.inputs[name][~own] = torch.tensor([NAN, INF, -INF, 7.0], dtype=dtype).repeat(COLUMNS)[
        : wider.inputs[name].shape[1]
    ]
    masked = evaluate(wider.with_options(mask=own))
    assert not any(masked[name][~own].any() for name in PER_TOKEN if name in masked)
    assert_same(evaluate(call), at_own(masked, own))


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
def test_masked_tokens_that_are_computed(form: str, dtype: torch.dtype) -> None:
    call = make_call(form, dtype)
    wider, own = with_tokens_between(call)
    computed = wider.with_options(mask=own).computed(execution=me.Execution(compact_rows=False))
    assert_close(call, evaluate(call), at_own(evaluate(computed), own))


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
@pytest.mark.parametrize("ignore_index", [-100, 5])
def test_ignored_targets_without_entropy(form: str, dtype: torch.dtype, ignore_index: int) -> None:
    """A token whose target is ignored, and into whose entropy no gradient flows, has none."""
    call = make_call(form, dtype)
    call = replace(call, target=torch.where(call.target == 5, 6, call.target))
    wider, own = with_tokens_between(call)
    wider = replace(
        wider,
        target=torch.where(own, wider.target, ignore_index),
        upstream=(wider.upstream[0], torch.where(own, wider.upstream[1], 0.0)),
    )
    ignored = evaluate(wider.with_options(ignore_index=ignore_index))
    assert not ignored["log_probs"][~own].any()
    assert bool((ignored["entropy"][~own] > 0).all())
    assert_close(call, evaluate(call), at_own(ignored, own))

"""A vocabulary over one rank or more, cut here or there, in this order or another: the same results.

Within 8 ulp of a row's largest |z| on the torch backend, to the bit where the same numbers meet in the same
sums: two ranks' sum does not depend on which of them holds what.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.metamorphic.calls import (
    COLUMNS,
    N,
    assert_close,
    assert_same,
    assert_within_8_ulp,
    evaluate,
    make_call,
    make_call_on_grid,
    on_grid,
)
from tests.metamorphic.shards import Sharding, evaluate_on_ranks, sharding
from tests.metamorphic.test_permutation import vocabulary_permuted_back, with_permuted_vocabulary
from tests.metamorphic.test_shift import SHIFTS
from tests.unit.cases import dtype_name

every_form = pytest.mark.parametrize("form", ["logits", "head"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=dtype_name)

SHARDINGS = [
    sharding(102, 101),
    sharding(1, 202),
    sharding(203, 0),
    sharding(68, 68, 67),
    sharding(150, 3, 50, ordered=True),
    sharding(51, 51, 51, 50),
    sharding(51, 51, 51, 50, ordered=True),
    sharding(0, 1, 190, 12),
]


@every_form
@dtypes
def test_more_ranks_and_chunks(form: str, dtype: torch.dtype) -> None:
    """1, 2, 3 and 4 ranks, even and uneven shards, one of a single column or of none."""
    call = make_call(form, dtype).with_options(temperature=torch.linspace(0.6, 1.5, N))
    items = [(call.computed(chunk_size=size), of) for of in SHARDINGS for size in (5, 1000)]
    if form == "head":
        items += [
            (call.computed(chunk_size=size), replace(of, sequence_parallel=True))
            for of in SHARDINGS
            for size in (8, 1000)
        ]
    results = evaluate(call)
    for (_, of), found in zip(items, evaluate_on_ranks(items), strict=True):
        try:
            assert_close(call, results, found)
            assert_within_8_ulp(call, results, found)
        except AssertionError as error:
            raise AssertionError(f"{of}: {error}") from error


@every_form
def test_a_rank_without_columns_to_the_bit(form: str) -> None:
    """What the other rank holds is everything, so it has the sums of one rank alone."""
    call = make_call(form, torch.float32)
    results = evaluate(call)
    for found in evaluate_on_ranks([(call, sharding(203, 0)), (call, sharding(0, 203))]):
        assert_same(results, found)


@every_form
@dtypes
def test_two_shards_swapped_to_the_bit(form: str, dtype: torch.dtype) -> None:
    """vocab_start_index goes along, and so does what a shard's gradient is."""
    call = make_call(form, dtype).computed(chunk_size=7)
    items = [(call, sharding(100, 103, order=order)) for order in ((0, 1), (1, 0))]
    assert_same(*evaluate_on_ranks(items))


@every_form
def test_shards_in_any_order(form: str) -> None:
    """Of more than two the sums' order changes."""
    call = make_call(form, torch.float32)
    orders = ((0, 1, 2), (2, 0, 1), (1, 0, 2))
    items = [(call, sharding(60, 43, 100, order=o, ordered=on)) for o in orders for on in (False, True)]
    results = evaluate(call)
    for found in evaluate_on_ranks(items):
        assert_close(call, results, found)
        assert_within_8_ulp(call, results, found)


@every_form
@pytest.mark.parametrize("of", [SHARDINGS[1], SHARDINGS[3], SHARDINGS[6]], ids=lambda of: f"{of.ranks} ranks")
def test_a_constant_to_the_bit(form: str, of: Sharding) -> None:
    """Added to all logits of a row, on all ranks."""
    call = make_call_on_grid(form, torch.float32)
    if form == "logits":
        shifted = call.given(logits=call.inputs["logits"] + SHIFTS)
    else:
        shifted = call.given(bias=call.inputs["bias"] + 16)
    assert_same(*evaluate_on_ranks([(call, of), (shifted, of)]))


@every_form
@pytest.mark.parametrize("of", [SHARDINGS[1], SHARDINGS[3], SHARDINGS[6]], ids=lambda of: f"{of.ranks} ranks")
def test_permuted_vocabulary(form: str, of: Sharding) -> None:
    """Columns change the rank, and so do targets."""
    call = make_call(form, torch.float32)
    results, permuted = evaluate_on_ranks([(call, of), (with_permuted_vocabulary(call), of)])
    assert_close(call, results, vocabulary_permuted_back(permuted))


@every_form
@pytest.mark.parametrize("of", [sharding(120, 120), sharding(80, 80, 80)], ids=lambda of: f"{of.ranks} ranks")
def test_padding_of_any_number_to_the_bit(form: str, of: Sharding) -> None:
    """Columns beyond vocab_size on the last rank: whatever they hold, gradient and values are the same."""
    call, padding = make_call_on_grid(form, torch.float32), 240 - COLUMNS
    padded = []
    for filling in (0.0, torch.nan, 3e4):
        if form == "logits":
            x = call.inputs["logits"]
            wider = call.given(logits=torch.cat([x, x.new_full((N, padding), filling)], 1))
        else:
            weight, bias = call.inputs["weight"], call.inputs["bias"]
            more = on_grid(padding, weight.shape[1], step=0.25, most=1.0, dtype=torch.float32, seed=9)
            wider = call.given(
                weight=torch.cat([weight, more]), bias=torch.cat([bias, bias.new_full((padding,), filling)])
            )
        padded.append((wider.with_options(vocab_size=COLUMNS), of))
    first, *others = evaluate_on_ranks(padded)
    for other in others:
        assert_same(first, other)
    name, axis = ("d logits", 1) if form == "logits" else ("d weight", 0)
    assert not first[name].narrow(axis, COLUMNS, padding).any()

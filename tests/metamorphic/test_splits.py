"""Chunks, tiles and neighbours do not matter: on the torch backend to 8 ulp of a row's largest |z|.

On the Triton backend to the bit: tests/interpreter/test_invariance.py, and on a GPU tests/gpu/test_triton.py.
"""

from __future__ import annotations

import pytest
import torch

import mcore_entropy as me
from tests import reference as ref
from tests.metamorphic.calls import (
    Call,
    N,
    Results,
    assert_close,
    assert_within_8_ulp,
    evaluate,
    head_call,
    logits_call,
    make_call,
)
from tests.unit.cases import DTYPES, dtype_name, make_linear, make_logits

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
every_form = pytest.mark.parametrize("form", ["logits", "head"])
MASK = torch.arange(N) % 4 != 0
PER_TOKEN = ("log_probs", "entropy", *ref.METRICS, "d logits", "d hidden")


@every_dtype
@every_form
@pytest.mark.parametrize("compact", [True, False])
def test_chunks(form: str, dtype: torch.dtype, compact: bool) -> None:
    """With a mask, for without one a single rank's forward is one chunk whatever their size."""
    call = make_call(form, dtype).with_options(mask=MASK, temperature=0.7)
    call = call.computed(execution=me.Execution(compact_rows=compact))
    results = evaluate(call)
    for size in (1, 5, 7, N - 1, 1000):
        assert_close_where_kept(call, results, evaluate(call.computed(chunk_size=size)))


def assert_close_where_kept(call: Call, results: Results, others: Results) -> None:
    """What a metric of a masked row holds is not said."""
    mask = call.options["mask"]
    for name in ref.METRICS:
        results, others = ({**r, name: torch.where(mask, r[name], 0.0)} for r in (results, others))
    assert_close(call, results, others)
    assert_within_8_ulp(call, results, others)


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_tiles_of_another_size(form: str, dtype: torch.dtype) -> None:
    """A workspace of 1 MiB is 87 thousand numbers: tiles of 58 rows, or of a few hundred columns."""
    rows, columns = 300, 1500
    if form == "logits":
        call = logits_call(make_logits(columns, dtype, rows=rows))
    else:
        call = head_call(*make_linear(dtype, rows=rows, columns=columns, width=16))
    small = call.computed(execution=me.Execution(workspace_mib=1))
    results, others = evaluate(call), evaluate(small)
    assert_close(call, results, others)
    assert_within_8_ulp(call, results, others)


@every_dtype
@every_form
@pytest.mark.parametrize("rows", [slice(0, 1), slice(3, 10), slice(N - 1, N), slice(0, N, 2)], ids=str)
def test_fewer_neighbours(form: str, dtype: torch.dtype, rows: slice) -> None:
    call = make_call(form, dtype)
    results, part = evaluate(call), call.rows(rows)
    expected = {name: x[rows] for name, x in results.items() if name in PER_TOKEN}
    found = evaluate(part)
    # Sums over tokens are those of these tokens alone: their truth, which `evaluate` asks for, says it all.
    assert_close(part, {**found, **expected}, found)
    assert_within_8_ulp(part, expected, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
def test_sums_over_tokens_add_up(dtype: torch.dtype) -> None:
    """The gradients of weight and bias of a batch are those of its two parts together."""
    call = make_call("head", dtype)
    results = evaluate(call)
    first, second = (evaluate(call.rows(rows)) for rows in (slice(0, 9), slice(9, N)))
    total = {name: first[name] + second[name] for name in ("d weight", "d bias")}
    assert_close(call, results, {**results, **total})

"""Values on the Triton backend are the same to the bit under any split: TP 1, TP 2, and ordered above.

All but those of a head with fp32 operands.

Under chunks, neighbours, order, masks and repeated tokens; log-probs, entropy and metrics, of given logits
and of the fused head. N tokens, V vocabulary.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "needs TRITON_INTERPRET=1 from the start, as make interpreter has it", allow_module_level=True
    )
pytest.importorskip("triton", reason="needs triton: pip install 'mcore-entropy[triton]'")

import mcore_entropy as me
from tests import reference as ref
from tests.comparison import assert_same_bits
from tests.interpreter.products import products_in_order
from tests.metamorphic.calls import (
    Call,
    Results,
    assert_true,
    eight_ulp,
    head_call,
    logits_call,
    results_of,
)
from tests.metamorphic.shards import Sharding, run, sharding, whole
from tests.ranks import run_ranks
from tests.unit.cases import make_linear, make_logits

# For the head more than a tile of rows and of columns (64 each in the interpreter), and no multiple of one;
# given logits have a program a row.
ROWS = {"logits": 12, "head": 66}
COLUMNS, WIDTH = 150, 24
VALUES = ("log_probs", "entropy", *ref.METRICS)


def make(form: str, dtype: torch.dtype) -> Call:
    rows = ROWS[form]
    if form == "logits":
        call = logits_call(make_logits(COLUMNS, dtype, rows=rows))
    else:
        call = head_call(*make_linear(dtype, rows=rows, columns=COLUMNS, width=WIDTH))
    temperature = torch.linspace(0.6, 1.5, rows)
    return call.with_options(temperature=temperature).computed(execution=me.Execution(backend="triton"))


@dataclass(frozen=True)
class Split:
    """What is called instead of the whole, and which of its tokens the call's own `kept` ones are."""

    name: str
    call: Call
    tokens: Tensor
    kept: Tensor

    def assert_same_values(self, results: Results, found: Results) -> None:
        for value in VALUES:
            expected = results[value][self.tokens][self.kept]
            assert_same_bits(found[value][self.kept], expected, f"{value}, {self.name}")


def splits(call: Call) -> list[Split]:
    every = torch.arange(len(call.target))
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0))
    mask, all_kept = every % 3 != 0, torch.ones_like(every, dtype=torch.bool)
    some = torch.cat([every[3:7], every[-1:], every[3:4]])
    return [
        Split("chunks of 7", call.computed(chunk_size=7), every, all_kept),
        Split("another order", call.rows(order), order, all_kept),
        Split("some, one of them twice", call.rows(some), some, all_kept[some]),
        Split("masked, in chunks", call.with_options(mask=mask).computed(chunk_size=7), every, mask),
    ]


@pytest.mark.parametrize(
    ("form", "dtype"),
    [("logits", torch.float16), ("logits", torch.float32), ("head", torch.float16)],
    ids=["logits-float16", "logits-float32", "head-float16"],
)
def test_one_rank(form: str, dtype: torch.dtype) -> None:
    call = make(form, dtype)
    with products_in_order():
        results = results_of(call, call.inputs)
        assert_true(call, results)
        for split in splits(call):
            split.assert_same_values(results, results_of(split.call, split.call.inputs))


def test_fp32_head_to_8_ulp() -> None:
    """Its products are the vendor's library's, which may add in another order for other numbers of rows:
    docs/decisions/0005-triton-tiles.md."""
    call = make("head", torch.float32)
    results, allowed = results_of(call, call.inputs), eight_ulp(call)
    assert_true(call, results)
    for split in splits(call):
        found = results_of(split.call, split.call.inputs)
        for value in VALUES:
            expected, bound = (x[split.tokens][split.kept] for x in (results[value], allowed))
            assert bool(((found[value][split.kept] - expected).abs() <= bound).all()), (
                f"{value}, {split.name}"
            )


def run_with_products_in_order(items: list[tuple[Call, Sharding]]) -> list[Results]:
    """Module level, for `run_ranks`."""
    with products_in_order():
        return run(items)


@pytest.mark.parametrize(
    ("form", "of"),
    [
        ("logits", sharding(17, 133)),
        ("logits", sharding(60, 40, 50, ordered=True)),
        ("head", sharding(17, 133)),
        ("head", sharding(75, 75, sequence_parallel=True)),
        ("head", sharding(60, 40, 50, ordered=True)),
    ],
    ids=["2-logits", "3-logits-ordered", "2-head", "2-head-sequence-parallel", "3-head-ordered"],
)
def test_several_ranks(form: str, of: Sharding) -> None:
    call = make(form, torch.float16)
    some = [s for s in splits(call) if len(s.tokens) % 2 == 0 or not of.sequence_parallel]
    items = [(call, of), *((split.call, of) for split in some)]
    by_rank = run_ranks(of.ranks, run_with_products_in_order, items)
    results, *found = (whole(of, [answers[i] for answers in by_rank]) for i in range(len(items)))
    assert_true(call, results)
    for split, other in zip(some, found, strict=True):
        split.assert_same_values(results, other)

"""Results and gradients on 2 and 4 ranks against the fp64 truth of the unsharded tensors.

The tolerance is that of one rank: eager on the whole tensors in the same dtype. Cases run in few calls,
since processes are dear; a failure names its case.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import reference as ref
from tests.comparison import assert_same_bits
from tests.distributed.cases import Case, Whole, build, run
from tests.ranks import run_ranks
from tests.unit.cases import (
    DTYPES,
    compare_gradient,
    compare_metrics,
    compare_values,
    head_gradients,
    largest_terms,
    out_dtype,
)

# Columns of each rank: equal; equal with the last of two ranks (last two of four) partly or wholly beyond
# vocab_size; uneven, one of a single column; uneven with the last rank wholly padding.
SHARDS: dict[int, dict[str, tuple[tuple[int, ...], int | None]]] = {
    2: {
        "even": ((129, 129), None),
        "padded": ((129, 129), 201),
        "last rank is padding": ((129, 129), 129),
        "uneven": ((1, 257), None),
        "uneven, last rank is padding": ((200, 58), 190),
    },
    4: {
        "even": ((65,) * 4, None),
        "padded": ((65,) * 4, 131),
        "last ranks are padding": ((65,) * 4, 60),
        "uneven": ((40, 1, 130, 89), None),
        "uneven, last ranks are padding": ((100, 30, 77, 53), 120),
    },
}

# One thing at a time around the base case, as on one rank.
LOGITS_VARIANTS: list[dict[str, Any]] = [
    *({"form": form} for form in ("entropy", "chunks")),
    *({"dtype": dtype} for dtype in DTYPES[1:]),
    *({"layout": layout, "chunk_size": 5} for layout in ("N", "sb", "sb view of bs")),
    {"temperature": 0.6},
    {"temperature": "per token", "layout": "sb view of bs", "chunk_size": 7},
    *({"mask": mask, "chunk_size": 5} for mask in ("all", "no row", "half", "one row")),
    {"mask": "half", "compact_rows": False},
    {"target": "borders"},
    {"target": "ignored", "chunk_size": 1},
    {"offset": 500.0, "spread": 1.0},
    {"offset": -500.0, "spread": 1.0},
    {"spread": 100.0},
    {"special": "bad rows", "chunk_size": 5},
    {"special": "-inf", "form": "chunks", "chunk_size": 5},
    {"special": "one rank dead", "form": "entropy"},
    {"metrics": ref.METRICS, "chunk_size": 5, "temperature": 0.6},
    {"metrics": ref.METRICS, "spread": 0.01},
]
HEAD_VARIANTS: list[dict[str, Any]] = [
    *({"dtype": dtype, "chunk_size": 5} for dtype in DTYPES),
    {"layout": "N"},
    {"layout": "sb view of bs", "temperature": "per token", "chunk_size": 7},
    {"bias": True, "softcap": 5.0, "temperature": 0.6},
    *({"mask": mask, "chunk_size": 5} for mask in ("all", "no row", "half", "one row")),
    {"mask": "half", "compact_rows": False, "dtype": torch.bfloat16},
    {"target": "borders", "chunk_size": 1},
    {"target": "ignored", "spread": 30.0},
    {"special": "bad rows", "chunk_size": 5},
    {"metrics": ref.METRICS, "chunk_size": 1000},
]


def _assembled(case: Case, name: str, parts: list[Tensor]) -> Tensor:
    """A gradient of the whole from those of the ranks."""
    if name == "logits":
        return torch.cat(parts, -1)
    if name != "hidden" or case.sequence_parallel:
        return torch.cat(parts, 0)
    for rank, other in enumerate(parts[1:], 1):  # complete on each rank
        assert_same_bits(parts[0], other, f"gradient of hidden on ranks 0 and {rank}")
    return parts[0]


def _dense(case: Case, whole: Whole) -> tuple[ref.Dense, ref.Dense, ref.Dense]:
    """Truth, eager for the gradients, eager for the values."""
    options = dict(whole.options)
    if case.form in ("both", "linear"):
        options |= {"target": whole.target, "grad_log_probs": whole.upstream[0]}
    options["grad_entropy"] = whole.upstream[1]
    if case.form != "linear":
        x = whole.inputs["logits"]
        eager = ref.eager_logits(x, **options)
        return ref.truth_logits(x, **options), eager, eager
    options["softcap"] = case.softcap
    given = dict(whole.inputs)
    truth = ref.truth_linear(**given, **options)
    if "mask" in options:
        given["hidden"] = torch.where(options["mask"][..., None], given["hidden"], 0.0)
    eager = ref.eager_linear(**given, **options)
    given = {name: x.to(out_dtype(case.dtype)) for name, x in given.items()}
    return truth, eager, ref.eager_linear(**given, **options)


def check(case: Case, answers: list[dict[str, Any]]) -> None:
    whole = build(case)
    truth, eager, eager_values = _dense(case, whole)
    for name in answers[0]:
        for rank, other in enumerate(answers[1:], 1):
            if not name.startswith("d "):  # replicated, or the ranks' losses would drift apart
                assert_same_bits(answers[0][name], other[name], f"{name} on ranks 0 and {rank}")
    for name in ("entropy", "log_probs"):
        if name in answers[0]:
            compare_values(answers[0][name], getattr(truth, name), getattr(eager_values, name), name)
    compare_metrics({m: answers[0][m] for m in case.metrics}, truth, eager_values, whole.options.get("mask"))
    how: dict[str, Any] = {}
    if case.form == "linear":
        clean = torch.nan_to_num(whole.inputs["hidden"], 0.0, 0.0, 0.0)
        bias = whole.inputs.get("bias")
        how = head_gradients(case.dtype, largest_terms(clean, whole.inputs["weight"], bias, whole.options))
    for name in whole.inputs:
        gradient = _assembled(case, name, [answer[f"d {name}"] for answer in answers])
        assert gradient.dtype == case.dtype
        compare_gradient(name, gradient, truth, eager, **how)


def check_all(world_size: int, cases: list[Case]) -> None:
    by_rank = run_ranks(world_size, run, cases)
    for i, case in enumerate(cases):
        answers = [answers[i] for answers in by_rank if answers[i]]
        try:
            check(case, answers)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("layout", SHARDS[2])
def test_logits_of_every_sharding(world_size: int, layout: str) -> None:
    name = layout if world_size == 2 else layout.replace("last rank is", "last ranks are")
    shards, vocab_size = SHARDS[world_size][name]
    base = Case(shards, vocab_size=vocab_size, target="borders", chunk_size=5)
    variants = [{"form": form, "dtype": dtype} for form in ("both", "chunks") for dtype in DTYPES]
    variants += [{"mask": "half"}, {"special": "-inf", "form": "entropy"}, {"metrics": ref.METRICS}]
    check_all(world_size, [replace(base, **variant) for variant in variants])


@pytest.mark.parametrize("world_size", [2, 4])
def test_logits_variants(world_size: int) -> None:
    shards, _ = SHARDS[world_size]["uneven"]
    check_all(world_size, [replace(Case(shards), **variant) for variant in LOGITS_VARIANTS])


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_head_of_every_sharding(world_size: int, sequence_parallel: bool) -> None:
    cases = [
        Case(shards, "linear", dtype, size, target="borders", sequence_parallel=sequence_parallel, bias=True)
        for shards, size in SHARDS[world_size].values()
        for dtype in DTYPES
    ]
    check_all(world_size, cases)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_head_variants(world_size: int, sequence_parallel: bool) -> None:
    shards, _ = SHARDS[world_size]["uneven"]
    base = Case(shards, "linear", sequence_parallel=sequence_parallel)
    check_all(world_size, [replace(base, **variant) for variant in HEAD_VARIANTS])


def test_tensor_parallel_groups_that_are_not_the_world() -> None:
    """Two data-parallel replicas of two ranks, each with tensors of its own, and groups of one rank."""
    cases = [
        Case(
            shards,
            form,
            group=group,
            sequence_parallel=form == "linear",
            chunk_size=5,
            target="borders",
            offset=o,
        )
        for group, shards, o in (
            ((0, 1), (129, 129), 0.0),
            ((2, 3), (50, 208), 3.0),
            ((1, 3), (129, 129), 0.0),
            ((2,), (258,), 0.0),
        )
        for form in ("both", "linear")
    ]
    check_all(4, cases)

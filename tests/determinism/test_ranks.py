"""The same bits in twenty runs on two, three and four ranks, whichever of them comes first.

Three and four merge in rank order because torch's deterministic algorithms are on, or because
`Execution.deterministic` says so: the same collectives, the same bits. (That an all-reduce is not used, and
values against the truth: tests/distributed/test_ordered_reduction.py.)
"""

from __future__ import annotations

import random
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import mcore_entropy as me
from mcore_entropy import parallel
from tests import reference as ref
from tests.determinism.calls import assert_same_results, make
from tests.deterministic import deterministic_algorithms
from tests.metamorphic.calls import Call, Results, assert_true, eight_ulp
from tests.metamorphic.shards import Sharding, first_ranks, run, run_in, sharding, whole
from tests.ranks import run_ranks

RUNS = 20
SHARDINGS = [
    sharding(300, 800),
    sharding(99, 1, 1000),
    sharding(275, 275, 275, 275),
    sharding(275, 275, 275, 275, sequence_parallel=True),
]
ids = [f"{of.ranks} ranks{', sequence parallel' * of.sequence_parallel}" for of in SHARDINGS]


def ask(call: Call, by: str) -> Call:
    """The call that itself asks for determinism, or not."""
    execution = me.Execution(workspace_mib=1, deterministic=by == "execution")
    return call.computed(execution=execution)


def run_often(call: Call, of: Sharding, by: str) -> list[Results]:
    """Module level, for `run_ranks`. Ranks arrive in another order each time, chunk by chunk."""
    delays = random.Random(dist.get_rank())
    start = parallel.start_reduction

    def late(*arguments: object) -> object:
        time.sleep(delays.choice((0.0, 0.0, 0.002)))
        return start(*arguments)  # type: ignore[arg-type]

    found = []
    groups = first_ranks([(call, of)])
    if dist.get_rank() >= of.ranks:
        return []
    with (
        deterministic_algorithms(by == "torch"),
        mock.patch("mcore_entropy.functional.chunked.start_reduction", late),
    ):
        for _ in range(RUNS):
            found += run_in(groups, [(ask(call, by), of)])
    return found


@pytest.mark.parametrize("of", SHARDINGS, ids=ids)
@pytest.mark.parametrize("by", ["torch", "execution"])
def test_twenty_runs(of: Sharding, by: str) -> None:
    form = "head" if of.sequence_parallel or by == "torch" else "logits"
    call = make(form, torch.bfloat16)
    by_rank = run_ranks(4, run_often, call, of, by)[: of.ranks]
    for rank, (first, *others) in enumerate(by_rank):
        for number, other in enumerate(others, 1):
            assert_same_results(other, first, f"run {number}, rank {rank}")
    assert_true(call, whole(of, [runs[0] for runs in by_rank]))


def run_one(call: Call, of: Sharding, by: str) -> tuple[Results, bool]:
    """Module level, for `run_ranks`. Also whether statistics were all-reduced, in whatever order."""
    stock = parallel.StatisticsReduction
    with (
        deterministic_algorithms(by == "torch"),
        mock.patch.object(parallel, "StatisticsReduction", side_effect=stock) as reduction,
    ):
        results = run([(ask(call, by), of)])[0]
    return results, reduction.called


def whole_of_one(call: Call, of: Sharding, by: str) -> Results:
    by_rank = run_ranks(4, run_one, call, of, by)
    # In all runs but those that nobody asks it of: so the tests here would see an all-reduce.
    assert [called for _, called in by_rank] == [by == "nobody"] * 4
    return whole(of, [results for results, _ in by_rank])


@pytest.mark.parametrize("form", ["logits", "head"])
def test_both_ways_to_ask_are_the_same(form: str) -> None:
    call, of = make(form, torch.float32), SHARDINGS[2]
    by_torch, by_option, by_nobody = (whole_of_one(call, of, by) for by in ("torch", "execution", "nobody"))
    for results in (by_torch, by_nobody):
        assert_true(call, results)
    assert_same_results(by_option, by_torch, "by Execution.deterministic")


@pytest.mark.parametrize("form", ["logits", "head"])
def test_chunks_and_neighbours(form: str) -> None:
    """In rank order the reduction itself adds nothing to what a backend's tiles do: 8 ulp of a row's
    largest |z| on the torch backend (on Triton nothing: tests/interpreter/test_invariance.py)."""
    call, of = make(form, torch.float32), SHARDINGS[2]
    some = slice(30, 90)
    changed = [call.computed(chunk_size=size) for size in (7, 1000)] + [call.rows(some)]
    results, *others = (whole_of_one(c, of, "torch") for c in (call, *changed))
    allowed = eight_ulp(call)
    kept = call.options["mask"]
    for other, rows in zip(others, (slice(None), slice(None), some), strict=True):
        for name in ("log_probs", "entropy", *ref.METRICS):
            error = (other[name] - results[name][rows]).abs()[kept[rows]]
            assert bool((error <= allowed[rows][kept[rows]]).all()), name

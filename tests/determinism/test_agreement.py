"""Determinism asked for on some ranks alone: on more than two it changes which collectives run.

The ranks that were asked would gather while the others reduce: they would wait for each other for ever, or
mistake one result for the other. MCORE_ENTROPY_CHECKS=1 says so on every rank. On two ranks both forms are
the same collectives, so nothing can differ.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import mcore_entropy as me
from tests.determinism.calls import assert_same_results
from tests.deterministic import deterministic_algorithms
from tests.distributed.cases import Case, build, call, run, shard
from tests.ranks import run_ranks

LIMIT = 60.0
FORMS = ("entropy", "chunks", "both", "linear")


def messages(asked: str, ranks: int, ranks_asked: tuple[int, ...]) -> list[str]:
    """What each form says on the first `ranks` ranks when some are asked, by torch's setting or by ours."""
    rank, group = dist.get_rank(), dist.new_group(list(range(ranks)))
    if rank >= ranks:
        return []
    changes: dict[str, Any] = {}
    if asked == "execution":
        changes["execution"] = me.Execution(deterministic=rank in ranks_asked)
    found = []
    for form in FORMS:
        case = Case((5, 7, 6)[:ranks], form)
        whole = build(case)
        with (
            mock.patch.dict(os.environ, MCORE_ENTROPY_CHECKS="1"),
            deterministic_algorithms(asked == "torch" and rank in ranks_asked),
        ):
            try:
                call(case, shard(case, whole, rank), whole, rank, group, **changes)
                found.append("fine")
            except ValueError as error:
                found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("asked", "name"), [("torch", "torch's deterministic algorithms"), ("execution", "execution")]
)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("ranks_asked", [(0,), (1,)])
def test_checks_name_it_on_every_rank(
    asked: str, name: str, ranks: int, ranks_asked: tuple[int, ...]
) -> None:
    for found in run_ranks(4, messages, asked, ranks, ranks_asked, timeout=LIMIT)[:ranks]:
        for form, message in zip(FORMS, found, strict=True):
            assert message.startswith(f"{name}: expected the same on every rank"), f"{form}: {message!r}"


@pytest.mark.parametrize("asked", ["torch", "execution"])
def test_checks_let_agreement_pass(asked: str) -> None:
    found = run_ranks(4, messages, asked, 3, (0, 1, 2), timeout=LIMIT)
    assert found == [["fine"] * len(FORMS)] * 3 + [[]]


CASES = [Case((129, 60), form, chunk_size=5, group=(0, 1)) for form in FORMS]


def run_asked_on(ranks_asked: tuple[int, ...]) -> list[dict[str, Any]]:
    with deterministic_algorithms(dist.get_rank() in ranks_asked):
        return run(CASES)


def test_two_ranks_give_the_same_bits_whoever_was_asked() -> None:
    nobody = run_ranks(4, run_asked_on, (), timeout=LIMIT)
    for ranks_asked in ((0,), (1,), (0, 1)):
        found = run_ranks(4, run_asked_on, ranks_asked, timeout=LIMIT)
        for rank, (mine, expected) in enumerate(zip(found[:2], nobody[:2], strict=True)):
            for form, ours, other in zip(FORMS, mine, expected, strict=True):
                assert_same_results(ours, other, f"{form} on rank {rank}")

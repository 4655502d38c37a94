"""Determinism asked for on some ranks alone: on more than two it changes which collectives run.

The ranks that were asked would gather while the others reduce: they would wait for each other for ever, or
mistake one result for the other. MCORE_ENTROPY_CHECKS=1 says so on every rank. On two ranks both forms are
the same collectives, so nothing can differ.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import mcore_entropy as me
from tests.comparison import assert_same_bits
from tests.distributed.cases import Case, build, call, run, shard
from tests.ranks import run_ranks

LIMIT = 60.0
FORMS = ("entropy", "chunks", "both", "linear")


@contextlib.contextmanager
def deterministic_algorithms(on: bool) -> Iterator[None]:
    """torch's deterministic algorithms, on or off, and what they were before after it."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def messages(asked: str, ranks_asked: tuple[int, ...]) -> list[str]:
    """What each form says when these ranks alone are asked by torch's setting or by our option."""
    mine = dist.get_rank() in ranks_asked
    changes: dict[str, Any] = {}
    if asked == "execution":
        changes["execution"] = me.Execution(deterministic=mine)
    found = []
    for form in FORMS:
        case = Case((5, 7, 6)[: dist.get_world_size()], form)
        whole, rank = build(case), dist.get_rank()
        with (
            mock.patch.dict(os.environ, MCORE_ENTROPY_CHECKS="1"),
            deterministic_algorithms(asked == "torch" and mine),
        ):
            try:
                call(case, shard(case, whole, rank), whole, rank, dist.group.WORLD, **changes)
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
    for found in run_ranks(ranks, messages, asked, ranks_asked, timeout=LIMIT):
        for form, message in zip(FORMS, found, strict=True):
            assert message.startswith(f"{name}: expected the same on every rank"), f"{form}: {message!r}"


@pytest.mark.parametrize("asked", ["torch", "execution"])
def test_checks_let_agreement_pass(asked: str) -> None:
    assert run_ranks(3, messages, asked, (0, 1, 2), timeout=LIMIT) == [["fine"] * len(FORMS)] * 3


CASES = [Case((129, 60), form, chunk_size=5) for form in FORMS]


def run_asked_on(ranks_asked: tuple[int, ...]) -> list[dict[str, Any]]:
    with deterministic_algorithms(dist.get_rank() in ranks_asked):
        return run(CASES)


def test_two_ranks_give_the_same_bits_whoever_was_asked() -> None:
    nobody = run_ranks(2, run_asked_on, (), timeout=LIMIT)
    for ranks_asked in ((0,), (1,), (0, 1)):
        found = run_ranks(2, run_asked_on, ranks_asked, timeout=LIMIT)
        for rank, (mine, expected) in enumerate(zip(found, nobody, strict=True)):
            for number, (ours, other) in enumerate(zip(mine, expected, strict=True)):
                for name, value in ours.items():
                    assert_same_bits(value, other[name], f"{name} of {FORMS[number]} on rank {rank}")

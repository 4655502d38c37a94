"""Ranks that go different ways, with ``MCORE_ENTROPY_CHECKS=1``: named on every rank, never a hang.

The group's timeout is 3 s here, and the ranks' results are due long before a default one would end.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import mcore_entropy as me
from mcore_entropy.functional.meeting import Meetings
from mcore_entropy.parallel import TensorParallelGroup
from tests.ranks import run_ranks

N, V = 6, 8
CHECKS = {"MCORE_ENTROPY_CHECKS": "1"}


def _call(group: Any, **changes: Any) -> me.TokenStatistics:
    logits = torch.ones(N, V, requires_grad=True)
    given = {"target": torch.arange(N), "tp_group": group} | changes
    return me.vocab_parallel_log_probs_and_entropy(logits, given.pop("target"), **given)


def _said(function: Any) -> str:
    try:
        function()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def one_rank(way: str) -> tuple[str, str]:
    """Rank 1 goes its own way; then everybody makes the same call. Module level, for `run_ranks`."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    odd = dist.get_rank() == 1

    def call() -> None:
        if way == "does not come" and odd:
            return
        if way == "raises" and odd:
            _call(group, chunk_size=0)
        elif way == "goes backward":
            results = _call(group)
            if odd:
                results.log_probs.sum().backward()
            else:
                _call(group)
        elif way == "another value" and odd:
            _call(group, target=torch.arange(N) + (torch.arange(N) == 4))
        else:
            _call(group)

    with mock.patch.dict(os.environ, CHECKS):
        first = _said(call)
        dist.barrier()
        return first, "" if way == "does not come" else _said(lambda: _call(group))


def test_a_rank_that_raises_is_named_and_the_next_call_works() -> None:
    for rank, (first, then) in enumerate(run_ranks(3, one_rank, "raises", timeout=60)):
        assert "ValueError" in first and "chunk_size" in first
        assert rank == 1 or "rank 1:" in first
        assert then == "fine"


def test_a_rank_that_does_not_come_is_named_within_the_timeout() -> None:
    first, odd, third = run_ranks(3, one_rank, "does not come", timeout=60)
    assert odd[0] == "fine"
    for said, _ in (first, third):
        assert (
            said.startswith("RuntimeError: rank 1 of the group's 3 did not arrive")
            or "gave up: rank 1" in said
        )


def test_a_rank_that_makes_another_call_is_named() -> None:
    for first, then in run_ranks(3, one_rank, "goes backward", timeout=60):
        assert "call: expected" in first and "backward of the logits form on rank 1" in first
        assert then == "fine"


def test_another_value_is_named_with_its_token_and_every_ranks_value() -> None:
    for first, then in run_ranks(3, one_rank, "another value", timeout=60):
        assert "target: expected" in first and "4 on rank 0, 5 on rank 1, 4 on rank 2, at token 4" in first
        assert then == "fine"


def store_after_many_calls() -> tuple[int, bool]:
    group = dist.group.WORLD
    with mock.patch.dict(os.environ, CHECKS):
        for _ in range(50):
            _call(group)
    meetings = Meetings.of(TensorParallelGroup.resolve(group))
    dist.barrier()
    old = [f"mcore_entropy/{number}/{rank}" for number in range(50) for rank in range(2)]
    left = sum(meetings._store.check([key]) for key in old)
    return left, meetings._store.check(["mcore_entropy/50/0"])


def test_the_store_does_not_grow() -> None:
    for left, newest in run_ranks(2, store_after_many_calls, timeout=60):
        assert left == 0 and newest

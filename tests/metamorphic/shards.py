"""Calls of `tests.metamorphic.calls` on several ranks: who holds which columns, and the whole of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mcore_entropy as me
from tests.comparison import assert_same_bits
from tests.conftest import poisoned_buffers
from tests.metamorphic.calls import Call, Results, assert_true, results_of
from tests.ranks import run_ranks


@dataclass(frozen=True)
class Sharding:
    """Which columns [start, stop) each rank of the group holds, in rank order.

    Attributes:
        sequence_parallel: hidden and its gradient are sharded along the tokens.
        ordered: more than two ranks' sums meet in rank order, by `Execution.deterministic`.
    """

    columns: tuple[tuple[int, int], ...]
    sequence_parallel: bool = False
    ordered: bool = False

    @property
    def ranks(self) -> int:
        return len(self.columns)


def sharding(*columns: int, order: tuple[int, ...] | None = None, **how: bool) -> Sharding:
    """Shards of so many columns each; `order` says which of them each rank gets, None: its own."""
    edges = list(pairwise(accumulate((0, *columns))))
    return Sharding(tuple(edges[index] for index in order or range(len(edges))), **how)


def _part(name: str, x: Tensor, of: Sharding, rank: int) -> Tensor:
    columns = slice(*of.columns[rank])
    if name == "logits":
        return x[:, columns]
    if name == "hidden":
        return x.chunk(of.ranks)[rank] if of.sequence_parallel else x
    return x[columns]


def run(items: list[tuple[Call, Sharding]]) -> list[Results]:
    """On each rank; the first ranks of the world hold the shards, the others have nothing to say.

    Module level, for `run_ranks`.
    """
    return run_in(first_ranks(items), items)


def first_ranks(items: list[tuple[Call, Sharding]]) -> dict[int, Any]:
    """A group of the first ranks for each size; every rank of the world creates all of them."""
    return {size: dist.new_group(list(range(size))) for size in sorted({of.ranks for _, of in items})}


def run_in(groups: dict[int, Any], items: list[tuple[Call, Sharding]]) -> list[Results]:
    """`run` in groups that are there already."""
    found: list[Results] = []
    for call, of in items:
        rank = dist.get_rank()
        if rank >= of.ranks:
            found.append({})
            continue
        keywords: dict[str, Any] = {"tp_group": groups[of.ranks], "vocab_start_index": of.columns[rank][0]}
        if "vocab_size" not in call.options:
            keywords["vocab_size"] = max(stop for _, stop in of.columns)
        if of.sequence_parallel:
            keywords["sequence_parallel"] = True
        parts = {name: _part(name, x, of, rank) for name, x in call.inputs.items()}
        if of.ordered:
            execution = call.how.get("execution", me.Execution())
            keywords["execution"] = replace(execution, deterministic=True)
        with poisoned_buffers():
            found.append(results_of(call, parts, **keywords))
    return found


def whole(of: Sharding, by_rank: list[Results]) -> Results:
    """The results as one rank would give them; those that ranks share have the same bits on all of them."""
    by_rank = by_rank[: of.ranks]
    results: Results = {}
    for name, mine in by_rank[0].items():
        parts = [answers[name] for answers in by_rank]
        if name in ("d logits", "d weight", "d bias"):
            in_order = [parts[rank] for rank in sorted(range(of.ranks), key=lambda rank: of.columns[rank])]
            results[name] = torch.cat(in_order, -1 if name == "d logits" else 0)
        elif name == "d hidden" and of.sequence_parallel:
            results[name] = torch.cat(parts)
        else:
            for rank, other in enumerate(parts):
                assert_same_bits(mine, other, f"{name} on ranks 0 and {rank}")
            results[name] = mine
    return results


def evaluate_on_ranks(items: list[tuple[Call, Sharding]]) -> list[Results]:
    """On groups of up to four ranks, in one call since processes are dear; held against the truth."""
    by_rank = run_ranks(4, run, items)
    found = []
    for number, (call, of) in enumerate(items):
        results = whole(of, [answers[number] for answers in by_rank])
        try:
            assert_true(call, results)
        except AssertionError as error:
            raise AssertionError(f"{of}: {error}") from error
        found.append(results)
    return found

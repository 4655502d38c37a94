"""What ``MCORE_ENTROPY_CHECKS=1`` verifies across the ranks of a group: that they were told the same.

Every rank of a group must call with the same shapes, options and per-token values. A rank that does not
would hang the others in a collective, or give each rank another loss. Each check here is a collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_entropy.parallel import TensorParallelGroup, VocabShard, checks_enabled


@contextmanager
def errors_on_every_rank(group: TensorParallelGroup) -> Iterator[None]:
    """With checks on, a ValueError that one rank meets inside is raised on all of them.

    Dynamo traces this around the little that is checked outside an op, which is the same on all ranks.
    """
    error: ValueError | None = None
    try:
        yield
    except ValueError as raised:
        error = raised
    if group.size > 1 and checks_enabled() and not torch.compiler.is_compiling():
        messages = _gather(None if error is None else str(error), group)
        if error is None and any(messages):
            found = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(messages) if text)
            raise ValueError(f"another rank of the group was given bad arguments: {found}")
    if error is not None:
        raise error


def check_agreement(
    group: TensorParallelGroup, facts: dict[str, Any], tensors: dict[str, Tensor | None]
) -> None:
    """Compare facts, then per-token tensors, over the group.

    Raises:
        ValueError: on every rank, naming what differs.
    """
    if group.size == 1 or not checks_enabled():
        return
    facts = dict(facts)
    for name, tensor in tensors.items():
        facts[name] = None if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
    everyone: list[dict[str, Any]] = _gather(facts, group)
    for name in facts:
        values = [facts_of_rank[name] for facts_of_rank in everyone]
        if any(value != values[0] for value in values):
            raise ValueError(f"{name}: expected the same on every rank of the group, got {_by_rank(values)}")
    for name, tensor in tensors.items():
        if tensor is not None:
            _check_equal(name, tensor, group)


def check_shards(group: TensorParallelGroup, shard: VocabShard) -> None:
    """Verify that the group's shards follow each other without gap or overlap and hold the vocabulary.

    Raises:
        ValueError: on every rank.
    """
    if group.size == 1 or not checks_enabled():
        return
    ranges: list[tuple[int, int]] = _gather((shard.start, shard.start + shard.columns), group)
    expected_start = 0
    for start, stop in ranges:
        if start != expected_start:
            break
        expected_start = stop
    else:
        if expected_start >= shard.vocab_size:
            return
    raise ValueError(
        f"vocab_start_index: expected shards that follow each other in rank order and hold vocab_size = "
        f"{shard.vocab_size} columns, got the column ranges {_by_rank(ranges)}"
    )


def _check_equal(name: str, tensor: Tensor, group: TensorParallelGroup) -> None:
    mine = tensor.contiguous()
    everyone = [torch.empty_like(mine) for _ in range(group.size)]
    dist.all_gather(everyone, mine, group=group.process_group)
    for rank, other in enumerate(everyone):
        differs = (other != everyone[0]) & ~((other != other) & (everyone[0] != everyone[0]))
        if differs.any():
            where = int(differs.flatten().nonzero()[0, 0])
            raise ValueError(
                f"{name}: expected the same on every rank of the group, got "
                f"{everyone[0].flatten()[where].item()} on rank 0 and {other.flatten()[where].item()} on "
                f"rank {rank} at token {where} ({int(differs.sum())} tokens differ)"
            )


def _gather(value: Any, group: TensorParallelGroup) -> list[Any]:
    everyone: list[Any] = [None] * group.size
    dist.all_gather_object(everyone, value, group=group.process_group)
    return everyone


def _by_rank(values: list[Any]) -> str:
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))

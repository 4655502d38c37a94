"""The "zigzag" layout of mcore_entropy.rl is how Megatron-core cuts a batch for context parallelism."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank

from mcore_entropy.rl import context_parallel_shard


class _Group:
    """What Megatron asks a context-parallel group for: its size, and this rank's place in it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def by_megatron(tokens: Tensor, rank: int, size: int) -> Tensor:
    """[b, T] cut by Megatron for one rank; no process group is needed for it."""
    batch: dict[str, Any] = {"tokens": tokens}
    keywords: dict[str, Any] = {}
    if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters:  # 0.19
        batch["cu_seqlens"] = None
        keywords = {"is_hybrid_cp": False, "cp_group": _Group(rank, size)}
    with (
        mock.patch.object(parallel_state, "get_context_parallel_world_size", return_value=size),
        mock.patch.object(parallel_state, "get_context_parallel_rank", return_value=rank),
        mock.patch.object(dist, "get_world_size", lambda group=None: group.size()),
        mock.patch.object(dist, "get_rank", lambda group=None: group.rank()),
    ):
        return get_batch_on_this_cp_rank(batch, **keywords)["tokens"]


@pytest.mark.parametrize("size", [2, 4])
def test_a_row_is_cut_as_megatron_cuts_it(size: int) -> None:
    tokens = torch.arange(3 * 48).view(3, 48)
    for rank in range(size):
        theirs = by_megatron(tokens, rank, size)
        assert torch.equal(context_parallel_shard(tokens, "zigzag", rank, size), theirs)


@pytest.mark.parametrize("size", [2, 4])
def test_packed_sequences_are_cut_one_by_one(size: int) -> None:
    """Megatron's own cut of packed sequences is Transformer Engine's, on a GPU: this one by one."""
    bounds = [0, 8, 8, 32, 48]
    tokens = torch.arange(48)[None]
    for rank in range(size):
        parts = [by_megatron(tokens[:, a:b], rank, size) for a, b in pairwise(bounds) if b > a]
        ours = context_parallel_shard(tokens, "zigzag", rank, size, cu_seqlens=torch.tensor(bounds))
        assert torch.equal(ours, torch.cat(parts, 1))

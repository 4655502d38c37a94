"""Which tokens of a sequence a context-parallel rank holds, in the two layouts in use.

"zigzag", Megatron's load-balanced one: each sequence is cut into 2 R equal chunks for R ranks, and rank r
holds chunks r and 2 R - 1 - r. Packed sequences are cut each on its own.
"contiguous", Ulysses': the whole row, packed sequences together, is cut into R equal chunks, one a rank.

T tokens of a row, R ranks, n packed sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from mcore_entropy.rl.arguments import check_cu_seqlens, check_positive, check_rank

Layout: TypeAlias = Literal["zigzag", "contiguous"]


@dataclass(frozen=True)
class Chunks:
    """The chunks of every part of a row that is cut on its own.

    Attributes:
        bounds: int64 [parts + 1], where each part begins in the whole row, and T.
        of_rank: for each rank, the numbers of its chunks in the order in which it holds them.
    """

    bounds: Tensor
    of_rank: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(layout: Layout, size: int, tokens: int, cu_seqlens: Tensor | None, device: torch.device) -> Chunks:
        """The chunks of a row of `tokens` tokens on `size` ranks.

        Raises:
            ValueError: no such layout, or lengths that do not divide into chunks.
        """
        of_rank = _chunks_of_ranks(layout, size)
        chunks = len(of_rank[0]) * size
        if tokens % chunks:
            raise ValueError(
                f"tokens: expected a row of a multiple of {chunks} tokens for layout {layout!r} on {size} "
                f"ranks, got {tokens}; pad it"
            )
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, tokens, device, chunks if layout == "zigzag" else 1)
        if cu_seqlens is None or layout == "contiguous":
            bounds = torch.arange(2, device=device) * tokens
        else:
            bounds = cu_seqlens.long()
        return Chunks(bounds, of_rank)

    @property
    def per_part(self) -> int:
        return sum(map(len, self.of_rank))

    def first_positions(self) -> Tensor:
        """Where a rank's chunks begin in its shard, int64 [parts, chunks of a rank]; the same on each."""
        begins, lengths = self.bounds[:-1] // len(self.of_rank), self._lengths()
        return torch.stack([begins + lengths * i for i in range(len(self.of_rank[0]))], -1)

    def of_tokens(self, tokens: int) -> Tensor:
        """Which of a rank's [parts x chunks of a rank] each token of its shard is in, int64 [tokens]."""
        lengths = self._lengths().repeat_interleave(len(self.of_rank[0]))
        chunks = torch.arange(len(lengths), device=lengths.device)
        # The size is known: no host sync.
        return chunks.repeat_interleave(lengths, output_size=tokens)

    def positions(self, rank: int, tokens: int) -> Tensor:
        """The place in the whole row of each token of a rank's shard, int64 [tokens]."""
        lengths = self._lengths()
        begins = torch.stack([self.bounds[:-1] + lengths * number for number in self.of_rank[rank]], -1)
        shift = (begins - self.first_positions()).flatten()
        return shift[self.of_tokens(tokens)] + torch.arange(tokens, device=shift.device)

    def _lengths(self) -> Tensor:
        return self.bounds.diff() // self.per_part


def _chunks_of_ranks(layout: Layout, size: int) -> tuple[tuple[int, ...], ...]:
    check_positive("size", size)
    if layout == "zigzag":
        return tuple((rank, 2 * size - 1 - rank) for rank in range(size))
    if layout == "contiguous":
        return tuple((rank,) for rank in range(size))
    raise ValueError(f"layout: expected 'zigzag' or 'contiguous', got {layout!r}")


def context_parallel_shard(
    tensor: Tensor, layout: Layout, rank: int, size: int, dim: int = -1, *, cu_seqlens: Tensor | None = None
) -> Tensor:
    """What rank `rank` of `size` context-parallel ranks holds of a tensor, a copy.

    Args:
        tensor: T tokens along `dim`, any dtype; differentiable.
        layout: "zigzag" or "contiguous", see the module.
        cu_seqlens: int32 or int64 [n + 1], bounds of packed sequences in the whole row, from 0 to T.

    Raises:
        ValueError: an argument does not fit; a length that the layout does not cut into equal chunks.

    Example:
        >>> context_parallel_shard(torch.arange(8), "zigzag", 0, 2)
        tensor([0, 1, 6, 7])
    """
    if not isinstance(tensor, Tensor) or dim not in range(-tensor.dim(), tensor.dim()):
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"tensor: expected one with T tokens along dim={dim!r}, got {shape}")
    tokens = tensor.shape[dim]
    chunks = Chunks.of(layout, size, tokens, cu_seqlens, tensor.device)
    check_rank(rank, size)
    return tensor.index_select(dim, chunks.positions(rank, tokens // size))


def context_parallel_unshard(
    shards: Sequence[Tensor], layout: Layout, dim: int = -1, *, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The whole tensor from the shards of all ranks, in rank order: the inverse of `context_parallel_shard`.

    Raises:
        ValueError: as `context_parallel_shard`; shards of different shapes.

    Example:
        >>> context_parallel_unshard([torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5])], "zigzag")
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    if len({shard.shape for shard in shards}) != 1:
        shapes = [tuple(shard.shape) for shard in shards]
        raise ValueError(f"shards: expected one shape on all ranks, got {shapes}")
    size, tokens = len(shards), shards[0].shape[dim]
    chunks = Chunks.of(layout, size, size * tokens, cu_seqlens, shards[0].device)
    places = torch.cat([chunks.positions(rank, tokens) for rank in range(size)])
    return torch.cat(tuple(shards), dim).index_select(dim, places.argsort())


def cu_seqlens_of_shard(cu_seqlens: Tensor, layout: Layout, rank: int, size: int) -> Tensor:
    """Where the packed sequences begin in rank `rank`'s shard, [n + 1] in the dtype of `cu_seqlens`.

    Sequences keep their number: one of which the rank holds nothing is empty.

    Args:
        cu_seqlens: int32 or int64 [n + 1], bounds in the whole row, from 0.

    Raises:
        ValueError: an argument does not fit; a length that the layout does not cut into equal chunks. The
            bounds' values are read on the CPU, elsewhere with ``MCORE_ENTROPY_CHECKS=1`` alone.

    Example:
        >>> cu_seqlens_of_shard(torch.tensor([0, 8, 12]), "zigzag", 0, 2)
        tensor([0, 4, 6])
    """
    chunks = len(_chunks_of_ranks(layout, size)[0]) * size
    check_rank(rank, size)
    if layout == "zigzag":
        check_cu_seqlens(cu_seqlens, None, None, chunks)
        return cu_seqlens // size
    check_cu_seqlens(cu_seqlens, None, None)
    if cu_seqlens.device.type == "cpu" and int(cu_seqlens[-1]) % chunks:
        raise ValueError(
            f"cu_seqlens: expected a row of a multiple of {chunks} tokens for layout {layout!r} on {size} "
            f"ranks, got {int(cu_seqlens[-1])}; pad it"
        )
    tokens = cu_seqlens[-1] // size
    return torch.minimum((cu_seqlens - rank * tokens).clamp(min=0), tokens)

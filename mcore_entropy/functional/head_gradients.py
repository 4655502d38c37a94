"""The fused head's backward: tiles of the logits' gradient, and the products that consume each of them.

A sum over columns (hidden's gradient) and a sum over tokens (the weight's) cannot both be finished tile by
tile. So there are two orders, which differ in how many chunks of tokens one pass over the columns takes:

* by tokens, a chunk a pass: hidden's gradient is finished chunk by chunk in fp32; the weight's is a sum over
  the chunks, for which `main_grad`, or an fp32 weight's own gradient, is there anyway;
* by columns, all chunks in one pass: each slice of the weight's gradient is finished at once and rounded once
  to the weight's dtype; hidden's is a sum over the slices, in fp32 [N, H].

N tokens, k of one pass computed, H hidden size, V/tp columns of this rank, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from mcore_entropy.backends.interface import GradientTiles, KeptLogits, KeptRows
from mcore_entropy.functional.chunked import Rows, TokenGradients, rows_to_compute
from mcore_entropy.functional.local_head import LocalHead, joined, places_in_kept
from mcore_entropy.functional.main_grad import WeightSum
from mcore_entropy.parallel import Pending, start_hidden_reduction
from mcore_entropy.products import add_product_
from mcore_entropy.statistics import statistics_dtype

_T = TypeVar("_T")


def by_columns_is_smaller(head: LocalHead, hidden_wanted: bool) -> bool:
    """`columns_first` for a head's operands."""
    problem = head.problem
    return columns_first(
        problem.shape.numel(),
        problem.shard.vocab_size // problem.group.size,
        problem.backend.most_rows(head.hidden, problem.execution),
        hidden_wanted,
        head.hidden.element_size() if problem.sections > 1 else 0,
    )


def columns_first(
    tokens: int, columns: int, most_rows: int, hidden_wanted: bool, gathered_itemsize: int
) -> bool:
    """Whether the order by columns needs less memory than an fp32 sum for the weight's gradient.

    The answer is the same on every rank of the group, and does not depend on which rows are computed.
    `gathered_itemsize`: bytes of a number of the hidden states of all chunks, where they are gathered.
    """
    if not 0 < tokens <= most_rows:
        return False
    per_token = 4 * hidden_wanted + gathered_itemsize  # its fp32 sum, and what is gathered
    return tokens * per_token <= columns * 4


@dataclass(frozen=True)
class _Reduction:
    """A chunk's hidden gradient on its way to be summed over `Problem.hidden_group`."""

    rows: Rows
    pending: Pending


@dataclass(frozen=True)
class HeadGradients:
    """Where the gradients go; None for those nobody asked for.

    Attributes:
        hidden: [N, H] (under sequence parallelism [N / R, H]) in hidden's dtype, to be written completely.
        weight: of [V/tp, H].
        bias: [V/tp] in the dtype of the statistics, to be added to.
        kept: what the forward kept of the logits of the tokens that its `mask` did not leave out.
    """

    head: LocalHead
    hidden: Tensor | None
    weight: WeightSum | None
    bias: Tensor | None
    kept: KeptLogits | None = None
    mask: Tensor | None = None

    def add(self, tokens: TokenGradients, by_columns: bool) -> None:
        """The whole backward of the head, over the rows that a gradient flows into.

        Which those are, the host knows only once the device has come so far: meanwhile it prepares the first
        pass as if it were all rows, which it often is, so that the device does not wait for it afterwards.
        A pass's reductions run while the next pass's products do.
        """
        problem = self.head.problem
        every_row = [Rows(chunk) for chunk in problem.chunks()]
        if not every_row:
            return
        prepared = None
        if problem.sections == 1:  # otherwise preparing is a collective
            prepared = Pass(self, every_row if by_columns else every_row[:1], tokens)
        chunks = rows_to_compute(problem, tokens.live, problem.chunks())
        passes = [chunks] if by_columns else [[rows] for rows in chunks]
        if any(rows.kept is not None for rows in passes[0]):
            prepared = None
        under_way: list[_Reduction] = []
        for chunks_of_pass in passes:
            # Nothing may hold on to a pass: its memory is for the next.
            started = self._run(prepared or Pass(self, chunks_of_pass, tokens))
            prepared = None
            self._finish(under_way)
            under_way = started
            del started
            if problem.hidden_group.size == 1:  # nothing runs beside the next pass
                self._finish(under_way)
                under_way = []
        self._finish(under_way)

    def _run(self, of: Pass) -> list[_Reduction]:
        hidden, partial = of.hidden, of.partial
        reductions: list[_Reduction] = []
        for last_block, block in _with_last(of.blocks):
            tiles = of.tiles(block)
            for last_slice, columns in _with_last(tiles.slices):
                tile = tiles.tile(columns)
                weight = self.head.weight[columns]
                if partial is not None and last_block and last_slice:
                    # Chunk by chunk, so that a reduction runs while the next products do.
                    for rows, place in _places(of.chunks):
                        own = slice(max(place.start - block.start, 0), place.stop - block.start)
                        add_product_(partial[block][own], tile[own], weight, tiles.factor)
                        reductions.append(self._start(rows, partial[place]))
                elif partial is not None:
                    add_product_(partial[block], tile, weight, tiles.factor)
                if self.bias is not None:
                    of_bias = tile.sum(0, dtype=self.bias.dtype)
                    self.bias[columns] += of_bias if tiles.factor is None else of_bias * tiles.factor
                if self.weight is not None:
                    self.weight.take(columns, tile, hidden[block], tiles.factor)
        if partial is not None and not reductions:  # no row, or no column, on this rank
            reductions = [self._start(rows, partial[place]) for rows, place in _places(of.chunks)]
        return reductions

    def kept_of(self, chunks: list[Rows]) -> KeptRows | None:
        if self.kept is None:
            return None
        problem = self.head.problem
        everything_kept = self.mask is None or not problem.execution.compact_rows
        if everything_kept and all(rows.kept is None for rows in chunks):
            first = sum(c.tokens for c in problem.chunks() if c.start < chunks[0].chunk.start)
            return KeptRows(self.kept.block(first, first + sum(rows.count for rows in chunks)))
        place = dict(
            zip(problem.chunks(), places_in_kept(problem, self.mask, self.head.hidden.device), strict=True)
        )
        of_chunks = [
            place[rows.chunk] if rows.kept is None else place[rows.chunk][rows.kept] for rows in chunks
        ]
        return KeptRows(self.kept, joined(of_chunks))

    def _start(self, rows: Rows, partial: Tensor) -> _Reduction:
        group = self.head.problem.hidden_group
        if rows.kept is not None and group.size > 1:  # every rank reduces every row, computed or not
            every_row = partial.new_zeros(rows.chunk.tokens, partial.shape[1])
            partial = every_row.index_copy_(0, rows.kept, partial)
        return _Reduction(rows, start_hidden_reduction(partial, rows.chunk, group))

    def _finish(self, reductions: list[_Reduction]) -> None:
        for reduction in reductions:
            assert self.hidden is not None
            rows, values = reduction.rows, reduction.pending.result()
            own_rows = self.hidden[rows.chunk.start : rows.chunk.stop]
            if rows.kept is not None and self.head.problem.hidden_group.size == 1:
                own_rows.zero_()
                own_rows.index_copy_(0, rows.kept, values.to(own_rows.dtype))
            else:
                own_rows.copy_(values)


class Pass:
    """What one pass over the columns works with: all that is there before its first tile is computed."""

    def __init__(self, gradients: HeadGradients, chunks: list[Rows], tokens: TokenGradients) -> None:
        head = gradients.head
        self.chunks = chunks
        self._head = head
        self._inputs, self._gradients = tokens.rows(
            lambda per_token: joined([rows.of(per_token) for rows in chunks])
        )
        self.hidden = head.hidden_of_all(chunks)
        if self._gradients.live is not None:
            # A left-out row's gradient is 0, but 0 times a NaN in its hidden state would reach the weight.
            self.hidden = torch.where(self._gradients.live.unsqueeze(1), self.hidden, 0.0)
        self.partial = None
        if gradients.hidden is not None:
            self.partial = torch.zeros_like(self.hidden, dtype=statistics_dtype(self.hidden.dtype))
        self._kept = gradients.kept_of(chunks)
        problem = head.problem
        most_rows = problem.backend.most_rows(self.hidden, problem.execution)
        self.blocks = row_blocks(self.hidden.shape[0], most_rows)
        self._first_tiles: GradientTiles | None = self._make_tiles(self.blocks[0])

    def tiles(self, block: slice) -> GradientTiles:
        if self._first_tiles is not None:
            tiles, self._first_tiles = self._first_tiles, None
            return tiles
        return self._make_tiles(block)

    def _make_tiles(self, block: slice) -> GradientTiles:
        problem = self._head.problem
        return problem.backend.linear_gradient_tiles(
            self.hidden[block],
            self._head.weight,
            self._head.bias,
            self._inputs.block(block),
            self._gradients.block(block),
            problem.execution,
            problem.shape.numel(),
            None if self._kept is None else self._kept.block(block),
        )


def _places(chunks: list[Rows]) -> Iterator[tuple[Rows, slice]]:
    """Where each chunk's rows are among those of all of them."""
    start = 0
    for rows in chunks:
        yield rows, slice(start, start + rows.count)
        start += rows.count


def row_blocks(rows: int, at_most: int) -> list[slice]:
    """[0, rows) in slices of nearly equal length; one of no rows, too, has its columns worked through."""
    count = max(-(-rows // at_most), 1)
    step = max(-(-rows // count), 1)
    return [slice(start, min(start + step, rows)) for start in range(0, max(rows, 1), step)]


def _with_last(items: Sequence[_T]) -> Iterator[tuple[bool, _T]]:
    for index, item in enumerate(items, start=1):
        yield index == len(items), item

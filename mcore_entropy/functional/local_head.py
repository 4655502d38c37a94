"""One rank's part of the fused head: its operands chunk by chunk, its statistics, and what it keeps of them.

N tokens, n of one chunk, k of those computed, H hidden size, V/tp columns of this rank, R ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_entropy.backends.interface import KeptLogits, RowInputs
from mcore_entropy.functional.chunked import Rows
from mcore_entropy.functional.problem import Problem
from mcore_entropy.parallel import Pending, TokenChunk, start_gather
from mcore_entropy.statistics import PartialStatistics


class LocalHead:
    """hidden [N, H], or [N / R, H] under sequence parallelism over R ranks; weight [V/tp, H], bias [V/tp]."""

    def __init__(self, problem: Problem, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        counted = problem.shard.counted
        self.problem = problem
        self.hidden = hidden
        self.weight = weight[:counted]
        self.bias = None if bias is None else bias[:counted]
        self._gathered: dict[int, Pending] = {}

    def hidden_of_all(self, chunks: list[Rows]) -> Tensor:
        """Those of consecutive chunks together; a view of hidden where no row is left out or gathered."""
        if len(chunks) > 1 and all(rows.kept is None and rows.chunk.sections == 1 for rows in chunks):
            return self.hidden[chunks[0].chunk.start : chunks[-1].chunk.stop]
        return joined([self.hidden_of(rows) for rows in chunks])

    def hidden_of(self, rows: Rows) -> Tensor:
        """The hidden states of a chunk's rows, [k, H]; chunks come in order.

        Under sequence parallelism the next chunk's are gathered while this one's are worked with.
        """
        chunk = rows.chunk
        if chunk.sections == 1:
            hidden = self.hidden[chunk.start : chunk.stop]
        else:
            hidden = self._gather(chunk).result()
            del self._gathered[chunk.start]
            following = chunk.following()
            if following is not None:
                self._gather(following)
        return hidden if rows.kept is None else hidden.index_select(0, rows.kept)

    def _gather(self, chunk: TokenChunk) -> Pending:
        if chunk.start not in self._gathered:
            shard = self.hidden[chunk.start : chunk.stop]
            self._gathered[chunk.start] = start_gather(shard, self.problem.group)
        return self._gathered[chunk.start]


def joined(pieces: list[Tensor]) -> Tensor:
    """Pieces of consecutive chunks together; one alone is not copied."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class StatisticsOfHead:
    """A chunk's statistics after the other; writes the logits of the chunks' rows to `kept` in that order."""

    def __init__(self, head: LocalHead, kept: KeptLogits | None) -> None:
        self._head = head
        self._kept = kept
        self._rows_done = 0

    def __call__(self, rows: Rows, inputs: RowInputs) -> PartialStatistics:
        head, problem = self._head, self._head.problem
        first, self._rows_done = self._rows_done, self._rows_done + rows.count
        return problem.backend.linear_statistics(
            head.hidden_of(rows),
            head.weight,
            head.bias,
            inputs,
            problem.wanted,
            problem.execution,
            None if self._kept is None else self._kept.block(first, self._rows_done),
        )


def places_in_kept(problem: Problem, mask: Tensor | None, device: torch.device) -> list[Tensor]:
    """Where the forward wrote each chunk's logits, [n] int64; rows that its mask left out have no place."""
    chunks = problem.chunks()
    if mask is None or not problem.execution.compact_rows:
        place = torch.arange(problem.shape.numel(), device=device)
    else:
        place = torch.cat([chunk.take(mask) for chunk in chunks]).cumsum(0) - 1
    return list(place.split([chunk.tokens for chunk in chunks]))

"""One rank's part of the fused head: its products, and the collectives around them.

N tokens, n of one chunk, k of those computed, H hidden size, V/tp columns of this rank, R ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_entropy.backends.interface import LinearGradients, RowGradients, RowInputs
from mcore_entropy.functional.chunked import Rows
from mcore_entropy.functional.problem import Problem
from mcore_entropy.parallel import (
    TokenChunk,
    all_reduce_hidden_gradient,
    gather_sequence,
    reduce_scatter_sequence,
)
from mcore_entropy.statistics import PartialStatistics, statistics_dtype


class LocalHead:
    """This rank's part of the head: the products of a chunk's rows with its columns, and their collectives.

    hidden [N, H], or [N / R, H] under sequence parallelism over R ranks; weight [V/tp, H].
    """

    def __init__(self, problem: Problem, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        counted = problem.shard.counted
        self.problem = problem
        self.hidden = hidden
        self.weight = weight[:counted]
        self.bias = None if bias is None else bias[:counted]

    def statistics(self, rows: Rows, inputs: RowInputs) -> PartialStatistics:
        problem = self.problem
        return problem.backend.linear_statistics(
            self._hidden_of(rows), self.weight, self.bias, inputs, problem.wanted, problem.execution
        )

    def add_gradients(
        self,
        rows: Rows,
        inputs: RowInputs,
        gradients: RowGradients,
        weight_sum: Tensor | None,
        bias_sum: Tensor | None,
        hidden_gradient: Tensor | None,
    ) -> None:
        """Add a chunk's gradients to the sums, and write the complete one of its own rows of hidden."""
        problem = self.problem
        hidden = self._hidden_of(rows)
        if gradients.live is not None:
            # A left-out row's gradient is 0, but 0 times a NaN in its hidden state would reach the weight.
            hidden = torch.where(gradients.live.unsqueeze(1), hidden, 0.0)
        partial = None
        if hidden_gradient is not None:
            partial = torch.zeros_like(hidden, dtype=statistics_dtype(hidden.dtype))
        counted = problem.shard.counted
        out = LinearGradients(
            partial,
            None if weight_sum is None else weight_sum[:counted],
            None if bias_sum is None else bias_sum[:counted],
        )
        problem.backend.linear_gradients(
            hidden, self.weight, self.bias, inputs, gradients, out, problem.execution
        )
        if hidden_gradient is not None and partial is not None:
            if rows.kept is not None:
                every_row = partial.new_zeros(rows.chunk.tokens, partial.shape[1])
                partial = every_row.index_copy_(0, rows.kept, partial)
            own_rows = hidden_gradient[rows.chunk.start : rows.chunk.stop]
            own_rows.copy_(self._complete(partial, rows.chunk))

    def _hidden_of(self, rows: Rows) -> Tensor:
        hidden = self.hidden[rows.chunk.start : rows.chunk.stop]
        if rows.chunk.sections > 1:
            hidden = gather_sequence(hidden, self.problem.group)
        return hidden if rows.kept is None else hidden.index_select(0, rows.kept)

    def _complete(self, partial: Tensor, chunk: TokenChunk) -> Tensor:
        if chunk.sections > 1:
            return reduce_scatter_sequence(partial, self.problem.group)
        return all_reduce_hidden_gradient(partial, self.problem.group)

"""The fused head for fp32 operands: cuBLAS tiles of fp32 logits, which the row kernels read in place.

Triton's IEEE products take 2.5 times as long as cuBLAS's (docs/decisions/0005-triton-tiles.md), and cuBLAS
follows torch's TF32 switches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcore_entropy.backends.interface import LogitRows, RowGradients, RowInputs, TokenSelection
from mcore_entropy.backends.triton.rows import logits_gradient, logits_statistics
from mcore_entropy.backends.triton.sizes import STATISTICS_ROWS, wide_slices, widest
from mcore_entropy.statistics import PartialStatistics, Wanted


class _LogitTiles:
    """Tiles of fp32 logits of some rows, one after the other in the same memory."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, workspace: int) -> None:
        self._operands = hidden, weight, bias
        self.slices = wide_slices(hidden.shape[0], weight.shape[0], workspace)
        self._buffer = hidden.new_empty(hidden.shape[0] * widest(self.slices))

    def tile(self, columns: slice) -> Tensor:
        hidden, weight, bias = self._operands
        rows, width = hidden.shape[0], columns.stop - columns.start
        out = self._buffer[: rows * width].view(rows, width)
        if bias is None:
            return torch.mm(hidden, weight[columns].t(), out=out)
        return torch.addmm(bias[columns].to(out.dtype), hidden, weight[columns].t(), out=out)


def _in_tile(inputs: RowInputs, first_column: int) -> RowInputs:
    return RowInputs(inputs.target_from(first_column), inputs.temperature, inputs.transform)


def linear_statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, inputs: RowInputs, wanted: Wanted, workspace: int
) -> PartialStatistics:
    like = torch.empty(0, dtype=torch.float32, device=hidden.device)
    parts = [PartialStatistics.empty(0, wanted, like)]
    for start in range(0, hidden.shape[0], STATISTICS_ROWS):
        rows = slice(start, min(start + STATISTICS_ROWS, hidden.shape[0]))
        block = inputs.block(rows)
        total = PartialStatistics.empty(rows.stop - rows.start, wanted, like)
        tiles = _LogitTiles(hidden[rows], weight, bias, workspace)
        for columns in tiles.slices:
            logits = LogitRows(tiles.tile(columns))
            tokens = TokenSelection(0, logits.tokens)
            total = total.merge(logits_statistics(logits, tokens, _in_tile(block, columns.start), wanted))
        parts.append(total)
    return PartialStatistics.concatenated(parts)


class WideGradientTiles:
    """See `mcore_entropy.backends.interface.GradientTiles`; tiles are fp32."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: RowInputs,
        gradients: RowGradients,
        workspace: int,
    ) -> None:
        self._tiles = _LogitTiles(hidden, weight, bias, workspace)
        self._inputs, self._gradients = inputs, gradients
        self.slices: Sequence[slice] = self._tiles.slices
        self.factor: Tensor | None = None

    def tile(self, columns: slice) -> Tensor:
        tile = self._tiles.tile(columns)
        tokens = TokenSelection(0, tile.shape[0])
        logits_gradient(LogitRows(tile), tokens, _in_tile(self._inputs, columns.start), self._gradients, tile)
        return tile

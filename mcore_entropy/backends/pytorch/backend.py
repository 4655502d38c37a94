"""The torch backend: works through rows and columns in tiles whose size a workspace bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mcore_entropy.backends.interface import (
    GradientTiles,
    KeptLogits,
    KeptRows,
    LogitRows,
    RowGradients,
    RowInputs,
    TokenSelection,
)
from mcore_entropy.backends.pytorch.arithmetic import scale_logits_, tile_gradient_, tile_statistics_
from mcore_entropy.backends.pytorch.tiles import column_blocks, even_ranges, most_rows, tile_cells
from mcore_entropy.execution import Execution
from mcore_entropy.products import HALF, fp16_scale, multiplies_halves, product
from mcore_entropy.statistics import PartialStatistics, Wanted, statistics_dtype


def _row_tiles(
    logits: LogitRows, tokens: TokenSelection, execution: Execution
) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of whole rows, each a copy in the dtype of the statistics that is free to be overwritten."""
    cells = tile_cells(logits.device, logits.dtype, execution)
    for rows in even_ranges(tokens.count, cells // max(logits.columns, 1)):
        block = tokens.block(rows.start, rows.stop).read(logits)
        yield rows, block.to(statistics_dtype(block.dtype), copy=True)


class TorchBackend:
    """See `mcore_entropy.backends.interface.Backend`."""

    name = "torch"
    tile_statistics = staticmethod(tile_statistics_)  # the sums of one tile of scaled logits

    def check(self, execution: Execution, dtype: torch.dtype) -> None:
        if execution.logits_budget_mib != 0:
            raise ValueError(
                f"execution.logits_budget_mib: expected 0 on the {self.name} backend, which always computes "
                f"logits again in backward, got {execution.logits_budget_mib}"
            )

    def logits_statistics(
        self,
        logits: LogitRows,
        tokens: TokenSelection,
        inputs: RowInputs,
        wanted: Wanted,
        execution: Execution,
    ) -> PartialStatistics:
        like = torch.empty(0, dtype=statistics_dtype(logits.dtype), device=logits.device)
        total = PartialStatistics.empty(tokens.count, wanted, like)
        for rows, tile in _row_tiles(logits, tokens, execution):
            block = inputs.block(rows)
            z = scale_logits_(tile, block.transform, block.temperature)
            total.put(rows, self.tile_statistics(z, block.target, wanted))
        return total

    def logits_gradient(
        self,
        logits: LogitRows,
        tokens: TokenSelection,
        inputs: RowInputs,
        gradients: RowGradients,
        out: Tensor,
        execution: Execution,
    ) -> None:
        for rows, tile in _row_tiles(logits, tokens, execution):
            gradient = _gradient_(tile, inputs.block(rows), gradients.block(rows), first_column=0)
            tokens.block(rows.start, rows.stop).write(out, gradient)

    def linear_statistics(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: RowInputs,
        wanted: Wanted,
        execution: Execution,
        keep: KeptLogits | None = None,
    ) -> PartialStatistics:
        assert keep is None  # kept_logits makes none
        like = torch.empty(0, dtype=statistics_dtype(hidden.dtype), device=hidden.device)
        total = PartialStatistics.empty(hidden.shape[0], wanted, like)
        cells = tile_cells(hidden.device, hidden.dtype, execution)
        for rows in even_ranges(hidden.shape[0], most_rows(cells)):
            block = inputs.block(rows)
            tokens = rows.stop - rows.start
            of_rows = PartialStatistics.empty(tokens, wanted, like)
            for columns in column_blocks(tokens, weight.shape[0], cells):
                z = scale_logits_(
                    _logits(hidden[rows], weight, bias, columns), block.transform, block.temperature
                )
                of_rows = of_rows.merge(self.tile_statistics(z, block.target_from(columns.start), wanted))
            total.put(rows, of_rows)
        return total

    def kept_logits(self, tokens: int, columns: int, like: Tensor, execution: Execution) -> None:
        """None: `check` allows no budget."""

    def most_rows(self, like: Tensor, execution: Execution) -> int:
        return most_rows(tile_cells(like.device, like.dtype, execution))

    def linear_gradient_tiles(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: RowInputs,
        gradients: RowGradients,
        execution: Execution,
        tokens: int,
        kept: KeptRows | None = None,
    ) -> GradientTiles:
        assert kept is None
        return _TorchGradientTiles(hidden, weight, bias, inputs, gradients, execution)


class _TorchGradientTiles:
    """See `mcore_entropy.backends.interface.GradientTiles`."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: RowInputs,
        gradients: RowGradients,
        execution: Execution,
    ) -> None:
        self._operands = hidden, weight, bias
        self._inputs, self._gradients = inputs, gradients
        cells = tile_cells(hidden.device, hidden.dtype, execution)
        self.slices: Sequence[slice] = column_blocks(hidden.shape[0], weight.shape[0], cells)
        self.factor: Tensor | None = None

    def tile(self, columns: slice) -> Tensor:
        tile = _logits(*self._operands, columns)
        gradient = _gradient_(tile, self._inputs, self._gradients, columns.start)
        operand, self.factor = gradient_operand(gradient, self._operands[0].dtype)
        return operand


def gradient_operand(gradient: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """An fp32 gradient tile as it is multiplied with operands of `dtype`, and the factor to undo its scale.

    Where the device multiplies halves, the tile is rounded to `dtype`. fp16 is scaled by a power of two
    before, since most gradients are below its smallest normal number.
    """
    if dtype not in HALF or not multiplies_halves(gradient.device):
        return gradient, None
    if dtype == torch.bfloat16 or not gradient.numel():
        return gradient.to(dtype), None
    # Of the finite entries: a row of NaN must not decide the scale, and overflow, of its neighbours.
    largest = torch.where(gradient.isfinite(), gradient, 0.0).abs().amax()
    scale = fp16_scale(largest)
    return (gradient * scale).to(dtype), scale.reciprocal()


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: slice) -> Tensor:
    tile = product(hidden, weight[columns].t())
    return tile if bias is None else tile.add_(bias[columns])


def _gradient_(tile: Tensor, inputs: RowInputs, gradients: RowGradients, first_column: int) -> Tensor:
    gradient = tile_gradient_(
        tile,
        inputs.transform,
        inputs.temperature,
        gradients.normalizer,
        gradients.coefficients,
        inputs.target_from(first_column),
    )
    if gradients.live is not None:
        gradient.masked_fill_(~gradients.live.unsqueeze(1), 0.0)
    return gradient

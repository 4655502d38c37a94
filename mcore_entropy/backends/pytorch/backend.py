"""The torch backend: works through rows and columns in tiles whose size a workspace bounds.

The default workspace is 12 MiB on the CPU, where tiles should stay in the cache, and 256 MiB elsewhere.
"""

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
from mcore_entropy.execution import Execution
from mcore_entropy.products import HALF, fp16_scale, multiplies_halves, product
from mcore_entropy.statistics import PartialStatistics, Wanted, statistics_dtype

_CPU_WORKSPACE_MIB = 12
_DEVICE_WORKSPACE_MIB = 256
# Live at once for one tile: the logits, their exponentials, and a third for a softcap's slope, for
# the squares of a metric or for a half-precision copy.
_TILES_ALIVE = 3
# More rows than this bring a matrix product no speed (docs/decisions/0004-torch-tiles.md), and fewer columns
# than this lose it. Tiles are a multiple of it wide: cuBLAS has no fast kernels for odd row strides.
_MOST_ROWS = 2048
_FEWEST_COLUMNS = 64


def _cells(device: torch.device, dtype: torch.dtype, execution: Execution) -> int:
    """How many numbers one tile may hold."""
    default = _CPU_WORKSPACE_MIB if device.type == "cpu" else _DEVICE_WORKSPACE_MIB
    return execution.workspace_bytes(default) // (_TILES_ALIVE * statistics_dtype(dtype).itemsize)


def _ranges(length: int, at_most: int, multiple: int = 1) -> Iterator[slice]:
    """[0, length) in slices of nearly equal length, all but the last of a multiple of `multiple`."""
    count = max(-(-length // max(at_most, 1)), 1)
    step = -(-length // (count * multiple)) * multiple
    for start in range(0, length, max(step, 1)):
        yield slice(start, min(start + step, length))


def _rows_at_most(cells: int) -> int:
    return max(min(_MOST_ROWS, cells // _FEWEST_COLUMNS), 1)


def _column_blocks(tokens: int, columns: int, cells: int) -> list[slice]:
    """Columns of the tiles of [tokens, columns]."""
    at_most = cells // max(tokens, 1) // _FEWEST_COLUMNS * _FEWEST_COLUMNS
    return list(_ranges(columns, max(at_most, _FEWEST_COLUMNS), _FEWEST_COLUMNS))


def _row_tiles(
    logits: LogitRows, tokens: TokenSelection, execution: Execution
) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of whole rows, each a copy in the dtype of the statistics that is free to be overwritten."""
    cells = _cells(logits.device, logits.dtype, execution)
    for rows in _ranges(tokens.count, cells // max(logits.columns, 1)):
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
        cells = _cells(hidden.device, hidden.dtype, execution)
        for rows in _ranges(hidden.shape[0], _rows_at_most(cells)):
            block = inputs.block(rows)
            tokens = rows.stop - rows.start
            of_rows = PartialStatistics.empty(tokens, wanted, like)
            for columns in _column_blocks(tokens, weight.shape[0], cells):
                z = scale_logits_(
                    _logits(hidden[rows], weight, bias, columns), block.transform, block.temperature
                )
                of_rows = of_rows.merge(self.tile_statistics(z, block.target_from(columns.start), wanted))
            total.put(rows, of_rows)
        return total

    def kept_logits(self, tokens: int, columns: int, like: Tensor, execution: Execution) -> None:
        """None: `check` allows no budget."""

    def most_rows(self, like: Tensor, execution: Execution) -> int:
        return _rows_at_most(_cells(like.device, like.dtype, execution))

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
        cells = _cells(hidden.device, hidden.dtype, execution)
        self.slices: Sequence[slice] = _column_blocks(hidden.shape[0], weight.shape[0], cells)
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

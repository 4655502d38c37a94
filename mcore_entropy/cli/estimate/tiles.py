"""What the backends' tiles take, from the functions by which the backends size them.

n rows of one call, v columns of this rank, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from mcore_entropy.backends.pytorch.tiles import column_blocks, even_ranges, most_rows, tile_cells
from mcore_entropy.backends.triton import sizes
from mcore_entropy.backends.triton.machine import Machine
from mcore_entropy.backends.triton.sizes import KeptSize
from mcore_entropy.cli.estimate.workload import FP32, Workload
from mcore_entropy.execution import Execution
from mcore_entropy.functional.head_gradients import row_blocks
from mcore_entropy.products import HALF, multiplies_halves


class Tiles(Protocol):
    """The memory of one backend's tiles, in bytes."""

    @property
    def device(self) -> torch.device:
        """Whose defaults hold."""

    @property
    def most_rows(self) -> int:
        """See `Backend.most_rows`."""

    def statistics(self, rows: int) -> int:
        """At the peak of `Backend.linear_statistics` of n rows."""

    def prepared(self, rows: int) -> int:
        """Of a pass's tiles before the first is computed."""

    def gradient(self, rows: int, stored: bool) -> int:
        """At the peak of a pass over n rows; `stored`: each slice of the weight's gradient comes once."""

    def operand(self, rows: int) -> int:
        """Of one finished tile of such a pass."""

    def kept(self, rows: int) -> KeptSize:
        """The logits that a forward of n rows keeps."""


@dataclass(frozen=True)
class TorchTiles:
    """The torch backend's, and the npu backend's, which is the same on another device."""

    work: Workload
    execution: Execution
    device: torch.device

    @property
    def most_rows(self) -> int:
        return most_rows(self._cells)

    def statistics(self, rows: int) -> int:
        if not rows:
            return 0
        block = next(even_ranges(rows, self.most_rows)).stop
        blocks = column_blocks(block, self.work.columns, self._cells)
        width = blocks[0].stop
        tile: int = block * width * FP32
        # A tile is still there while the next one is computed.
        before = tile if len(blocks) > 1 or rows > block else 0
        # The logits, their exponentials, and for the entropy both multiplied.
        return max(before + tile + self._widened(block + width), (2 + self.work.entropy) * tile)

    def prepared(self, rows: int) -> int:
        return 0

    def gradient(self, rows: int, stored: bool) -> int:
        blocks = row_blocks(rows, self.most_rows)
        block = blocks[0].stop
        slices = column_blocks(block, self.work.columns, self._cells)
        width = slices[0].stop
        tile: int = block * width * FP32
        operand: int = block * width * self._operand_itemsize
        before = operand if len(slices) > 1 or len(blocks) > 1 else 0
        computed = max(tile + self._widened(block + width), 2 * tile, int(self._rounding * tile))
        scaled = self.work.dtype == torch.float16 and self._multiplies_halves
        # A product that cannot be added, or rounded, in place exists in fp32 first.
        apart = 0
        if scaled or (stored and not self._multiplies_halves):
            apart = width * self.work.hidden_size * FP32
        of_hidden = self._widened(width) + (block * self.work.hidden_size * FP32 if scaled else 0)
        of_weight = self._widened(block) + apart
        return max(before + computed, operand + max(of_hidden, of_weight))

    def operand(self, rows: int) -> int:
        block = row_blocks(rows, self.most_rows)[0].stop
        width = column_blocks(block, self.work.columns, self._cells)[0].stop
        operand: int = block * width * self._operand_itemsize
        return operand

    def kept(self, rows: int) -> KeptSize:
        return KeptSize(0, 0, 0)

    @property
    def _cells(self) -> int:
        return tile_cells(self.device, self.work.dtype, self.execution)

    @property
    def _multiplies_halves(self) -> bool:
        return multiplies_halves(self.device)

    @property
    def _operand_itemsize(self) -> int:
        return self.work.dtype.itemsize if self._multiplies_halves else FP32

    @property
    def _rounding(self) -> float:
        """Tiles at the peak of rounding one to half precision: for fp16 its finite entries' largest first."""
        return 3.25 if self.work.dtype == torch.float16 and self._multiplies_halves else 1.5

    def _widened(self, vectors: int) -> int:
        """Copies in fp32 of so many half-precision vectors [H], where the device does not multiply them."""
        if self.work.dtype not in HALF or self._multiplies_halves:
            return 0
        return vectors * self.work.hidden_size * FP32


@dataclass(frozen=True)
class TritonTiles:
    """The Triton backend's."""

    work: Workload
    execution: Execution
    machine: Machine
    device: torch.device

    @property
    def most_rows(self) -> int:
        return sizes.most_rows(self.work.dtype.itemsize, self.execution)

    def statistics(self, rows: int) -> int:
        rows = min(rows, sizes.STATISTICS_ROWS)
        if self._half:
            sums = 3 if self.work.entropy else 2
            return sums * sizes.statistics_tiles(self.work.columns, self.machine) * rows * FP32
        return rows * sizes.widest(self._wide_slices(rows)) * FP32

    def prepared(self, rows: int) -> int:
        blocks = row_blocks(rows, self.most_rows)
        return self._buffer(blocks[0].stop) * min(len(blocks), 2)  # the next block's is made beside it

    def gradient(self, rows: int, stored: bool) -> int:
        apart = 0
        if self.work.dtype == torch.float16:  # products of scaled tiles exist before they are unscaled
            block = row_blocks(rows, self.most_rows)[0].stop
            apart = max(block, sizes.widest(self._half_slices(block))) * self.work.hidden_size * FP32
        return self.prepared(rows) + apart

    def operand(self, rows: int) -> int:
        return self.prepared(rows)

    def kept(self, rows: int) -> KeptSize:
        budget = self.execution.logits_budget_mib * 2**20 if self._half else 0
        return KeptSize.within(rows, self.work.columns, budget, self.machine)

    @property
    def _half(self) -> bool:
        return self.work.dtype in HALF

    def _buffer(self, rows: int) -> int:
        if not self._half:
            return rows * sizes.widest(self._wide_slices(rows)) * FP32
        return rows * sizes.aligned(sizes.widest(self._half_slices(rows))) * self.work.dtype.itemsize

    def _half_slices(self, rows: int) -> list[slice]:
        work = self.work
        workspace = sizes.gradient_workspace(self.execution, work.tokens, work.hidden_size)
        kept = self.kept(work.live(work.tokens))
        return sizes.gradient_slices(
            rows, work.hidden_size, work.columns, kept.columns, workspace, self.machine
        )

    def _wide_slices(self, rows: int) -> list[slice]:
        return sizes.wide_slices(rows, self.work.columns, sizes.wide_workspace(self.execution))

"""The fused head's backward for half-precision operands: tiles of the logits' gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from mcore_entropy.backends.interface import KeptRows, RowGradients, RowInputs
from mcore_entropy.backends.triton import head_kernels, target_kernels
from mcore_entropy.backends.triton.machine import gradient_tile, statistics_tile
from mcore_entropy.backends.triton.operands import HeadProduct, describable, source
from mcore_entropy.backends.triton.rows import Coefficients
from mcore_entropy.backends.triton.sizes import aligned, gradient_slices, widest
from mcore_entropy.products import fp16_scale

_TARGET_BLOCK, _TARGET_ROWS = 1024, 4  # its rows come one after the other, 0.7 us each
_KEPT_BLOCK, _KEPT_WARPS = 4096, 4
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class HeadGradientTiles:
    """See `mcore_entropy.backends.interface.GradientTiles`; tiles are in the operands' dtype."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: RowInputs,
        gradients: RowGradients,
        kept: KeptRows | None,
        workspace: int,
    ) -> None:
        self._head = HeadProduct.of(hidden, weight, bias, inputs, gradients.live)
        self._kept = kept
        multiplier, self.factor = None, None
        if hidden.dtype == torch.float16:
            multiplier = _fp16_multiplier(gradients)
            self.factor = multiplier.reciprocal()
        self._coefficients = Coefficients.of(gradients, multiplier)
        self._tile = gradient_tile(self._head.machine)
        kept_columns = 0 if kept is None else kept.logits.columns
        rows, hidden_size = hidden.shape
        slices = gradient_slices(
            rows, hidden_size, weight.shape[0], kept_columns, workspace, self._head.machine
        )
        self.slices: Sequence[slice] = slices
        self._workspace = hidden.new_empty(hidden.shape[0] * aligned(widest(slices)))

    def tile(self, columns: slice) -> Tensor:
        head, width = self._head, columns.stop - columns.start
        rows = head.hidden.shape[0]
        stride = aligned(width)
        out = self._workspace[: rows * stride].view(rows, stride)[:, :width]
        if not rows:
            return out
        if self._kept is not None and columns.start < self._kept.logits.columns:
            self._from_kept(columns, self._kept, out)
        else:
            self._computed(columns, out)
        if self._coefficients.c is not None:
            self._add_targets(columns, out)
        return out

    def _computed(self, columns: slice, out: Tensor) -> None:
        head, tile, weight = self._head, self._tile, self._head.weight[columns]
        tma = head.tma and describable(out)
        rows, hidden_size = head.hidden.shape
        schedule = head.schedule(tile, weight.shape[0])
        head_kernels.linear_gradient_kernel[(schedule.programs,)](
            source(head.hidden, tile.rows, tile.depth, tma),
            source(weight, tile.columns, tile.depth, tma),
            None if head.bias is None else head.bias[columns],
            head.scaling.factor,
            *self._coefficients.pointers(),
            source(out, tile.rows, tile.columns // 2, tma),
            *head.scaling.numbers(),
            rows,
            weight.shape[0],
            hidden_size,
            head.hidden.stride(0),
            weight.stride(0),
            out.stride(0),
            schedule.at_once,
            schedule.tiles_a_program,
            OUT=_DTYPES[out.dtype],
            **head.flags(tile, tma),
        )

    def _from_kept(self, columns: slice, kept: KeptRows, out: Tensor) -> None:
        rows, width = out.shape
        tile_width = statistics_tile(self._head.machine).columns
        target_kernels.kept_gradient_kernel[(rows, -(-width // _KEPT_BLOCK))](
            kept.logits.exponents,
            kept.logits.maxima,
            kept.rows,
            self._head.scaling.factor,
            *self._coefficients.pointers(),
            out,
            self._head.scaling.numbers()[1],
            columns.start,
            width,
            kept.logits.maxima.stride(0),
            kept.logits.exponents.stride(0),
            out.stride(0),
            TILES=_KEPT_BLOCK // tile_width,
            LISTED=kept.rows is not None,
            TILE=tile_width,
            SOFTCAP=self._head.scaling.softcap is not None,
            num_warps=_KEPT_WARPS,
            enable_fp_fusion=True,
        )

    def _add_targets(self, columns: slice, out: Tensor) -> None:
        head = self._head
        target_kernels.target_gradient_kernel[(-(-out.shape[0] // _TARGET_ROWS),)](
            head.hidden,
            head.weight,
            head.bias,
            head.inputs.target,
            head.scaling.factor,
            *self._coefficients.pointers(),
            self._coefficients.c,
            out,
            *head.scaling.numbers(),
            columns.start,
            *out.shape,
            head.hidden.shape[1],
            head.hidden.stride(0),
            head.weight.stride(0),
            out.stride(0),
            ROWS=_TARGET_ROWS,
            BLOCK=_TARGET_BLOCK,
            BIAS=head.bias is not None,
            SOFTCAP=head.scaling.softcap is not None,
            enable_fp_fusion=True,
        )


def _fp16_multiplier(gradients: RowGradients) -> Tensor:
    """The power of two that brings the largest possible gradient of the rows to at most 2^15.

    |p (a + b ln p) + c| is at most |a| + |b| / e + |c|. Rows that are not finite do not count.
    """
    given = gradients.coefficients
    bound = given.a.abs()
    if given.b is not None:
        bound = bound + given.b.abs() / math.e
    if given.c is not None:
        bound = bound + given.c.abs()
    if gradients.live is not None:
        bound = torch.where(gradients.live, bound, 0.0)
    largest = torch.where(bound.isfinite(), bound, 0.0).amax() if bound.numel() else bound.new_ones(())
    return fp16_scale(largest)

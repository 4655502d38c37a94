"""Launches the fused head's kernels for half-precision operands: statistics, and gradient tiles."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mcore_entropy.backends.interface import KeptLogits, KeptRows, RowGradients, RowInputs
from mcore_entropy.backends.triton import head_kernels, row_kernels, target_kernels
from mcore_entropy.backends.triton.machine import Machine, Tile, gradient_tile, machine, statistics_tile
from mcore_entropy.backends.triton.rows import Coefficients, Scaling, named_sums, sum_count, sum_flags
from mcore_entropy.statistics import PartialStatistics, Wanted

# Rows of one launch: the partials of a tile are bounded, and more rows bring no speed.
_STATISTICS_ROWS = 8192
# Steps along H that one program takes: about 0.7 ms of an H200, next to which its start and end are little.
_PROGRAM_DEPTH = 65536
_MERGED_ROWS, _MERGED_TILES = 32, 32
_TARGET_BLOCK, _TARGET_ROWS = 1024, 16
_KEPT_BLOCK, _KEPT_WARPS = 2048, 8
_SLICE_MULTIPLE = 256  # every tile's width divides it
_SUM_PASS = 100  # reading and writing hidden's sum once, as steps along the columns of its product
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_LARGEST_EXPONENT = 14  # scaled fp16 gradients reach at most 2^15, half of what fp16 holds


@dataclass(frozen=True)
class _Schedule:
    """How many programs compute a product, how many of them run at once, and how many tiles each takes."""

    programs: int
    at_once: int
    tiles_a_program: int


@dataclass(frozen=True)
class _Head:
    """The operands of one product, hidden [n, H] and weight [v, H], bias [v], with the rows' scaling."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    inputs: RowInputs
    scaling: Scaling
    machine: Machine

    @staticmethod
    def of(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, inputs: RowInputs, live: Tensor | None = None
    ) -> _Head:
        hidden, weight = (x if x.stride(1) == 1 else x.contiguous() for x in (hidden, weight))
        bias = None if bias is None else bias.contiguous()
        scaling = Scaling.of(inputs, hidden.shape[0], hidden.device, live)
        return _Head(hidden, weight, bias, inputs, scaling, machine(hidden.device))

    @property
    def tma(self) -> bool:
        return self.machine.tma and _describable(self.hidden) and _describable(self.weight)

    def flags(self, tile: Tile, tma: bool) -> dict[str, object]:
        return dict(
            BM=tile.rows,
            BN=tile.columns,
            BK=tile.depth,
            GROUP=tile.group,
            TMA=tma,
            BIAS=self.bias is not None,
            SOFTCAP=self.scaling.softcap is not None,
            UPCAST=self.machine.interpreted,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def schedule(self, tile: Tile, columns: int) -> _Schedule:
        rows, hidden_size = self.hidden.shape
        tiles = -(-rows // tile.rows) * -(-columns // tile.columns)
        at_once = self.machine.multiprocessors * tile.per_multiprocessor
        tiles_a_program = max(_PROGRAM_DEPTH // hidden_size, 1)
        rounds, rest = divmod(tiles, at_once * tiles_a_program)
        return _Schedule(rounds * at_once + min(rest, at_once), at_once, tiles_a_program)


def _describable(matrix: Tensor) -> bool:
    """Whether the copy engine can address it: 16-byte aligned rows."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0


def _source(matrix: Tensor, rows: int, columns: int, tma: bool) -> Tensor | TensorDescriptor:
    # Made on the host: a descriptor made on the device needs triton's allocator, a context variable that
    # autograd's backward thread does not inherit.
    return TensorDescriptor.from_tensor(matrix, [rows, columns]) if tma else matrix


def linear_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: RowInputs,
    wanted: Wanted,
    keep: KeptLogits | None,
) -> PartialStatistics:
    like = torch.empty(0, dtype=torch.float32, device=hidden.device)
    parts = [PartialStatistics.empty(0, wanted, like)]
    for start in range(0, hidden.shape[0], _STATISTICS_ROWS):
        rows = slice(start, min(start + _STATISTICS_ROWS, hidden.shape[0]))
        head = _Head.of(hidden[rows], weight, bias, inputs.block(rows))
        parts.append(_statistics(head, wanted, None if keep is None else keep.block(rows.start, rows.stop)))
    return parts[1] if len(parts) == 2 else PartialStatistics.concatenated(parts)


def _statistics(head: _Head, wanted: Wanted, keep: KeptLogits | None) -> PartialStatistics:
    n, columns = head.hidden.shape[0], head.weight.shape[0]
    tile = statistics_tile(head.machine)
    tiles = -(-columns // tile.columns)
    partials = torch.empty(sum_count(wanted), tiles, n, dtype=torch.float32, device=head.hidden.device)
    kept_columns = 0 if keep is None else keep.columns
    if keep is not None and kept_columns:
        _statistics_of(head, slice(0, kept_columns), tile, partials, wanted, keep)
        kept_tiles = -(-kept_columns // tile.columns)
        keep.maxima.copy_(partials[0, :kept_tiles])
    if kept_columns < columns:
        _statistics_of(head, slice(kept_columns, columns), tile, partials, wanted, None)
    sums = partials.new_empty(partials.shape[0], n)
    row_kernels.merge_kernel[(-(-n // _MERGED_ROWS),)](
        partials,
        head.scaling.factor,
        sums,
        n,
        tiles,
        ROWS=_MERGED_ROWS,
        TILES=_MERGED_TILES,
        **sum_flags(wanted),
    )
    return named_sums(sums, wanted, _target_logit(head, sums[0]) if wanted.target else None)


def _statistics_of(
    head: _Head, columns: slice, tile: Tile, partials: Tensor, wanted: Wanted, keep: KeptLogits | None
) -> None:
    """Partials of the columns, which start at a tile's first."""
    weight = head.weight[columns]
    tma = head.tma and (keep is None or _describable(keep.exponents))
    n, hidden_size = head.hidden.shape
    kept = None
    if keep is not None:
        kept = _source(keep.exponents, tile.rows, tile.columns // 2, tma)
    schedule = head.schedule(tile, weight.shape[0])
    head_kernels.linear_statistics_kernel[(schedule.programs,)](
        _source(head.hidden, tile.rows, tile.depth, tma),
        _source(weight, tile.columns, tile.depth, tma),
        None if head.bias is None else head.bias[columns],
        head.scaling.factor,
        partials,
        kept,
        *head.scaling.numbers(),
        n,
        weight.shape[0],
        hidden_size,
        head.hidden.stride(0),
        weight.stride(0),
        0 if keep is None else keep.exponents.stride(0),
        partials.shape[1],
        columns.start // tile.columns,
        schedule.at_once,
        schedule.tiles_a_program,
        WHOLE=weight.shape[0] % tile.columns == 0,
        KEEP=keep is not None,
        **sum_flags(wanted),
        **head.flags(tile, tma),
    )


def _target_logit(head: _Head, maximum: Tensor) -> Tensor:
    out = torch.empty_like(maximum)
    target_kernels.target_logit_kernel[(out.shape[0],)](
        head.hidden,
        head.weight,
        head.bias,
        head.inputs.target,
        head.scaling.factor,
        maximum,
        out,
        *head.scaling.numbers(),
        head.weight.shape[0],
        head.hidden.shape[1],
        head.hidden.stride(0),
        head.weight.stride(0),
        BLOCK=_TARGET_BLOCK,
        BIAS=head.bias is not None,
        SOFTCAP=head.scaling.softcap is not None,
    )
    return out


def kept_logits(tokens: int, columns: int, hidden: Tensor, budget: int) -> KeptLogits | None:
    """Room for whole tiles of columns, as many as `budget` bytes hold for all tokens."""
    width = statistics_tile(machine(hidden.device)).columns
    bytes_a_tile = tokens * (width * 2 + 4)
    tiles = min(budget // max(bytes_a_tile, 1), -(-columns // width))
    if not tiles or not tokens:
        return None
    kept_columns = min(tiles * width, columns)
    # Rows on 16-byte boundaries, whatever the number of columns.
    exponents = hidden.new_empty(tokens, -(-kept_columns // 8) * 8, dtype=torch.float16)
    return KeptLogits(exponents[:, :kept_columns], hidden.new_empty(tiles, tokens, dtype=torch.float32))


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
        self._head = _Head.of(hidden, weight, bias, inputs, gradients.live)
        self._kept = kept
        multiplier, self.factor = None, None
        if hidden.dtype == torch.float16:
            multiplier = _fp16_multiplier(gradients)
            self.factor = multiplier.reciprocal()
        self._coefficients = Coefficients.of(gradients, multiplier)
        tile = gradient_tile(self._head.machine)
        kept_columns = 0 if kept is None else kept.logits.columns
        at_most = max(workspace // (2 * max(hidden.shape[0], 1)), 1)
        self.slices: Sequence[slice] = [
            *_slices(0, kept_columns, at_most, *hidden.shape, self._head.machine),
            *_slices(kept_columns, weight.shape[0], at_most, *hidden.shape, self._head.machine),
        ]
        self._tile = tile
        widest = max((s.stop - s.start for s in self.slices), default=0)
        self._workspace = hidden.new_empty(hidden.shape[0] * (-(-widest // 8) * 8))

    def tile(self, columns: slice) -> Tensor:
        head, width = self._head, columns.stop - columns.start
        rows = head.hidden.shape[0]
        # Rows on 16-byte boundaries, whatever the width.
        stride = -(-width // 8) * 8
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
        tma = head.tma and _describable(out)
        rows, hidden_size = head.hidden.shape
        schedule = head.schedule(tile, weight.shape[0])
        head_kernels.linear_gradient_kernel[(schedule.programs,)](
            _source(head.hidden, tile.rows, tile.depth, tma),
            _source(weight, tile.columns, tile.depth, tma),
            None if head.bias is None else head.bias[columns],
            head.scaling.factor,
            *self._coefficients.pointers(),
            _source(out, tile.rows, tile.columns // 2, tma),
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
            BLOCK=_KEPT_BLOCK,
            LISTED=kept.rows is not None,
            TILE=statistics_tile(self._head.machine).columns,
            SOFTCAP=self._head.scaling.softcap is not None,
            num_warps=_KEPT_WARPS,
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
        )


@functools.lru_cache(maxsize=1024)
def _slices(start: int, stop: int, at_most: int, rows: int, hidden_size: int, device: Machine) -> list[slice]:
    """[start, stop) in slices of the width that wastes least of the device, all but the last of it.

    The last round of a product's tiles leaves multiprocessors idle: with 1.6 rounds of tiles, a fifth of
    two rounds. Wide slices, besides, cost fewer passes over hidden's sum.
    """
    widths = range(_SLICE_MULTIPLE, max(min(at_most, stop - start), _SLICE_MULTIPLE) + 1, _SLICE_MULTIPLE)
    step = min(
        reversed(widths), key=lambda width: _slice_cost(stop - start, width, rows, hidden_size, device)
    )
    return [slice(first, min(first + step, stop)) for first in range(start, stop, step)]


def _slice_cost(columns: int, width: int, rows: int, hidden_size: int, device: Machine) -> float:
    """Time of the products of [n, H] with `columns` columns in slices of a width, in any unit."""
    whole, rest = divmod(columns, width)
    cost = 0.0
    for number, columns_of_one in ((whole, width), (1, rest)):
        if not columns_of_one or not number:
            continue
        one = float(_rounds(rows, columns_of_one, device) * hidden_size)  # the gradient's tile
        one += _rounds(columns_of_one, hidden_size, device) * rows  # the weight's gradient
        one += _SUM_PASS * rows * hidden_size / (128 * 256 * device.multiprocessors)
        cost += number * one
    return cost


def _rounds(rows: int, columns: int, device: Machine) -> int:
    tiles = -(-rows // 128) * -(-columns // 256)
    return -(-tiles // device.multiprocessors)


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
    exponent = _LARGEST_EXPONENT - torch.where(largest > 0, largest, 1.0).log2().floor()
    return exponent.clamp(-120.0, 120.0).exp2()

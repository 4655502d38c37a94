"""The fused head's forward for half-precision operands: statistics of logits that never reach memory."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_entropy.backends.interface import KeptLogits, RowInputs
from mcore_entropy.backends.triton import head_kernels, row_kernels, target_kernels
from mcore_entropy.backends.triton.machine import Tile, machine, statistics_tile
from mcore_entropy.backends.triton.operands import HeadProduct, describable, source
from mcore_entropy.backends.triton.rows import named_sums, sum_count, sum_flags
from mcore_entropy.backends.triton.sizes import STATISTICS_ROWS, KeptSize, aligned, statistics_tiles
from mcore_entropy.statistics import PartialStatistics, Wanted

_MERGED_ROWS, _MERGED_TILES = 32, 32
_TARGET_BLOCK = 1024


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
    for start in range(0, hidden.shape[0], STATISTICS_ROWS):
        rows = slice(start, min(start + STATISTICS_ROWS, hidden.shape[0]))
        head = HeadProduct.of(hidden[rows], weight, bias, inputs.block(rows))
        parts.append(_statistics(head, wanted, None if keep is None else keep.block(rows.start, rows.stop)))
    return parts[1] if len(parts) == 2 else PartialStatistics.concatenated(parts)


def _statistics(head: HeadProduct, wanted: Wanted, keep: KeptLogits | None) -> PartialStatistics:
    n, columns = head.hidden.shape[0], head.weight.shape[0]
    tile = statistics_tile(head.machine)
    tiles = statistics_tiles(columns, head.machine)
    partials = torch.empty(sum_count(wanted), tiles, n, dtype=torch.float32, device=head.hidden.device)
    kept_columns = 0 if keep is None else keep.columns
    if keep is not None and kept_columns:
        _statistics_of(head, slice(0, kept_columns), tile, partials, wanted, keep)
        kept_tiles = -(-kept_columns // tile.columns)
        keep.maxima.copy_(partials[0, :kept_tiles])
    if kept_columns < columns:
        _statistics_of(head, slice(kept_columns, columns), tile, partials, wanted, None)
    sums = partials.new_empty(partials.shape[0], n)
    largest_x = partials.new_empty(n)
    row_kernels.merge_kernel[(-(-n // _MERGED_ROWS),)](
        partials,
        head.scaling.factor,
        sums,
        largest_x,
        n,
        tiles,
        ROWS=_MERGED_ROWS,
        TILES=_MERGED_TILES,
        **sum_flags(wanted),
        enable_fp_fusion=True,
    )
    return named_sums(sums, wanted, _target_logit(head, largest_x) if wanted.target else None)


def _statistics_of(
    head: HeadProduct, columns: slice, tile: Tile, partials: Tensor, wanted: Wanted, keep: KeptLogits | None
) -> None:
    """Partials of the columns, which start at a tile's first."""
    weight = head.weight[columns]
    tma = head.tma and (keep is None or describable(keep.exponents))
    n, hidden_size = head.hidden.shape
    kept = None
    if keep is not None:
        kept = source(keep.exponents, tile.rows, tile.columns // 2, tma)
    schedule = head.schedule(tile, weight.shape[0])
    head_kernels.linear_statistics_kernel[(schedule.programs,)](
        source(head.hidden, tile.rows, tile.depth, tma),
        source(weight, tile.columns, tile.depth, tma),
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


def _target_logit(head: HeadProduct, largest_x: Tensor) -> Tensor:
    out = torch.empty_like(largest_x)
    target_kernels.target_logit_kernel[(out.shape[0],)](
        head.hidden,
        head.weight,
        head.bias,
        head.inputs.target,
        head.scaling.factor,
        largest_x,
        out,
        *head.scaling.numbers(),
        head.weight.shape[0],
        head.hidden.shape[1],
        head.hidden.stride(0),
        head.weight.stride(0),
        BLOCK=_TARGET_BLOCK,
        BIAS=head.bias is not None,
        SOFTCAP=head.scaling.softcap is not None,
        enable_fp_fusion=True,
    )
    return out


def kept_logits(tokens: int, columns: int, hidden: Tensor, budget: int) -> KeptLogits | None:
    """Room for whole tiles of columns, as many as `budget` bytes hold for all tokens."""
    kept = KeptSize.within(tokens, columns, budget, machine(hidden.device))
    if not kept.tiles:
        return None
    exponents = hidden.new_empty(tokens, aligned(kept.columns), dtype=torch.float16)
    return KeptLogits(exponents[:, : kept.columns], hidden.new_empty(kept.tiles, tokens, dtype=torch.float32))

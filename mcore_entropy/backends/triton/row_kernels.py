"""Kernels that take one row after the other: statistics and gradient of given logits, merging.

n rows, v columns. Rows of logits are evenly spaced, or LISTED: then row r starts at element starts[r], and
its gradient goes to row out_rows[r], so that rows may lie anywhere, in any order.
"""

import triton
import triton.language as tl

from mcore_entropy.backends.triton.arithmetic import (
    LN_2,
    LOG2_E,
    gradient,
    rescaled,
    slope,
    store_sums,
    sums_below,
    transformed,
    zero_in_dead_rows,
)


@triton.jit
def logits_statistics_kernel(
    logits, starts, target, factor, out, target_logit, scale, softcap, n, v, row_stride, column_stride,
    STEPS: tl.constexpr, LANES: tl.constexpr, CONTIGUOUS: tl.constexpr,
    LISTED: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, TARGET: tl.constexpr,
    CENTRED: tl.constexpr, SQUARED: tl.constexpr, EXP_SQUARED: tl.constexpr,
):  # fmt: skip
    """One read of a row: out [sums, n] in natural units, and z of the target, 0 where that is not here.

    STEPS * LANES columns at once. The sums of a lane, which belongs to one thread, stay apart until the row's
    end, so that only the maximum needs a reduction over the program each time. SCALED: factor is not 1.
    To be compiled without fused multiply-adds where z is a product, like the gradient: every z is then the
    same rounded number in both, and in eager.
    """
    row = tl.program_id(0)
    if LISTED:
        values = logits + tl.load(starts + row)
    else:
        values = logits + row.to(tl.int64) * row_stride
    row_factor = tl.load(factor + row)
    maximum = float("-inf")
    total = tl.zeros((LANES,), tl.float32)
    centred = tl.zeros((LANES,), tl.float32)
    squared = tl.zeros((LANES,), tl.float32)
    exp_squared = tl.zeros((LANES,), tl.float32)
    for first in range(0, v, STEPS * LANES):
        column = first + tl.arange(0, STEPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        inside = column < v
        if not CONTIGUOUS:  # 64-bit addresses, one for each column, would fill half the registers
            column = column.to(tl.int64) * column_stride
        raw = tl.load(values + column, mask=inside, other=float("-inf"))
        z = transformed(raw.to(tl.float32), scale, softcap, SOFTCAP)
        if SCALED:
            z = z * row_factor
        larger = tl.maximum(maximum, tl.max(tl.max(z, 0), 0))
        total, centred, squared, exp_squared = rescaled(
            maximum, larger, LOG2_E, total, centred, squared, exp_squared, CENTRED, SQUARED, EXP_SQUARED
        )
        total1, centred1, squared1, exp_squared1, _ = sums_below(
            z, larger, LOG2_E, 0, CENTRED, SQUARED, EXP_SQUARED
        )
        total += total1
        centred += centred1
        squared += squared1
        exp_squared += exp_squared1
        maximum = larger
    store_sums(
        out + row, n, row < n, maximum, tl.sum(total, 0), tl.sum(centred, 0) * LN_2,
        tl.sum(squared, 0) * (LN_2 * LN_2), tl.sum(exp_squared, 0), CENTRED, SQUARED, EXP_SQUARED,
    )  # fmt: skip
    if TARGET:
        column = tl.load(target + row)
        here = (column >= 0) & (column < v)
        raw = tl.load(values + column * column_stride, mask=here, other=0.0).to(tl.float32)
        z = transformed(raw, scale, softcap, SOFTCAP)
        if SCALED:
            z = z * row_factor
        tl.store(target_logit + row, tl.where(here, z, 0.0))


@triton.jit
def logits_gradient_kernel(
    logits, starts, target, factor, maximum, log_sum, a, b, c, out, out_rows, scale, softcap,
    v, row_stride, column_stride, out_stride,
    BLOCK: tl.constexpr, LISTED: tl.constexpr, SOFTCAP: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """One read of a row's block and one write, of the gradient for the raw logits. out may be the logits."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if LISTED:
        values = logits + tl.load(starts + row)
        result_row = out + tl.load(out_rows + row) * out_stride
    else:
        values = logits + row.to(tl.int64) * row_stride
        result_row = out + row.to(tl.int64) * out_stride
    raw = tl.load(values + column.to(tl.int64) * column_stride, mask=column < v, other=0.0)
    x = transformed(raw.to(tl.float32), scale, softcap, SOFTCAP)
    largest = tl.load(maximum + row)
    logarithm = tl.load(log_sum + row)
    result = gradient(
        x, x * tl.load(factor + row), largest, logarithm, tl.load(a + row), tl.load(b + row),
        softcap, SOFTCAP,
    )  # fmt: skip
    if TARGET:
        of_target = tl.load(c + row)
        if SOFTCAP:
            of_target *= slope(x, softcap)
        result += tl.where(column == tl.load(target + row), of_target, 0.0)
    result = zero_in_dead_rows(result, largest, logarithm)
    tl.store(result_row + column, result.to(out.dtype.element_ty), mask=column < v)


@triton.jit
def merge_kernel(
    partials, factor, out, largest_x, n, tiles,
    ROWS: tl.constexpr, TILES: tl.constexpr,
    CENTRED: tl.constexpr, SQUARED: tl.constexpr, EXP_SQUARED: tl.constexpr,
):  # fmt: skip
    """partials [sums, tiles, n] of the head's tiles to out [sums, n] in natural units, in a fixed order.

    largest_x: [n], the maximum before the factor.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < n
    row_factor = tl.load(factor + row, mask=inside, other=1.0)
    C = row_factor * LOG2_E
    step = tl.cast(tiles, tl.int64) * n
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    centred = tl.zeros((ROWS,), tl.float32)
    squared = tl.zeros((ROWS,), tl.float32)
    exp_squared = tl.zeros((ROWS,), tl.float32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        mask = (tile < tiles)[:, None] & inside[None, :]
        at = partials + tile[:, None].to(tl.int64) * n + row[None, :]
        tile_maximum = tl.load(at, mask=mask, other=float("-inf"))
        at += step
        total1 = tl.load(at, mask=mask, other=0.0)
        centred1 = total1
        squared1 = total1
        exp_squared1 = total1
        if CENTRED:
            at += step
            centred1 = tl.load(at, mask=mask, other=0.0)
        if SQUARED:
            at += step
            squared1 = tl.load(at, mask=mask, other=0.0)
        if EXP_SQUARED:
            at += step
            exp_squared1 = tl.load(at, mask=mask, other=0.0)
        larger = tl.maximum(maximum, tl.max(tile_maximum, 0))
        total, centred, squared, exp_squared = rescaled(
            maximum, larger, C, total, centred, squared, exp_squared, CENTRED, SQUARED, EXP_SQUARED
        )
        total1, centred1, squared1, exp_squared1 = rescaled(
            tile_maximum, larger[None, :], C[None, :], total1, centred1, squared1, exp_squared1,
            CENTRED, SQUARED, EXP_SQUARED,
        )  # fmt: skip
        total += tl.sum(total1, 0)
        centred += tl.sum(centred1, 0)
        squared += tl.sum(squared1, 0)
        exp_squared += tl.sum(exp_squared1, 0)
        maximum = larger
    tl.store(largest_x + row, maximum, mask=inside)
    store_sums(
        out + row, n, inside, maximum * row_factor,
        total, centred * LN_2, squared * (LN_2 * LN_2), exp_squared, CENTRED, SQUARED, EXP_SQUARED,
    )  # fmt: skip

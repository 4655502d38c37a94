"""The target's part of the fused head, one dot product a row instead of a comparison a logit; kept logits.

n rows, H hidden size; target[r] is a column of weight [v, H], or outside [0, v) where it is not here.
"""

import triton
import triton.language as tl

from mcore_entropy.backends.triton.arithmetic import (
    LOG2_E,
    gradient,
    slope,
    target_z,
    transformed,
    zero_in_dead_rows,
)


@triton.jit
def _target_x(
    hidden, weight, bias, row, column, H, hidden_stride, weight_stride, scale, softcap,
    BLOCK: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The transformed logit of one row and column."""
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, H, BLOCK):
        element = k + tl.arange(0, BLOCK)
        a = tl.load(hidden + row * hidden_stride + element, mask=element < H, other=0.0).to(tl.float32)
        b = tl.load(weight + column * weight_stride + element, mask=element < H, other=0.0).to(tl.float32)
        total += a * b
    logit = tl.sum(total, 0)
    if BIAS:
        logit += tl.load(bias + column).to(tl.float32)
    return transformed(logit, scale, softcap, SOFTCAP)


@triton.jit
def target_logit_kernel(
    hidden, weight, bias, target, factor, largest_x, out, scale, softcap,
    v, H, hidden_stride, weight_stride,
    BLOCK: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """out [n]: z of the target, 0 where that is not here. largest_x: [n], the row's maximum of x."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.load(target + row)
    z = 0.0
    if (column >= 0) & (column < v):
        x = _target_x(
            hidden, weight, bias, row, column, H, hidden_stride, weight_stride, scale, softcap,
            BLOCK, BIAS, SOFTCAP,
        )  # fmt: skip
        z = target_z(x, tl.load(largest_x + row), tl.load(factor + row))
    tl.store(out + row, z)


@triton.jit
def target_gradient_kernel(
    hidden, weight, bias, target, factor, maximum, log_sum, a, b, c, out, scale, softcap,
    first, n, v, H, hidden_stride, weight_stride, out_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Write the target's gradient, its own part c included, into a tile [n, v] of the columns from `first`.

    A program looks through ROWS rows, of which few have their target in the tile.
    """
    start = tl.program_id(0).to(tl.int64) * ROWS
    for row in range(start, tl.minimum(start + ROWS, n)):
        column = tl.load(target + row)
        if (column >= first) & (column < first + v):
            x = _target_x(
                hidden, weight, bias, row, column, H, hidden_stride, weight_stride, scale, softcap,
                BLOCK, BIAS, SOFTCAP,
            )  # fmt: skip
            result = gradient(
                x, x * tl.load(factor + row), tl.load(maximum + row), tl.load(log_sum + row),
                tl.load(a + row), tl.load(b + row), softcap, SOFTCAP,
            )  # fmt: skip
            of_target = tl.load(c + row)
            if SOFTCAP:
                of_target *= slope(x, softcap)
            place = out + row * out_stride + (column - first)
            tl.store(place, (result + of_target).to(out.dtype.element_ty))


@triton.jit
def kept_gradient_kernel(
    exponents, maxima, kept_rows, factor, maximum, log_sum, a, b, out, softcap,
    first, v, maxima_stride, exponents_stride, out_stride,
    TILES: tl.constexpr, TILE: tl.constexpr, LISTED: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """`linear_gradient_kernel` from kept logits. TILE columns have a maximum in common."""
    row = tl.program_id(0).to(tl.int64)
    tile = first // TILE + tl.program_id(1) * TILES + tl.arange(0, TILES)
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = column < first + v
    kept_row = row
    if LISTED:
        kept_row = tl.load(kept_rows + row)
    exponent = tl.load(exponents + kept_row * exponents_stride + column, mask=inside, other=0.0).to(
        tl.float32
    )
    place = maxima + tile.to(tl.int64) * maxima_stride + kept_row
    largest = tl.load(place, mask=tile * TILE < first + v, other=0.0)
    row_factor = tl.load(factor + row)
    # A tile without a finite logit has the maximum -inf, and so all its x.
    x = exponent / (row_factor * LOG2_E) + largest[:, None]
    of_row = tl.load(maximum + row)
    logarithm = tl.load(log_sum + row)
    result = gradient(
        x, x * row_factor, of_row, logarithm, tl.load(a + row), tl.load(b + row), softcap, SOFTCAP
    )
    result = zero_in_dead_rows(result, of_row, logarithm)
    tl.store(out + row * out_stride + (column - first), result.to(out.dtype.element_ty), mask=inside)

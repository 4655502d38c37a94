"""The fused head's kernels: a tiled matrix product whose epilogue is the statistics, or the gradient.

n tokens, v columns, H hidden size; hidden [n, H] and weight [v, H] in half precision, logits in fp32
accumulators only. A program computes many tiles, one after the other: the loads of its next tile run during
the epilogue of this one (``flatten``), which is what hides the epilogue. It does not compute all it could: a
collective of another stream has to find a free multiprocessor soon, or the other ranks wait for it.
Targets are left to kernels of one row a program (`row_kernels`): comparing every column with the target costs
3 to 8 % here. Neither a tile's place nor its neighbours change a bit of a row's result.
"""

import triton
import triton.language as tl

from mcore_entropy.backends.triton.arithmetic import LOG2_E, gradient, store_sums, sums, transformed


@triton.jit
def _tiles_of_program(tiles, at_once, tiles_a_program):
    """First and end of a program's tiles, every `at_once`-th: those computed at once are neighbours."""
    program = tl.program_id(0)
    first = program // at_once * at_once * tiles_a_program + program % at_once
    return first, tl.minimum(first + at_once * tiles_a_program, tiles)


@triton.jit
def _place(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Row and column of a tile: GROUP row tiles high strips, so that their operands stay in the L2 cache."""
    tiles_a_group = GROUP * column_tiles
    first = tile // tiles_a_group * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    inside = tile % tiles_a_group
    return first + inside % height, inside // height


@triton.jit
def _load(source, row, column, rows, columns, stride, R: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr):
    """A block [R, C] of a matrix, zeros outside it; `source` is a TMA descriptor or a pointer."""
    if TMA:
        block = source.load([row, column])
    else:
        r = row + tl.arange(0, R)
        c = column + tl.arange(0, C)
        offsets = r[:, None].to(tl.int64) * stride + c[None, :]
        block = tl.load(source + offsets, mask=(r < rows)[:, None] & (c < columns)[None, :], other=0.0)
    return block


@triton.jit
def _store(
    out, block, row, column, rows, columns, stride, R: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr
):
    """The reverse of `_load`; the descriptor's block is half as wide, which halves the staging memory."""
    if TMA:
        left, right = tl.split(tl.permute(tl.reshape(block, (R, 2, C // 2)), (0, 2, 1)))
        out.store([row, column], left)
        out.store([row, column + C // 2], right)
    else:
        r = row + tl.arange(0, R)
        c = column + tl.arange(0, C)
        offsets = r[:, None].to(tl.int64) * stride + c[None, :]
        tl.store(out + offsets, block, mask=(r < rows)[:, None] & (c < columns)[None, :])


@triton.jit
def _logits(
    hidden, weight, bias, row, column, n, v, H, hidden_stride, weight_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TMA: tl.constexpr, BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of raw logits, [BM, BN] fp32."""
    logits = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(H, BK)):
        a = _load(hidden, row, k * BK, n, H, hidden_stride, BM, BK, TMA)
        b = _load(weight, column, k * BK, v, H, weight_stride, BN, BK, TMA)
        if UPCAST:  # the interpreter multiplies half precision wrongly
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        logits = tl.dot(a, b.T, logits)
    if BIAS:
        columns = column + tl.arange(0, BN)
        logits += tl.load(bias + columns, mask=columns < v, other=0.0).to(tl.float32)[None, :]
    return logits


@triton.jit
def linear_statistics_kernel(
    hidden, weight, bias, factor, partials, kept, scale, softcap,
    n, v, H, hidden_stride, weight_stride, kept_stride, all_tiles, first_tile, at_once, tiles_a_program,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, WHOLE: tl.constexpr,
    CENTRED: tl.constexpr, SQUARED: tl.constexpr, EXP_SQUARED: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """partials [sums, all_tiles, n]: maximum of x, S, then T, Q, R as wanted, of each tile of BN columns.

    KEEP: the exponents relative to the tile's row maximum, to base 2, are written to kept [n, v] fp16.
    WHOLE: v is a multiple of BN.
    """
    row_tiles = tl.cdiv(n, BM)
    column_tiles = tl.cdiv(v, BN)
    first, last = _tiles_of_program(row_tiles * column_tiles, at_once, tiles_a_program)
    for tile in tl.range(first, last, at_once, flatten=True):
        row_tile, column_tile = _place(tile, row_tiles, column_tiles, GROUP)
        row = row_tile * BM
        column = column_tile * BN
        logits = _logits(
            hidden, weight, bias, row, column, n, v, H, hidden_stride, weight_stride,
            BM, BN, BK, TMA, BIAS, UPCAST,
        )  # fmt: skip
        x = transformed(logits, scale, softcap, SOFTCAP)
        if not WHOLE:
            x = tl.where((column + tl.arange(0, BN) < v)[None, :], x, float("-inf"))
        rows = row + tl.arange(0, BM)
        inside = rows < n
        C = tl.load(factor + rows, mask=inside, other=1.0) * LOG2_E
        maximum, total, centred, squared, exp_squared, exponent = sums(x, C, CENTRED, SQUARED, EXP_SQUARED)
        at = partials + (first_tile + column_tile).to(tl.int64) * n + rows
        step = tl.cast(all_tiles, tl.int64) * n
        store_sums(
            at, step, inside, maximum, total, centred, squared, exp_squared, CENTRED, SQUARED, EXP_SQUARED
        )
        if KEEP:
            _store(kept, exponent.to(tl.float16), row, column, n, v, kept_stride, BM, BN, TMA)


@triton.jit
def linear_gradient_kernel(
    hidden, weight, bias, factor, maximum, log_sum, a, b, out, scale, softcap,
    n, v, H, hidden_stride, weight_stride, out_stride, at_once, tiles_a_program,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """out [n, v] in dtype OUT: the gradient for the raw logits, without the targets' part."""
    row_tiles = tl.cdiv(n, BM)
    column_tiles = tl.cdiv(v, BN)
    first, last = _tiles_of_program(row_tiles * column_tiles, at_once, tiles_a_program)
    for tile in tl.range(first, last, at_once, flatten=True):
        row_tile, column_tile = _place(tile, row_tiles, column_tiles, GROUP)
        row = row_tile * BM
        column = column_tile * BN
        logits = _logits(
            hidden, weight, bias, row, column, n, v, H, hidden_stride, weight_stride,
            BM, BN, BK, TMA, BIAS, UPCAST,
        )  # fmt: skip
        x = transformed(logits, scale, softcap, SOFTCAP)
        rows = row + tl.arange(0, BM)
        inside = rows < n
        row_factor = tl.load(factor + rows, mask=inside, other=1.0)
        largest = tl.load(maximum + rows, mask=inside, other=0.0)
        logarithm = tl.load(log_sum + rows, mask=inside, other=0.0)
        constant = tl.load(a + rows, mask=inside, other=0.0)
        linear = tl.load(b + rows, mask=inside, other=0.0)
        tile_gradient = gradient(
            x, x * row_factor[:, None], largest[:, None], logarithm[:, None], constant[:, None],
            linear[:, None], softcap, SOFTCAP,
        )  # fmt: skip
        _store(out, tile_gradient.to(OUT), row, column, n, v, out_stride, BM, BN, TMA)

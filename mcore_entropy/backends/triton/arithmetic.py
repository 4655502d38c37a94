"""What the kernels do to logits, once: transform, sums relative to a maximum, merging, and the gradient.

The formulas are those of `mcore_entropy.statistics`, with exponentials to base 2, which is what the hardware
has. x is a logit after the transform's softcap, or raw without one; z = x * factor, where the factor of a row
is scale / temperature (1 / temperature under a softcap, which contains the scale). Then
e^(z - max z) = 2^((x - max x) C) with C = factor * log2(e). T and Q are in units of base 2 in here.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)

# Exponents are cut here from below: 2^x is exactly 0 in fp32 below -150, and 0 * (-inf) never comes up. fp16
# holds it. A NaN passes through the cut.
LOWEST_EXPONENT: tl.constexpr = tl.constexpr(-1.5e4)
_MINUS_INFINITY: tl.constexpr = tl.constexpr(float("-inf"))


@triton.jit
def _cut(exponent):
    return tl.maximum(exponent, LOWEST_EXPONENT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _tanh(x):
    """tanh to fp32 accuracy near 0 too, where the exponential form loses its digits."""
    square = x * x
    series = 1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835))))
    positive = tl.abs(x)
    far = 1.0 - 2.0 / (1.0 + tl.exp2(positive * (2.0 * LOG2_E)))
    return tl.where(positive < 0.25, x * series, tl.where(x < 0, -far, far))


@triton.jit
def transformed(logits, scale, softcap, SOFTCAP: tl.constexpr):
    """x of raw logits: softcap * tanh(scale * l / softcap), infinities staying infinite, or l."""
    if SOFTCAP:
        capped = softcap * _tanh(logits * (scale / softcap))
        logits = tl.where(tl.abs(logits) == float("inf"), logits, capped)
    return logits


@triton.jit
def slope(x, softcap):
    """The softcap's derivative, without the scale, at the transformed logit: 1 - tanh^2."""
    tanh_of_logit = x / softcap
    # An infinite logit stayed infinite. A NaN passes.
    tanh_of_logit = tl.where(tl.abs(tanh_of_logit) > 1.0, 1.0, tanh_of_logit)
    return (1.0 - tanh_of_logit) * (1.0 + tanh_of_logit)


@triton.jit
def sums_below(
    x, maximum, C, AXIS: tl.constexpr, CENTRED: tl.constexpr, SQUARED: tl.constexpr, EXP_SQUARED: tl.constexpr
):
    """S, T, Q, R of x along an axis, relative to a maximum, and the exponents; those not wanted are S."""
    finite = tl.where(maximum == _MINUS_INFINITY, 0.0, maximum)
    exponent = _cut((x - finite) * C)
    exp = tl.exp2(exponent)
    total = tl.sum(exp, AXIS)
    centred = total
    squared = total
    exp_squared = total
    if CENTRED:
        centred = tl.sum(exp * exponent, AXIS)
    if SQUARED:
        squared = tl.sum(exp * exponent * exponent, AXIS)
    if EXP_SQUARED:
        exp_squared = tl.sum(exp * exp, AXIS)
    return total, centred, squared, exp_squared, exponent


@triton.jit
def sums(x, C, CENTRED: tl.constexpr, SQUARED: tl.constexpr, EXP_SQUARED: tl.constexpr):
    """Row maximum of x [R, columns], and S, T, Q, R relative to it, [R] each, and the exponents. C: [R]."""
    maximum = tl.max(x, 1)
    total, centred, squared, exp_squared, exponent = sums_below(
        x, maximum[:, None], C[:, None], 1, CENTRED, SQUARED, EXP_SQUARED
    )
    return maximum, total, centred, squared, exp_squared, exponent


@triton.jit
def rescaled(
    maximum, larger, C, total, centred, squared, exp_squared,
    CENTRED: tl.constexpr, SQUARED: tl.constexpr, EXP_SQUARED: tl.constexpr,
):  # fmt: skip
    """S, T, Q, R relative to a larger maximum than the one they came with."""
    difference = _cut(tl.where(maximum == larger, 0.0, (maximum - larger) * C))
    ratio = tl.exp2(difference)
    if SQUARED:
        squared = ratio * (squared + difference * (2.0 * centred + difference * total))
    if CENTRED:
        centred = ratio * (centred + difference * total)
    if EXP_SQUARED:
        exp_squared = ratio * ratio * exp_squared
    return ratio * total, centred, squared, exp_squared


@triton.jit
def target_z(x, maximum, factor):
    """z of a target whose transformed logit is x, in a row whose largest is `maximum`.

    Each z is a rounded product, and their difference would have the errors of both: so the target's is the
    maximum's, rounded, and the distance from there. Cut at the maximum: the head sums a target's products in
    another order than the tile's, and no probability is above 1.
    """
    largest = maximum * factor
    z = tl.where(factor == 1.0, x, largest + (x - maximum) * factor)
    z = tl.where(x >= maximum, largest, z)
    return tl.where(x == _MINUS_INFINITY, _MINUS_INFINITY, z)


@triton.jit
def store_sums(
    out, step, inside, maximum, total, centred, squared, exp_squared,
    CENTRED: tl.constexpr, SQUARED: tl.constexpr, EXP_SQUARED: tl.constexpr,
):  # fmt: skip
    """Write maximum, S, then T, Q, R as wanted, each `step` elements behind the one before."""
    tl.store(out, maximum, mask=inside)
    out += step
    tl.store(out, total, mask=inside)
    if CENTRED:
        out += step
        tl.store(out, centred, mask=inside)
    if SQUARED:
        out += step
        tl.store(out, squared, mask=inside)
    if EXP_SQUARED:
        out += step
        tl.store(out, exp_squared, mask=inside)


@triton.jit
def zero_in_dead_rows(result, maximum, log_sum):
    """0 for a dead row (maximum +inf, logarithm 0), whose logits may be NaN.

    A row with a logit of +inf has that maximum too, but NaN for its logarithm.
    """
    return tl.where((maximum == float("inf")) & (log_sum == 0.0), 0.0, result)


@triton.jit
def gradient(x, z, maximum, log_sum, a, b, softcap, SOFTCAP: tl.constexpr):
    """p (a + b ln p) times the softcap's slope, for ln p = (z - maximum) - log_sum; all are broadcast.

    Maximum and logarithm stay two numbers, as `mcore_entropy.statistics.Normalizer` says.
    """
    log2_p = _cut((z - maximum) * LOG2_E - log_sum * LOG2_E)
    result = tl.exp2(log2_p) * (a + (b * LN_2) * log2_p)
    if SOFTCAP:
        result *= slope(x, softcap)
    return result

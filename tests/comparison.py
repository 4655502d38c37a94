"""How results are compared: with the truth, measured by eager's own error, or bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor

# How many times eager's error ours may have: the largest error, the root of the mean square.
# Measured over 40 seeds, 24 tokens and 517 columns: medians 0.7-1.0 for values and fp32 gradients,
# the worst 1.9 and 1.3. Gradients of the fused head in half precision: medians 0.2, the worst 0.9
# and 0.4, because ours does not round the logits; values there are held against eager in fp32.
VALUES = (2.0, 1.5)
GRADIENTS = (2.0, 1.5)
HALF_PRECISION_HEAD_GRADIENTS = (1.0, 0.5)


def _describe(index: int, ours: Tensor, truth: Tensor, eager: Tensor) -> str:
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), truth.shape))
    values = [f"{float(x.flatten()[index]):.9g}" for x in (ours, truth, eager)]
    return "at {}: ours {}, truth {}, eager {}".format(where, *values)


def assert_within_eager(
    ours: Tensor,
    truth: Tensor,
    eager: Tensor,
    multiple: float | tuple[float, float],
    floor: float = 4.0,
    name: str = "value",
    size: Tensor | None = None,
) -> None:
    """Our error against the truth is at most `multiple` times eager's, plus `floor` ulp.

    Three norms of the error have to hold: the largest, the root of the mean square (`multiple` may
    give it a number of its own), and the largest relative to the number itself, without which one
    big number (a gradient at its target) would excuse any error in the thousands of small ones
    beside it. "Relative" is to `size` (default: |truth|) + its median, or a ten-thousandth of its
    largest if that is more: below that, last digits mean nothing in any implementation. For a
    gradient `size` is `truth.sizes`, or a number where the terms happen to cancel, known to eager by
    luck, would set the measure.

    floor: units in the last place of our dtype, at the largest |truth| in the first two norms.
    Eager can be right to the last bit by luck in a few dozen numbers, and a result that is 4 ulp off
    is still as good as its dtype allows. In fp64 the truth has rounding errors of its own, in part
    the same as eager's: the floor is 16 times higher there, and 2^20 ulp (ten digits) in the
    relative norm. fp64 proves the formulas, the other dtypes the arithmetic.

    Not-finite numbers have to be the same in ours and in the truth; eager may do worse there.
    """
    assert ours.shape == truth.shape, f"{name}: shape {ours.shape}, expected {truth.shape}"
    dtype, double = ours.dtype, ours.dtype == torch.float64
    o, t, e = (x.detach().double() for x in (ours, truth, eager))
    odd = ~torch.isfinite(t)
    same = torch.where(odd, (o == t) | (o.isnan() & t.isnan()), torch.isfinite(o))
    if not bool(same.all()):
        index = int((~same).flatten().to(torch.uint8).argmax())
        count = int((~same).sum())
        raise AssertionError(
            f"{name}: {count} of {same.numel()} not finite where they should be, or the reverse; "
            f"first {_describe(index, o, t, e)}"
        )
    if not t.numel():
        return
    largest, rms = (multiple, multiple) if isinstance(multiple, float | int) else multiple
    our_error = torch.where(odd, 0.0, (o - t).abs())
    eager_error = torch.where(odd | ~torch.isfinite(e), 0.0, (e - t).abs())
    largest_truth = torch.where(odd, 0.0, t.abs()).max()
    size = torch.where(odd, 0.0, t.abs() if size is None else size)
    # A result below the normal range of its dtype cannot be closer than one subnormal step.
    unit, step = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    absolute = (16.0 if double else 1.0) * floor * unit * largest_truth + step
    middle = torch.maximum(size[size > 0].median(), 1e-4 * size.max()) if bool(size.any()) else 1.0
    scale = size + middle
    relative = (2.0**20 if double else floor) * unit + step / scale
    norms = {
        "largest error": (largest, our_error, eager_error, absolute),
        "root mean square error": (rms, _rms(our_error), _rms(eager_error), absolute),
        "largest relative error": (largest, our_error / scale, eager_error / scale, relative),
    }
    for norm, (times, mine, theirs, allowance) in norms.items():
        excess = mine - (times * theirs.max() + allowance)
        if bool((excess > 0).any()):
            worst = int(excess.argmax()) if excess.dim() else int(our_error.argmax())
            raise AssertionError(
                f"{name}: {norm} {float(mine.max()):.4g} against {float(theirs.max()):.4g} of eager "
                f"(allowed {times:g} times that + {float(allowance.min()):.3g}); "
                f"worst {_describe(worst, o, t, e)}"
            )


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def assert_same_bits(ours: Tensor, other: Tensor, name: str = "value") -> None:
    """Equal to the bit, NaN and the sign of zero included; the failure says where."""
    assert ours.shape == other.shape and ours.dtype == other.dtype, (
        f"{name}: {ours.dtype} {tuple(ours.shape)} and {other.dtype} {tuple(other.shape)}"
    )
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = kinds[ours.element_size()]
    mine, theirs = ours.detach().contiguous().view(kind), other.detach().contiguous().view(kind)
    different = (mine != theirs).flatten()
    if bool(different.any()):
        index = int(different.to(torch.uint8).argmax())
        raise AssertionError(
            f"{name}: {int(different.sum())} of {different.numel()} differ; "
            f"first {_describe(index, ours.detach(), other.detach(), other.detach())}"
        )

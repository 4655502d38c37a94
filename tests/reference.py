"""What the tests compare with: the dense formulas in fp64, and what a user writes today.

`truth_*` is the reference: everything is upcast to fp64 and the whole `[tokens, vocab]` softmax is
held. `eager_*` is the same computation as people write it, in the input's dtype with fp32
statistics; its error against the truth is the yardstick that `assert_within_eager` measures ours
with. Neither imports the library.

Shapes: `[*]` any leading shape, V vocabulary (whole, unsharded), H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

METRICS = ("sum_pi_squared", "varentropy", "max_prob")

# Errors of ours over errors of eager, per quantity and kind of input. Values of the fused head are
# not in here for half precision: there the yardstick is eager on inputs upcast to fp32, because
# ours never rounds logits to half precision.
VALUE_MULTIPLE = 2.0
GRADIENT_MULTIPLE = {
    torch.float64: 2.0,
    torch.float32: 2.0,
    torch.bfloat16: 1.5,
    torch.float16: 1.5,
}


@dataclass(frozen=True)
class Dense:
    """Results of one dense evaluation, with the gradients by input name."""

    log_probs: Tensor
    entropy: Tensor
    metrics: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)


# --------------------------------------------------------------------------- fp64 truth


def _transform(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    scaled = logits if scale == 1.0 else logits * scale
    return scaled if softcap is None else softcap * torch.tanh(scaled / softcap)


def _per_row(temperature: float | Tensor, rows: torch.Size, dtype: torch.dtype) -> Tensor:
    if isinstance(temperature, Tensor):
        return temperature.detach().to(dtype).reshape(rows)
    return torch.full(rows, temperature, dtype=dtype)


def _truth_statistics(
    logits: Tensor,
    target: Tensor | None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
) -> tuple[Dense, Tensor]:
    """The formulas on fp64 logits, differentiable; also which rows are bad."""
    assert logits.dtype == torch.float64
    rows, columns = logits.shape[:-1], logits.shape[-1]
    tau = _per_row(temperature, rows, torch.float64)
    keep = torch.ones(rows, dtype=torch.bool) if mask is None else mask
    exists = torch.arange(columns) < (columns if vocab_size is None else vocab_size)
    alive = exists & ~torch.isneginf(logits)
    poisoned = ((torch.isnan(logits) | torch.isposinf(logits)) & exists).any(-1)
    bad = keep & (poisoned | ~alive.any(-1) | ~(tau > 0))
    # Dead columns and rows that are not computed are cut out before any arithmetic, so that
    # autograd never meets inf - inf or 0 * inf.
    use = alive & (keep & ~bad)[..., None]
    z = _transform(torch.where(use, logits, 0.0), scale, softcap)
    z = z / torch.where(keep & ~bad, tau, 1.0)[..., None]
    z = torch.where(use | ~(keep & ~bad)[..., None], z, -torch.inf)
    z = torch.where(use, z - z.detach().amax(-1, keepdim=True), z)
    weights = torch.where(use, z, -torch.inf).exp()
    total = torch.where(keep & ~bad, weights.sum(-1), 1.0)
    log_p = torch.where(use, z, 0.0) - total.log()[..., None]
    p = torch.where(use, log_p.exp(), 0.0)
    entropy = -(p * torch.where(use, log_p, 0.0)).sum(-1)
    spread = torch.where(use, log_p + entropy[..., None], 0.0)
    metrics = {
        "sum_pi_squared": p.square().sum(-1),
        "varentropy": (p * spread.square()).sum(-1),
        "max_prob": p.amax(-1) if columns else torch.zeros(rows, dtype=torch.float64),
    }
    log_probs = torch.zeros(rows, dtype=torch.float64)
    if target is not None:
        ignored = target == ignore_index
        index = torch.where(ignored | ~keep, 0, target)[..., None]
        log_probs = torch.where(use, log_p, -torch.inf).gather(-1, index)[..., 0]
        log_probs = torch.where(ignored | ~keep, 0.0, log_probs)
    nan = torch.full(rows, torch.nan, dtype=torch.float64)

    def finish(value: Tensor) -> Tensor:
        return torch.where(bad, nan, torch.where(keep, value, 0.0))

    dense = Dense(finish(log_probs), finish(entropy), {k: finish(v).detach() for k, v in metrics.items()})
    return dense, bad


def truth_logits(
    logits: Tensor,
    target: Tensor | None = None,
    *,
    grad_log_probs: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    **options: Any,
) -> Dense:
    """fp64 statistics of dense logits, and the gradient w.r.t. the logits as `gradients["logits"]`.

    A bad row (all -inf, NaN, +inf, temperature not above 0) is NaN in values and gradient.
    """
    leaf = logits.detach().to(torch.float64).requires_grad_()
    dense, bad = _truth_statistics(leaf, target, **options)
    loss = leaf.new_zeros(())
    for value, grad in ((dense.log_probs, grad_log_probs), (dense.entropy, grad_entropy)):
        if grad is not None:
            # where() and not a product: neither a bad row nor a -inf log-prob may leak through.
            fine = torch.isfinite(value)
            loss = loss + (torch.where(fine, value, 0.0) * grad.detach().double()).sum()
    (gradient,) = torch.autograd.grad(loss, leaf) if loss.requires_grad else (leaf * 0,)
    gradient = torch.where(bad[..., None], torch.nan, gradient)
    return Dense(dense.log_probs.detach(), dense.entropy.detach(), dense.metrics, {"logits": gradient})


def truth_linear(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    **options: Any,
) -> Dense:
    """The same for hidden `[*, H]` and weight `[V, H]`: gradients "hidden", "weight", "bias"."""
    h, w = hidden.detach().double(), weight.detach().double()
    if mask is not None:  # masked rows may hold anything
        h = torch.where(mask[..., None], h, 0.0)
    logits = h @ w.T if bias is None else h @ w.T + bias.detach().double()
    dense = truth_logits(logits, target, mask=mask, **options)
    g = dense.gradients["logits"]
    gradients = {"hidden": g @ w, "weight": g.flatten(0, -2).T @ h.flatten(0, -2), "logits": g}
    if bias is not None:
        gradients["bias"] = g.flatten(0, -2).sum(0)
    return Dense(dense.log_probs, dense.entropy, dense.metrics, gradients)


# --------------------------------------------------------------------------- eager baseline


def _eager_statistics(
    logits: Tensor,
    target: Tensor | None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
) -> Dense:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    z = _transform(logits, scale, softcap)
    if isinstance(temperature, Tensor):
        z = z / temperature.to(z.dtype)[..., None]
    elif temperature != 1.0:
        z = z / temperature
    if vocab_size is not None:
        z = z.masked_fill(torch.arange(z.shape[-1]) >= vocab_size, -torch.inf)
    log_p = F.log_softmax(z, dim=-1)
    p = log_p.exp()
    entropy = -(p * log_p.masked_fill(torch.isneginf(log_p), 0.0)).sum(-1)
    deviation = log_p.masked_fill(torch.isneginf(log_p), 0.0) + entropy[..., None]
    metrics = {
        "sum_pi_squared": p.square().sum(-1).detach(),
        "varentropy": (p * deviation.square()).sum(-1).detach(),
        "max_prob": p.amax(-1).detach() if p.numel() else entropy.detach(),
    }
    log_probs = torch.zeros_like(entropy)
    if target is not None:
        skip = target == ignore_index if mask is None else (target == ignore_index) | ~mask
        log_probs = log_p.gather(-1, target.masked_fill(skip, 0)[..., None])[..., 0]
        log_probs = log_probs.masked_fill(skip, 0.0)
    if mask is not None:
        entropy = entropy.masked_fill(~mask, 0.0)
    return Dense(log_probs, entropy, metrics)


def _eager_backward(
    dense: Dense, leaves: dict[str, Tensor], grads: tuple[Tensor | None, Tensor | None]
) -> Dense:
    pairs = [
        (value, grad.to(value.dtype))
        for value, grad in zip((dense.log_probs, dense.entropy), grads, strict=True)
        if grad is not None and value.requires_grad
    ]
    gradients = {}
    if pairs:
        values, upstream = zip(*pairs, strict=True)
        found = torch.autograd.grad(values, list(leaves.values()), upstream)
        gradients = dict(zip(leaves, found, strict=True))
    return Dense(dense.log_probs.detach(), dense.entropy.detach(), dense.metrics, gradients)


def eager_logits(
    logits: Tensor,
    target: Tensor | None = None,
    *,
    grad_log_probs: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    **options: Any,
) -> Dense:
    """log_softmax on `logits.float()` with autograd, as written today."""
    leaf = logits.detach().requires_grad_()
    dense = _eager_statistics(leaf, target, **options)
    return _eager_backward(dense, {"logits": leaf}, (grad_log_probs, grad_entropy))


def eager_linear(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    grad_log_probs: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    **options: Any,
) -> Dense:
    """F.linear in the inputs' dtype, then the same."""
    leaves = {"hidden": hidden.detach().requires_grad_(), "weight": weight.detach()}
    leaves["weight"].requires_grad_()
    if bias is not None:
        leaves["bias"] = bias.detach().requires_grad_()
    logits = F.linear(leaves["hidden"], leaves["weight"], leaves.get("bias"))
    dense = _eager_statistics(logits, target, **options)
    return _eager_backward(dense, leaves, (grad_log_probs, grad_entropy))


# --------------------------------------------------------------------------- comparison


def ulps(truth: Tensor, dtype: torch.dtype, count: float = 4.0) -> float:
    """`count` units in the last place of `dtype` at the largest magnitude in `truth`.

    The floor under a multiple of eager's error: in a few dozen numbers eager can be right to the
    last bit by luck, and a result that is a few ulp off is still as good as its dtype allows.
    For fp64 the truth has rounding errors of its own, of the same size as ours and in part the same
    as eager's, so the allowances are larger there (16 times here, ten digits in the relative norm
    below): fp64 proves the formulas, the other dtypes the arithmetic.
    """
    finite = truth[torch.isfinite(truth)]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return (16.0 if dtype == torch.float64 else 1.0) * count * torch.finfo(dtype).eps * largest


def _describe(index: int, ours: Tensor, truth: Tensor, eager: Tensor) -> str:
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), truth.shape))
    values = [f"{float(x.flatten()[index]):.9g}" for x in (ours, truth, eager)]
    return "at {}: ours {}, truth {}, eager {}".format(where, *values)


def assert_within_eager(
    ours: Tensor,
    truth: Tensor,
    eager: Tensor,
    multiple: float,
    floor: float | None = None,
    name: str = "value",
) -> None:
    """Our error against the truth is at most `multiple` times eager's, plus `floor`.

    Three norms of the error have to hold: the largest, the root of the mean square, and the
    largest relative to the number itself, without which one big number (a gradient at its target)
    would excuse any error in the thousands of small ones beside it. "Relative" is to |truth| +
    the median |truth|, or a ten-thousandth of the largest if that is more: numbers far below either
    are differences of rounded terms, and their last digits mean nothing in any implementation.
    Not-finite numbers have to be the same in ours and in the truth; eager may do worse there.
    """
    assert ours.shape == truth.shape, f"{name}: shape {ours.shape}, expected {truth.shape}"
    if floor is None:
        floor = ulps(truth, ours.dtype)
    resolution, dtype = torch.finfo(ours.dtype).eps, ours.dtype
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
    our_error = torch.where(odd, 0.0, (o - t).abs())
    eager_error = torch.where(odd | ~torch.isfinite(e), 0.0, (e - t).abs())
    if not our_error.numel():
        return
    # A result below the normal range of its dtype cannot be closer than one subnormal step.
    step = torch.finfo(dtype).smallest_normal * resolution
    floor = max(floor, step)
    nonzero = t[(t != 0) & ~odd].abs()
    middle = max(float(nonzero.median()), 1e-4 * float(nonzero.max())) if nonzero.numel() else 1.0
    scale = torch.where(odd, 1.0, t.abs() + middle)
    relative_floor = (2.0**20 if dtype == torch.float64 else 4.0) * resolution + step / scale
    checks = {
        "largest error": (our_error, eager_error, floor),
        "root mean square error": (
            our_error.square().mean().sqrt(),
            eager_error.square().mean().sqrt(),
            floor,
        ),
        "largest relative error": (our_error / scale, eager_error / scale, relative_floor),
    }
    for norm, (mine, theirs, allowance) in checks.items():
        bound = multiple * theirs.max() + allowance
        if bool((mine > bound).any()):
            worst = int((mine - bound).argmax()) if mine.dim() else int(our_error.argmax())
            raise AssertionError(
                f"{name}: {norm} {float(mine.max()):.4g} against {float(theirs.max()):.4g} of "
                f"eager (allowed {multiple:g} times that + {float(torch.as_tensor(allowance).min()):.3g}); "
                f"worst {_describe(worst, o, t, e)}"
            )


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

"""What the tests compare with: the dense formulas in fp64, and what a user writes today.

`truth_*` is the reference: everything is upcast to fp64 and the whole `[tokens, vocab]` softmax is
held. `eager_*` is the same computation as people write it, in the input's dtype with fp32
statistics; its error against the truth is the yardstick for ours, see tests/comparison.py. Neither
imports the library.

Shapes: `[*]` any leading shape, V vocabulary (whole, unsharded), H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

METRICS = ("sum_pi_squared", "varentropy", "max_prob")


@dataclass(frozen=True)
class Dense:
    """Results of one dense evaluation, with the gradients by input name.

    sizes: of the truth's gradients, the sum of the magnitudes of the terms that each number is made of.
    """

    log_probs: Tensor
    entropy: Tensor
    metrics: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    sizes: dict[str, Tensor] = field(default_factory=dict)


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
) -> tuple[Dense, Tensor, Tensor]:
    """The formulas on fp64 logits, differentiable; also which rows are bad, and ln p."""
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
    # ln p + H, without the ln S in both, which would leave its rounding where all p are alike.
    spread = torch.where(use, z - (p * torch.where(use, z, 0.0)).sum(-1, keepdim=True), 0.0)
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
    return dense, bad, torch.where(use, log_p, -torch.inf).detach()


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
    dense, bad, log_p = _truth_statistics(leaf, target, **options)
    loss = leaf.new_zeros(())
    for value, grad in ((dense.log_probs, grad_log_probs), (dense.entropy, grad_entropy)):
        if grad is not None:
            # where() and not a product: neither a bad row nor a -inf log-prob may leak through.
            fine = torch.isfinite(value)
            loss = loss + (torch.where(fine, value, 0.0) * grad.detach().double()).sum()
    (gradient,) = torch.autograd.grad(loss, leaf) if loss.requires_grad else (leaf * 0,)
    gradient = torch.where(bad[..., None], torch.nan, gradient)
    size = _size_of_terms(leaf.detach(), target, log_p, dense.entropy.detach(), grad_log_probs, grad_entropy)
    size = size * _steepness(leaf.detach(), **options)
    return Dense(
        dense.log_probs.detach(),
        dense.entropy.detach(),
        dense.metrics,
        {"logits": gradient},
        {"logits": size},
    )


def _size_of_terms(
    logits: Tensor,
    target: Tensor | None,
    log_p: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """|g_lp| (onehot + p) + |g_H| p (|ln p| + entropy), of which the gradient is a difference."""
    p, size = log_p.exp(), torch.zeros_like(logits)
    if grad_entropy is not None:
        terms = torch.where(p > 0, p * (log_p.abs() + entropy[..., None]), 0.0)
        size = size + grad_entropy.double().abs()[..., None] * terms
    if grad_log_probs is not None and target is not None:
        onehot = torch.arange(logits.shape[-1]) == target[..., None]
        size = size + grad_log_probs.double().abs()[..., None] * (p + onehot)
    return size


def _steepness(
    logits: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    **_: Any,
) -> Tensor:
    """|dz/dl|, 0 where temperature is no use."""
    tau = _per_row(temperature, logits.shape[:-1], torch.float64)[..., None]
    slope = torch.full_like(logits, abs(scale))
    if softcap is not None:
        slope = slope * (1 - torch.tanh(logits * scale / softcap).square())
    return torch.where(tau > 0, slope / tau, 0.0)


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
    flat = [x["logits"].flatten(0, -2) for x in (dense.gradients, dense.sizes)]
    products = []
    for g, a, b in ((flat[0], h, w), (flat[1], h.abs(), w.abs())):
        weighted = {"hidden": (g @ b).reshape(h.shape), "weight": g.T @ a.flatten(0, -2), "bias": g.sum(0)}
        products.append(weighted)
    return Dense(dense.log_probs, dense.entropy, dense.metrics, *products)


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

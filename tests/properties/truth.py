"""The fp64 truth of a case, and how exactly each of its numbers can be computed.

Values and gradients are those of tests/reference.py. The *size* of a number is the sum of the magnitudes of
the terms of its first-order rounding error, in units in the last place: an implementation in fp32 that rounds
each intermediate result of DESIGN's formulas once is that far off at most, up to a small factor. With
d = z - m, p = e^d / S and w the uncertainty of d itself (a product's, a division's; 0 where z is exact)::

    size of ln S       s = sum p (w + |d| + 1) + 1
    size of log_prob   w_y + |d_y| + s + ln S + |log_prob|
    size of entropy    sum p |ln p + H| (w + |d|) + sum p |1 - d + T/S| + 3 |T/S| + 1 + ln S
    size of p          p (w + |d| + |ln p| + s + ln S + 2)

so a large offset or a spread of logits widens the allowance only where it does so for any implementation.
Where the uncertainty of z is no longer small against 1 (|z| = 2^100 divided by 0.7) nothing is left to
compare: such a row is not `determined`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp

import torch
from torch import Tensor

from tests import reference as ref
from tests.properties.case import Case
from tests.properties.tensors import Whole, out_dtype

# Units in the last place of the statistics' dtype for a size of 1. Over 2,400 drawn cases they were at most
# 1.0 in fp32 and 1.2 in fp64, where the truth has rounding errors of its own.
ULP = {torch.float32: 2.0, torch.float64: 4.0}


@dataclass
class Truth:
    """Numbers [*] (gradients by input name), their sizes, and the kinds of rows, bool [*].

    bad: NaN. determined: can be compared. live: a gradient flows into the row.
    """

    values: dict[str, Tensor]
    value_sizes: dict[str, Tensor]
    gradients: dict[str, Tensor]
    gradient_sizes: dict[str, Tensor]
    kept: Tensor
    bad: Tensor
    determined: Tensor
    live: Tensor
    counted: int


@dataclass
class _Logits:
    """Raw logits in fp64, and in ulps how far off each of them is before the transform, |l| included."""

    raw: Tensor
    off: Tensor
    exact: bool


def _raw_logits(case: Case, whole: Whole) -> tuple[_Logits, dict[str, Tensor]]:
    """Without what does not count; with the fp64 operands of the head."""
    mask = torch.ones(case.lead, dtype=torch.bool) if whole.mask is None else whole.mask
    if case.form != "linear":
        raw = whole.inputs["logits"][..., : case.counted].double()
        return _Logits(raw, torch.zeros_like(raw), True), {}
    operands = {name: x.detach() for name, x in whole.inputs.items()}
    if case.autocast and case.dtype != "float64":
        operands |= {name: operands[name].bfloat16() for name in ("hidden", "weight")}
    h = torch.where(mask[..., None], operands["hidden"].double(), 0.0)
    w = operands["weight"].double()[: case.counted]
    bias = operands["bias"].double()[: case.counted] if "bias" in operands else w.new_zeros(len(w))
    raw = h @ w.T + bias
    off = h.abs() @ w.abs().T + torch.where(bias.isfinite(), bias.abs(), 0.0)
    return _Logits(raw, off, False), {"hidden": h, "weight": w}


def _upstream(case: Case, whole: Whole, kept: Tensor) -> tuple[Tensor, Tensor]:
    """As they reach the formulas, fp64, zeros for none."""
    nothing = torch.zeros(case.lead, dtype=torch.float64)
    g_lp, g_h = (nothing if g is None else g.double() for g in whole.upstream)
    if case.form in ("entropy", "chunks"):
        g_lp = nothing
    if not case.entropy:
        g_h = nothing
    ignored = whole.target.long() == case.ignore_index
    return torch.where(kept & ~ignored, g_lp, 0.0), torch.where(kept, g_h, 0.0)


def truth_of(case: Case, whole: Whole) -> Truth:
    kept = torch.ones(case.lead, dtype=torch.bool) if whole.mask is None else whole.mask.clone()
    logits, operands = _raw_logits(case, whole)
    g_lp, g_h = _upstream(case, whole, kept)
    live = (g_lp != 0) | (g_h != 0)
    target = whole.target.long()
    dense = ref.truth_logits(
        logits.raw,
        target,
        scale=case.scale,
        softcap=case.softcap,
        temperature=_per_row(whole.temperature, kept.shape),
        mask=kept,
        ignore_index=case.ignore_index,
        grad_log_probs=g_lp,
        grad_entropy=g_h,
    )
    # Of two rules for an ignored target in a bad row, 0 and NaN, the one that spares the loss holds.
    log_probs = torch.where(kept & (target == case.ignore_index), 0.0, dense.log_probs)
    values = {"log_probs": log_probs, "entropy": dense.entropy, **dense.metrics}
    bad = dense.entropy.isnan()
    sized = _Sizes(
        case, whole, logits, kept & ~bad, torch.where(kept & (target != case.ignore_index), target, -1)
    )
    value_sizes = sized.of_values()
    gradient, size = dense.gradients["logits"].clone(), sized.of_gradient(g_lp, g_h)
    # The reference lets nothing flow through a log-prob of -inf; the formula, g (onehot - p), is finite.
    unlikely = torch.isneginf(dense.log_probs) & kept & ~bad
    onehot = torch.arange(case.counted) == target[..., None]
    missing = g_lp[..., None] * (onehot.double() - sized.p) * sized.slope
    gradient = torch.where(unlikely[..., None], gradient + missing, gradient)
    fine = (live & ~bad)[..., None]
    gradient, size = torch.where(fine, gradient, 0.0), torch.where(fine, size, 0.0)
    gradients, sizes = {"logits": gradient}, {"logits": size}
    if operands:
        gradients, sizes = _through_the_head(operands, gradient, size, fine)
    return Truth(values, value_sizes, gradients, sizes, kept, bad, sized.determined, live, case.counted)


def _through_the_head(
    operands: dict[str, Tensor], gradient: Tensor, size: Tensor, fine: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The products of the logits' gradient. Their own rounding is relative to the sum of |terms|."""
    w, rows = operands["weight"], gradient.shape[:-1].numel()
    h = torch.where(fine, operands["hidden"], 0.0)
    g, total = (x.reshape(rows, w.shape[0]) for x in (gradient, size + gradient.abs()))
    products = []
    for left, a, b in ((g, h, w), (total, h.abs(), w.abs())):
        products.append(
            {
                "hidden": (left @ b).reshape(h.shape),
                "weight": left.T @ a.reshape(rows, h.shape[-1]),
                "bias": left.sum(0),
            }
        )
    return products[0], products[1]


class _Sizes:
    """See the text at the top. Rows that are not `fine` get numbers that mean nothing."""

    def __init__(self, case: Case, whole: Whole, logits: _Logits, fine: Tensor, target: Tensor) -> None:
        tau, power = _temperature(whole.temperature, torch.Size(case.lead), fine)
        raw = torch.where(fine[..., None], logits.raw, 0.0)
        alive = ~torch.isneginf(raw)
        l = torch.where(alive, raw, 0.0)  # noqa: E741 - the derivation's letter
        inner = l * case.scale / (case.softcap or 1.0)
        capped = inner.tanh() if case.softcap is not None else inner
        rise = 1 - capped.square() if case.softcap is not None else torch.ones_like(inner)
        z = capped * (case.softcap or 1.0) / tau
        self.slope = torch.where(
            alive, rise * case.scale / tau, 0.0 if case.softcap is not None else case.scale / tau
        )
        exact = power & (case.scale == 1.0) & (case.softcap is None)
        off = logits.off * self.slope + torch.where(exact, 0.0, z.abs())
        # 1 - tanh^2 is (1 + t)(1 - t), absolutely off by what t is.
        slope_off = 2 * capped.abs() * (capped.abs() + rise * inner.abs() + rise * logits.off * case.scale)
        self.slope_off = 0.0 if case.softcap is None else slope_off * case.scale / tau
        z = torch.where(alive, z, -torch.inf)
        m = z.amax(-1, keepdim=True)
        first = z.argmax(-1, keepdim=True)
        self.alive, self.d = alive, torch.where(alive, z - m, 0.0)
        # Equal logits, given, have equal z whatever rounds them.
        same = (raw == raw.gather(-1, first)) & logits.exact
        self.w = torch.where(same, 0.0, off + off.gather(-1, first)) + self.d.abs()
        exp = torch.where(alive, self.d.exp(), 0.0)
        total = exp.sum(-1, keepdim=True)
        self.p, self.log_sum = exp / total, total.log()
        self.log_p = torch.where(alive, self.d - self.log_sum, 0.0)
        self.mean = (self.p * self.d).sum(-1, keepdim=True)
        self.entropy = self.log_sum - self.mean
        self.sum_size = (self.p * (self.w + 1)).sum(-1, keepdim=True) + 1
        dtype = out_dtype(case)
        self.unit = torch.finfo(dtype).eps
        self.tiny = torch.finfo(dtype).tiny / self.unit
        unsure = ULP[dtype] * self.unit * self.w
        gone = self.d + unsure < (-110.0 if dtype == torch.float32 else -750.0)
        self.determined = ~fine | ~(alive & (unsure > 0.05) & ~gone).any(-1)
        self.target = target

    def of_values(self) -> dict[str, Tensor]:
        at = self.target.clamp(0, self.p.shape[-1] - 1)[..., None]
        of_log_prob = self.w + self.d.abs() + self.sum_size + self.log_sum + self.log_p.abs()
        spread = self.d - self.mean
        second = (self.p * self.d.square()).sum(-1, keepdim=True)
        varentropy = second - self.mean.square()
        top, squares = self.p.amax(-1), self.p.square()
        linear = (spread.square() - varentropy + 2 * spread).abs() * self.w
        quadratic = (self.d.square() - second - 2 * self.mean * spread).abs()
        return {
            "log_probs": of_log_prob.gather(-1, at)[..., 0],
            "entropy": self.of_entropy()[..., 0],
            "sum_pi_squared": (squares * (2 * self.w + 5 + 2 * self.sum_size)).sum(-1),
            "varentropy": (self.p * (linear + quadratic)).sum(-1) + 4 * (second + self.mean.square())[..., 0],
            "max_prob": top * (self.sum_size[..., 0] + 1),
        }

    def of_entropy(self) -> Tensor:
        through_d = self.p * (self.log_p + self.entropy).abs() * self.w
        through_exp = self.p * (1 - self.d + self.mean).abs()
        return (through_d + through_exp).sum(-1, keepdim=True) + 3 * self.mean.abs() + 1 + self.log_sum

    def of_gradient(self, g_lp: Tensor, g_h: Tensor) -> Tensor:
        """In the logits; 0 where p is, but for the target."""
        a, b = g_lp.abs()[..., None], g_h.abs()[..., None]
        relative = self.w + self.log_p.abs() + self.sum_size + self.log_sum + 1
        p = torch.where(self.alive, self.p * (1 + relative) + self.tiny, 0.0)
        onehot = torch.arange(self.p.shape[-1]) == self.target[..., None]
        inner = (self.log_p + self.entropy).abs()
        of_entropy = p * inner + self.p * (relative + self.of_entropy() + self.log_p.abs() + self.entropy)
        size = a * (p + onehot) + b * torch.where(self.alive, of_entropy, 0.0)
        z_gradient = a * (self.p + onehot) + b * self.p * inner
        return size * self.slope + z_gradient * self.slope_off


def _per_row(temperature: float | Tensor, lead: torch.Size) -> Tensor:
    return torch.as_tensor(temperature, dtype=torch.float64).expand(lead)


def _temperature(temperature: float | Tensor, lead: torch.Size, fine: Tensor) -> tuple[Tensor, Tensor]:
    """[*, 1], 1 where a row is not fine, and whether dividing by it is exact."""
    tau = torch.where(fine, _per_row(temperature, lead), 1.0)[..., None]
    flat = [frexp(x)[0] == 0.5 for x in tau.flatten().tolist()]
    return tau, torch.tensor(flat, dtype=torch.bool).reshape(tau.shape)

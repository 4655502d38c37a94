"""The math of log-probability and entropy over a vocabulary that is cut into parts, in one place.

For one token with raw logits l and scaled logits z = transform(l) / temperature, over the whole vocabulary::

    m = max z    S = sum e^(z-m)    T = sum e^(z-m) (z-m)    Q = sum e^(z-m) (z-m)^2    R = sum e^(2(z-m))
    log_prob = (z[target] - m) - ln S          entropy = ln S - T/S

T and Q are *centred* at the maximum: at an offset of 500 the uncentred form loses three decimal digits.
Partial sums of two parts merge at the larger maximum M, with D = m - M::

    S e^D        e^D (T + D S)        e^D (Q + 2 D T + D^2 S)        e^(2D) R

The gradient for upstream gradients g_lp and g_H is, with a = -g_lp - g_H entropy, b = -g_H, c = g_lp::

    d/dz = p (a + b ln p) + c onehot(target)        d/dl = d/dz * transform'(l) / temperature

Shapes: n tokens, v columns of a vocabulary part ("tile"). Statistics are fp32, or fp64 for fp64 logits.
docs/math.md derives the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

METRICS = ("sum_pi_squared", "varentropy", "max_prob")

# Differences to the maximum are cut here. e^x is exactly 0 below -745 in fp64 (and below -104 in fp32), so
# the cut changes no sum; it makes 0 * (-inf) a plain 0 in T, Q and p ln p, and unlike a `where` it costs
# one pass and lets a NaN through.
LOWEST_DIFFERENCE = -1.0e4


@dataclass(frozen=True)
class LogitTransform:
    """What some models do to the logits after the head.

    ``softcap * tanh(scale * l / softcap)``, or ``scale * l`` without a softcap.

    Args:
        scale: positive factor on the logits (MuP, Cohere's ``logit_scale``, 1 / Granite's
            ``logits_scaling``).
        softcap: Gemma's ``final_logit_softcapping``; None for none. A logit of -inf stays one: its token
            was banned, and keeps p = 0.

    Raises:
        ValueError: a value is not positive and finite.

    Example:
        >>> LogitTransform(softcap=30.0)
        LogitTransform(scale=1.0, softcap=30.0)
    """

    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("scale", self.scale), ("softcap", self.softcap)):
            if value is None and name == "softcap":
                continue
            largest = torch.finfo(torch.float32).max
            if type(value) not in (int, float) or not 0 < value <= largest:  # type: ignore[operator] # a number
                raise ValueError(f"LogitTransform: expected a positive, finite {name} in fp32, got {value!r}")


@dataclass(frozen=True, eq=False)
class TokenStatistics:
    """Per-token results, in the shape of the target (every leading dimension kept).

    Attributes:
        log_probs: log-probability of the target in nats, fp32 (fp64 for fp64 input).
        entropy: entropy of the distribution in nats, same dtype; None when it was not asked for.
        metrics: detached extras by name, same dtype: ``sum_pi_squared`` (sum of p squared), ``varentropy``
            (variance of -ln p, in nats squared), ``max_prob`` (largest p).

    Example:
        >>> found = TokenStatistics(log_probs=torch.zeros(2, 3))
        >>> found.log_probs.shape, found.entropy, found.metrics
        (torch.Size([2, 3]), None, {})
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """Which sums the results need beside m and S, so that nothing else is computed or sent."""

    target: bool = True
    entropy: bool = True
    metrics: tuple[str, ...] = ()

    @staticmethod
    def checked(entropy: bool, metrics: Sequence[str]) -> Wanted:
        """The target's log-prob, and what the caller asked for beside it, each metric once.

        Raises:
            ValueError: entropy is no bool, or a metric does not exist.
        """
        if not isinstance(entropy, bool):
            raise ValueError(f"entropy: expected True or False, got {entropy!r}")
        if isinstance(metrics, (str, bytes)) or not isinstance(metrics, Sequence):
            raise ValueError(f"metrics: expected a tuple of names, got {metrics!r}")
        for name in metrics:
            if name not in METRICS:
                raise ValueError(f"metrics: expected names out of {METRICS}, got {name!r}")
        return Wanted(True, entropy, tuple(dict.fromkeys(metrics)))

    @property
    def centred(self) -> bool:
        return self.entropy or "varentropy" in self.metrics

    @property
    def centred_squared(self) -> bool:
        return "varentropy" in self.metrics

    @property
    def exp_squared(self) -> bool:
        return "sum_pi_squared" in self.metrics


@dataclass(frozen=True, eq=False)
class PartialStatistics:
    """Sums over one part of the vocabulary, n tokens; what was not wanted is None.

    Attributes:
        maximum: m, [n]; -inf for a part without a finite logit.
        sum_exp: S, [n].
        target_logit: z[target] where this part holds the target, otherwise 0, [n].
        centred: T, [n].
        centred_squared: Q, [n].
        exp_squared: R, [n].
    """

    maximum: Tensor
    sum_exp: Tensor
    target_logit: Tensor | None = None
    centred: Tensor | None = None
    centred_squared: Tensor | None = None
    exp_squared: Tensor | None = None

    @staticmethod
    def empty(tokens: int, wanted: Wanted, like: Tensor) -> PartialStatistics:
        """The neutral element of `merge`: the statistics of no column at all."""

        def zeros(needed: bool) -> Tensor | None:
            return like.new_zeros(tokens) if needed else None

        return PartialStatistics(
            maximum=like.new_full((tokens,), -math.inf),
            sum_exp=like.new_zeros(tokens),
            target_logit=zeros(wanted.target),
            centred=zeros(wanted.centred),
            centred_squared=zeros(wanted.centred_squared),
            exp_squared=zeros(wanted.exp_squared),
        )

    def rescaled(self, maximum: Tensor) -> PartialStatistics:
        """The same sums relative to another, larger maximum, [n]."""
        difference = (self.maximum - maximum).clamp(min=LOWEST_DIFFERENCE)
        # inf - inf is NaN although the two are the same maximum: nothing to rescale.
        difference = torch.where(self.maximum == maximum, 0.0, difference)
        factor = difference.exp()
        centred = centred_squared = exp_squared = None
        if self.centred is not None:
            centred = factor * (self.centred + difference * self.sum_exp)
            if self.centred_squared is not None:
                linear = 2 * self.centred + difference * self.sum_exp
                centred_squared = factor * (self.centred_squared + difference * linear)
        if self.exp_squared is not None:
            exp_squared = factor.square() * self.exp_squared
        return PartialStatistics(
            maximum, factor * self.sum_exp, self.target_logit, centred, centred_squared, exp_squared
        )

    def merge(self, other: PartialStatistics) -> PartialStatistics:
        """The statistics of both parts together."""
        maximum = torch.maximum(self.maximum, other.maximum)
        mine, others = self.rescaled(maximum), other.rescaled(maximum)
        return mine.with_sums(mine.packed_sums() + others.packed_sums())

    def present(self) -> dict[str, Tensor]:
        """Every field that is there, by name; the maximum first."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def packed_sums(self) -> Tensor:
        """All sums that are there, [k, n]: what one all-reduce adds up once the maxima agree."""
        return torch.stack(list(self.present().values())[1:])

    def with_sums(self, sums: Tensor) -> PartialStatistics:
        """The same maximum with other sums, [k, n] in the order of `packed_sums`."""
        names = list(self.present())[1:]
        return PartialStatistics(self.maximum, **dict(zip(names, sums.unbind(0), strict=True)))

    def placed(self, rows: Tensor, tokens: int) -> PartialStatistics:
        """The same statistics as `rows` of `tokens` rows, the others being empty."""

        def place(name: str, value: Tensor) -> Tensor:
            neutral = -math.inf if name == "maximum" else 0.0
            return value.new_full((tokens,), neutral).index_copy_(0, rows, value)

        return PartialStatistics(**{name: place(name, value) for name, value in self.present().items()})

    def put(self, rows: slice, part: PartialStatistics) -> None:
        """Write a block's statistics in place. (Kept until the end, they would lie between freed tiles.)"""
        values = part.present()
        for name, all_values in self.present().items():
            all_values[rows] = values[name]

    @staticmethod
    def concatenated(parts: Sequence[PartialStatistics]) -> PartialStatistics:
        """Statistics of consecutive blocks of tokens as those of all of them."""
        columns = [part.present() for part in parts]
        return PartialStatistics(**{name: torch.cat([c[name] for c in columns]) for name in columns[0]})


@dataclass(frozen=True, eq=False)
class Normalizer:
    """What the gradient needs of the whole vocabulary, n tokens: ln p = (z - maximum) - log_sum.

    The maximum and ln S stay two numbers: their sum (lse) would cost the digits that an offset takes.
    """

    maximum: Tensor
    log_sum: Tensor


def finish(
    total: PartialStatistics, wanted: Wanted, vocab_size: int
) -> tuple[Normalizer, Tensor | None, Tensor | None, dict[str, Tensor]]:
    """Normalizer, log-probs, entropy and metrics, [n] each, of the whole vocabulary's sums.

    A row without any finite logit, with a NaN or with +inf is NaN in all of them.
    """
    # S is at least 1 wherever there is a finite logit: the maximum's own e^0.
    sum_exp = torch.where(total.sum_exp > 0, total.sum_exp, math.nan)
    log_sum = sum_exp.log()
    log_probs = entropy = None
    if total.target_logit is not None:
        log_probs = (total.target_logit - total.maximum) - log_sum
    if wanted.entropy:
        assert total.centred is not None
        # Both terms are >= 0. Rounding can lift a uniform row above ln(vocab) by an ulp.
        entropy = (log_sum - total.centred / sum_exp).clamp(max=math.log(vocab_size))
    metrics: dict[str, Tensor] = {}
    for name in wanted.metrics:
        if name == "sum_pi_squared":
            assert total.exp_squared is not None
            metrics[name] = total.exp_squared / sum_exp.square()
        elif name == "varentropy":
            assert total.centred is not None and total.centred_squared is not None
            mean = total.centred / sum_exp
            metrics[name] = (total.centred_squared / sum_exp - mean.square()).clamp(min=0.0)
        else:
            metrics[name] = sum_exp.reciprocal()
    return Normalizer(total.maximum, log_sum), log_probs, entropy, metrics


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of logits, statistics and results for an input dtype: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def positive_or_nan(temperature: Tensor) -> Tensor:
    """Temperatures that are not above 0 become NaN, so that their rows do."""
    return torch.where(temperature > 0, temperature, math.nan)


@dataclass(frozen=True, eq=False)
class GradientCoefficients:
    """a, b and c of the gradient d/dl = (p (a + b ln p) + c onehot) * (1 - tanh^2), n tokens.

    The factor scale / temperature of the transform's derivative is folded in. b is None when nothing
    flows back through the entropy, c when nothing flows back through the log-prob.
    """

    a: Tensor
    b: Tensor | None
    c: Tensor | None


def gradient_coefficients(
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    entropy: Tensor | None,
    transform: LogitTransform | None,
    temperature: float | Tensor,
) -> GradientCoefficients:
    """Coefficients from upstream gradients, [n] each; at least one of the two is given."""
    scale = 1.0 if transform is None else transform.scale
    a = b = c = None
    if grad_log_probs is not None:
        c = grad_log_probs * scale / temperature
        a = -c
    if grad_entropy is not None:
        assert entropy is not None
        b = -grad_entropy * scale / temperature
        a = b * entropy if a is None else torch.addcmul(a, b, entropy)
    assert a is not None
    return GradientCoefficients(a, b, c)

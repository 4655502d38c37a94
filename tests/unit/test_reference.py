"""The reference is right, and the comparison fails where it should.

Everything else in this suite leans on these two, so they are checked against arithmetic with 50
digits, against the closed formulas, and with results that are wrong on purpose.
"""

from __future__ import annotations

import mpmath
import pytest
import torch

from tests import reference as ref
from tests.comparison import assert_same_bits, assert_within_eager

INF, NAN = float("inf"), float("nan")


def _row_with_50_digits(row: list[float], target: int, tau: float) -> dict[str, float]:
    with mpmath.workdps(50):
        z = [mpmath.mpf(x) / mpmath.mpf(tau) for x in row]
        weights = [mpmath.exp(x - max(z)) for x in z]
        p = [w / mpmath.fsum(weights) for w in weights]
        entropy = -mpmath.fsum(x * mpmath.log(x) for x in p if x)
        return {
            "log_probs": float(mpmath.log(p[target])),
            "entropy": float(entropy),
            "sum_pi_squared": float(mpmath.fsum(x * x for x in p)),
            "varentropy": float(mpmath.fsum(x * (mpmath.log(x) + entropy) ** 2 for x in p if x)),
            "max_prob": float(max(p)),
        }


@pytest.mark.parametrize(
    ("offset", "spread", "tau"), [(0, 1, 1.0), (500, 1, 0.6), (-500, 3, 1.5), (0, 100, 1.0)]
)
def test_values_agree_with_50_digits(offset: float, spread: float, tau: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 61, dtype=torch.float64) * spread + offset
    target = torch.tensor([0, 30, 60])
    dense = ref.truth_logits(logits, target, temperature=tau)
    for row in range(3):
        exact = _row_with_50_digits(logits[row].tolist(), int(target[row]), tau)
        ours = {"log_probs": dense.log_probs, "entropy": dense.entropy, **dense.metrics}
        for name, value in exact.items():
            # z itself carries half an ulp of its magnitude.
            slack = 8 * 2.2e-16 * (abs(offset) + 4 * spread) / tau
            assert float(ours[name][row]) == pytest.approx(value, rel=1e-13, abs=slack), name


def test_gradient_is_the_closed_formula() -> None:
    torch.manual_seed(1)
    logits = 3 * torch.randn(5, 37, dtype=torch.float64)
    logits[1, 4] = -INF
    target = torch.tensor([0, 3, 36, -100, 7])
    mask = torch.tensor([True, True, True, True, False])
    tau = torch.tensor([1.0, 0.6, 1.5, 2.0, 1.0], dtype=torch.float64)
    g_lp, g_h = torch.randn(2, 5, dtype=torch.float64)
    dense = ref.truth_logits(
        logits,
        target,
        scale=0.5,
        softcap=None,
        temperature=tau,
        mask=mask,
        grad_log_probs=g_lp,
        grad_entropy=g_h,
    )
    z = logits * 0.5 / tau[:, None]
    log_p = torch.log_softmax(z, -1)
    p = log_p.exp()
    c = torch.where(target == -100, 0.0, g_lp)
    onehot = torch.nn.functional.one_hot(target.clamp_min(0), 37)
    a, b = -c - g_h * dense.entropy, -g_h
    closed = p * (a[:, None] + b[:, None] * log_p.clamp_min(-1e9)) + c[:, None] * onehot
    closed = closed * 0.5 / tau[:, None] * mask[:, None]
    torch.testing.assert_close(dense.gradients["logits"], closed, rtol=1e-12, atol=1e-14)


def test_plain_rows_agree_with_naive_autograd() -> None:
    torch.manual_seed(2)
    hidden, weight = torch.randn(2, 3, 8).double(), torch.randn(19, 8).double()
    bias, target = torch.randn(19).double(), torch.randint(0, 17, (2, 3))
    g_lp, g_h = torch.randn(2, 2, 3).double()
    dense = ref.truth_linear(
        hidden,
        weight,
        target,
        bias=bias,
        scale=1.3,
        softcap=2.0,
        vocab_size=17,
        grad_log_probs=g_lp,
        grad_entropy=g_h,
    )
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    logits = torch.nn.functional.linear(*leaves)[..., :17]
    log_p = torch.log_softmax(2.0 * torch.tanh(1.3 * logits / 2.0), -1)
    log_probs = log_p.gather(-1, target[..., None])[..., 0]
    entropy = torch.distributions.Categorical(logits=log_p).entropy()
    expected = torch.autograd.grad((log_probs, entropy), leaves, (g_lp, g_h))
    torch.testing.assert_close(dense.log_probs, log_probs.detach())
    torch.testing.assert_close(dense.entropy, entropy.detach())
    for name, gradient in zip(("hidden", "weight", "bias"), expected, strict=True):
        torch.testing.assert_close(dense.gradients[name], gradient, rtol=1e-11, atol=1e-13)


def test_eager_is_the_truth_in_fp64() -> None:
    """The baseline computes the same function, so its error is rounding and nothing else."""
    torch.manual_seed(3)
    hidden, weight = torch.randn(7, 8).double(), torch.randn(19, 8).double()
    options = dict(
        target=torch.tensor([0, 16, -100, 3, 4, 5, 6]),
        mask=torch.arange(7) != 5,
        temperature=torch.linspace(0.6, 1.5, 7),
        softcap=3.0,
        vocab_size=17,
        grad_log_probs=torch.randn(7).double(),
        grad_entropy=torch.randn(7).double(),
    )
    truth = ref.truth_linear(hidden, weight, **options)
    eager = ref.eager_linear(hidden, weight, **options)
    torch.testing.assert_close(eager.log_probs, truth.log_probs)
    torch.testing.assert_close(eager.entropy, truth.entropy)
    kept = options["mask"]
    for name, value in truth.metrics.items():
        torch.testing.assert_close(eager.metrics[name][kept], value[kept])
    for name in ("hidden", "weight"):
        torch.testing.assert_close(eager.gradients[name], truth.gradients[name])


def test_conventions() -> None:
    logits = torch.randn(8, 5, dtype=torch.float64)
    logits[0], logits[1, 2], logits[2, 3] = -INF, NAN, INF
    logits[3, 1:] = -INF  # one column alive: p = 1, entropy 0
    logits[4, 0] = -INF  # the target's
    logits[7, 0] = NAN  # masked
    tau = torch.ones(8, dtype=torch.float64)
    tau[5] = 0.0
    target = torch.tensor([0, 0, 0, 0, 0, 0, -100, 0])
    mask = torch.arange(8) != 7
    ones = torch.ones(8, dtype=torch.float64)
    dense = ref.truth_logits(
        logits, target, temperature=tau, mask=mask, grad_log_probs=ones, grad_entropy=ones
    )
    for row in (0, 1, 2, 5):
        assert dense.log_probs[row].isnan() and dense.entropy[row].isnan()
        assert dense.gradients["logits"][row].isnan().all()
    assert dense.log_probs[3] == 0 and dense.entropy[3] == 0
    assert dense.log_probs[4] == -INF and dense.entropy[4] > 0
    assert dense.log_probs[6] == 0 and dense.entropy[6] > 0
    assert dense.log_probs[7] == 0 and dense.entropy[7] == 0
    for row in (3, 4, 6, 7):
        assert dense.gradients["logits"][row].isfinite().all()
    assert not dense.gradients["logits"][7].any()


def _pair(n: int = 200) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(4)
    truth = torch.randn(n, dtype=torch.float64) * 1e-3
    truth[0] = 1.0
    eager = truth.float() * (1 + 1e-6 * torch.randn(n))
    return truth.float(), truth, eager


def test_comparison_passes_what_is_as_good_as_eager() -> None:
    ours, truth, eager = _pair()
    assert_within_eager(ours, truth, eager, 2.0)
    assert_within_eager(eager, truth, eager, 1.0)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x * (1 + 1e-5),
        lambda x: -x,
        lambda x: torch.zeros_like(x),
        lambda x: x.index_fill(0, torch.tensor([17]), NAN),
        lambda x: x.index_fill(0, torch.tensor([17]), INF),
        # One small number among a big one: within eager's largest error, seen relative to its size.
        lambda x: x.index_add(0, torch.tensor([17]), torch.tensor([1e-6])),
    ],
    ids=["scaled", "sign", "zeros", "nan", "inf", "one small number"],
)
def test_comparison_fails_what_is_not(spoil) -> None:
    ours, truth, eager = _pair()
    with pytest.raises(AssertionError, match=r"at \(\d+,\): ours .* truth .* eager"):
        assert_within_eager(spoil(ours), truth, eager, 2.0)


def test_same_bits_sees_the_sign_of_zero() -> None:
    zero = torch.zeros(3)
    assert_same_bits(zero, zero.clone())
    with pytest.raises(AssertionError, match=r"first at \(0,\)"):
        assert_same_bits(zero, -zero)


def test_fresh_buffers_hold_nan() -> None:
    fresh = [
        torch.empty(3),
        torch.empty_like(torch.zeros(2), dtype=torch.bfloat16),
        torch.empty_strided((2, 2), (1, 2)),
        torch.zeros(1).new_empty(4),
    ]
    assert all(bool(x.isnan().all()) for x in fresh)
    assert torch.empty(3, dtype=torch.long).dtype == torch.long

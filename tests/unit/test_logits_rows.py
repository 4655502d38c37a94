"""Rows out of the ordinary, on logits: masked, ignored, at the borders, -inf, NaN, bad temperatures.

What such a row gets is fixed (README, "Rules"); here the other point is that its neighbours get what
they would get without it.
"""

from __future__ import annotations

import pytest
import torch

import mcore_entropy as me
from tests import reference as ref
from tests.comparison import assert_same_bits
from tests.unit.cases import (
    DTYPES,
    FUNCTIONS,
    INF,
    LAYOUTS,
    NAN,
    N,
    call_logits,
    check_logits,
    dtype_name,
    leaf,
    make_logits,
    make_target,
    make_upstream,
)

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
every_function = pytest.mark.parametrize("function", FUNCTIONS)
BOTH = "log-probs and entropy"

MASKS = {
    "all True": torch.ones(N, dtype=torch.bool),
    "all False": torch.zeros(N, dtype=torch.bool),
    "half": torch.arange(N) % 2 == 0,
    "one row": torch.arange(N) == 13,
}


@every_function
@every_dtype
@pytest.mark.parametrize("pattern", MASKS)
@pytest.mark.parametrize("compact", [True, False])
def test_masked_rows_are_zero_whatever_they_hold(
    function: str, dtype: torch.dtype, pattern: str, compact: bool
) -> None:
    for layout in ("N", "sb view of bs"):
        x = make_logits(517, dtype)
        x[~MASKS[pattern]] = NAN
        x = LAYOUTS[layout](x)
        mask = LAYOUTS[layout](MASKS[pattern][:, None])[..., 0]
        temperature = torch.where(mask, 0.7, 0.0)
        log_probs, entropy, gradient = check_logits(
            function,
            x,
            make_target(mask.shape, 517),
            mask=mask,
            temperature=temperature,
            execution=me.Execution(compact_rows=compact),
        )
        assert not entropy[~mask].any()
        assert not gradient[~mask].any()
        assert log_probs is None or not log_probs[~mask].any()


@every_dtype
@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 3])
def test_ignored_targets(dtype: torch.dtype, ignore_index: int) -> None:
    x, g = make_logits(517, dtype), make_upstream((N,), dtype)
    target = make_target((N,), 517)
    target[::3] = ignore_index
    log_probs, entropy, gradient = check_logits(BOTH, x, target, ignore_index=ignore_index)
    assert log_probs is not None
    assert not log_probs[::3].any()
    assert bool((entropy[::3] > 0).all())
    # All ignored: the gradient is that of the entropy alone.
    target = torch.full((N,), ignore_index)
    log_probs, _, gradient = check_logits(BOTH, x, target, ignore_index=ignore_index)
    assert log_probs is not None
    assert not log_probs.any()
    parameter = leaf(x)
    (alone,) = torch.autograd.grad(me.vocab_parallel_entropy(parameter), parameter, g[1])
    torch.testing.assert_close(gradient, alone, rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("target_dtype", [torch.int32, torch.int16, torch.uint8])
def test_target_of_another_integer_dtype(target_dtype: torch.dtype) -> None:
    x, target = make_logits(200, torch.float32), make_target((N,), 200)
    expected = me.vocab_parallel_log_probs_and_entropy(x, target)
    ours = me.vocab_parallel_log_probs_and_entropy(x, target.to(target_dtype))
    assert_same_bits(ours.log_probs, expected.log_probs)


@pytest.mark.parametrize("compact", [True, False])
def test_target_of_a_masked_row_does_not_matter(compact: bool) -> None:
    x, mask = make_logits(37, torch.float32), torch.arange(N) % 2 == 0
    target = make_target((N,), 37).masked_fill(~mask, 2**40)
    target[1], target[3] = -7, 37
    check_logits(BOTH, x, target, mask=mask, execution=me.Execution(compact_rows=compact))


@every_dtype
def test_targets_at_the_borders(dtype: torch.dtype) -> None:
    x = make_logits(517, dtype)
    for columns, size in ((517, None), (500, 500), (517, 517), (1, 1)):
        target = torch.tensor([0, columns - 1, columns // 2]).repeat(N // 3)
        check_logits(BOTH, x, target, vocab_size=size)


@every_function
@every_dtype
@pytest.mark.parametrize("padding", [3e4, -INF, INF, NAN])
def test_padded_columns_do_not_count(function: str, dtype: torch.dtype, padding: float) -> None:
    x = make_logits(517, dtype)
    x[:, 500:] = padding
    log_probs, entropy, gradient = check_logits(function, x, make_target((N,), 500), vocab_size=500)
    assert not gradient[:, 500:].any()
    shorter = call_logits(function, x[:, :500], make_target((N,), 500))
    torch.testing.assert_close(entropy, shorter[1], rtol=0, atol=1e-5)
    if log_probs is not None:
        torch.testing.assert_close(log_probs, shorter[0], rtol=0, atol=1e-5)


def _some(x: torch.Tensor) -> None:
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(5)) < 0.3] = -INF


def _all_but_one(x: torch.Tensor) -> None:
    kept = x[:, 7].clone()
    x.fill_(-INF)
    x[:, 7] = kept


def _all_but_one_and_spread(x: torch.Tensor) -> None:
    """Half of the rows have one column, half have all: both in one chunk."""
    _all_but_one(x[::2])


@every_function
@every_dtype
@pytest.mark.parametrize("pattern", [_some, _all_but_one, _all_but_one_and_spread], ids=lambda f: f.__name__)
@pytest.mark.parametrize("offset", [0, -500])
def test_minus_infinity_adds_nothing(function: str, dtype: torch.dtype, pattern, offset: float) -> None:
    x = make_logits(517, dtype, offset=offset)
    pattern(x)
    # The most likely token is the target, never one at -inf.
    _, entropy, gradient = check_logits(function, x, x.float().argmax(-1), chunk_size=7, temperature=0.6)
    assert not gradient[torch.isneginf(x)].any()
    if pattern is _all_but_one:
        assert not entropy.any()


@every_function
@every_dtype
@pytest.mark.parametrize(
    "what",
    ["all -inf", "NaN", "+inf", "all +inf", "NaN and -inf", "temperature 0", "temperature -1"],
)
@pytest.mark.parametrize("chunk_size", [1, None])
def test_a_bad_row_is_nan_alone(function: str, dtype: torch.dtype, what: str, chunk_size: int | None) -> None:
    x, temperature = make_logits(517, dtype), torch.full((N,), 0.8)
    for row in (0, 11, N - 1):
        if what == "all -inf":
            x[row] = -INF
        elif what == "NaN":
            x[row, 516] = NAN
        elif what == "+inf":
            x[row, 100] = INF
        elif what == "all +inf":
            x[row] = INF
        elif what == "NaN and -inf":
            x[row] = -INF
            x[row, 3] = NAN
        else:
            temperature[row] = float(what.removeprefix("temperature "))
    options = {"temperature": temperature, "metrics": ref.METRICS, "chunk_size": chunk_size}
    log_probs, entropy, gradient = check_logits(function, x, make_target((N,), 517), **options)
    bad = torch.zeros(N, dtype=torch.bool)
    bad[[0, 11, N - 1]] = True
    assert bool((entropy.isnan() == bad).all())
    assert bool((gradient.isnan().any(-1) == bad).all())
    assert log_probs is None or bool((log_probs.isnan() == bad).all())


@every_dtype
def test_target_on_minus_infinity(dtype: torch.dtype) -> None:
    x, target = make_logits(517, dtype), make_target((N,), 517)
    rows = torch.arange(0, N, 4)
    x[rows, target[rows]] = -INF
    g_lp, g_h = make_upstream((N,), dtype)
    # As in training: the row's log-prob does not reach the loss, its entropy does.
    g_lp = g_lp.index_fill(0, rows, 0.0)
    log_probs, entropy, gradient = check_logits(BOTH, x, target, upstream=(g_lp, g_h))
    assert log_probs is not None
    assert bool((log_probs[rows] == -INF).all())
    assert bool(entropy.isfinite().all())
    assert bool(gradient.isfinite().all())
    # If it does reach it, the gradient is finite, and the neighbours do not notice.
    parameter = leaf(x)
    both = me.vocab_parallel_log_probs_and_entropy(parameter, target)
    (spoilt,) = torch.autograd.grad(
        (both.log_probs, both.entropy), parameter, (g_lp.index_fill(0, rows, 1.0), g_h)
    )
    assert bool(spoilt.isfinite().all())
    others = torch.ones(N, dtype=torch.bool).index_fill(0, rows, False)
    torch.testing.assert_close(spoilt[others], gradient[others], rtol=1e-5, atol=1e-7)


@every_dtype
def test_rows_without_upstream_gradient_get_none(dtype: torch.dtype) -> None:
    x, target = make_logits(517, dtype), make_target((N,), 517)
    for rows in (torch.arange(0, N, 2), torch.arange(N)):
        upstream = tuple(g.index_fill(0, rows, 0.0) for g in make_upstream((N,), dtype))
        _, _, gradient = check_logits(BOTH, x, target, upstream=upstream, chunk_size=7)
        assert not gradient[rows].any()


def test_metrics_of_special_rows() -> None:
    x = make_logits(37, torch.float32)
    x[0, 1:], x[1, 0], x[2] = -INF, NAN, 1.5
    target = torch.zeros(N, dtype=torch.long)
    metrics = me.vocab_parallel_log_probs_and_entropy(x, target, metrics=ref.METRICS).metrics
    for name, certain, uniform in (
        ("sum_pi_squared", 1, 1 / 37),
        ("varentropy", 0, 0),
        ("max_prob", 1, 1 / 37),
    ):
        assert float(metrics[name][0]) == pytest.approx(certain, abs=1e-6)
        assert bool(metrics[name][1].isnan())
        assert float(metrics[name][2]) == pytest.approx(uniform, abs=1e-6)
        assert bool(metrics[name][3:].isfinite().all())

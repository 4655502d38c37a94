"""Rows out of the ordinary in the fused head, and autocast."""

from __future__ import annotations

import pytest
import torch

import mcore_entropy as me
from mcore_entropy.backends.pytorch import backend as pytorch_backend
from tests import reference as ref
from tests.comparison import VALUES, assert_same_bits, assert_within_eager
from tests.unit.cases import (
    DTYPES,
    INF,
    NAN,
    N,
    check_linear,
    compare_gradient,
    dtype_name,
    head_gradients,
    leaf,
    make_linear,
    make_target,
    make_upstream,
)

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)

MASKS = {
    "all True": torch.ones(N, dtype=torch.bool),
    "all False": torch.zeros(N, dtype=torch.bool),
    "half": torch.arange(N) % 2 == 0,
    "one row": torch.arange(N) == 13,
}


@every_dtype
@pytest.mark.parametrize("pattern", MASKS)
@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("chunk_size", [7, None])
def test_garbage_in_masked_rows_reaches_nothing(
    dtype: torch.dtype, pattern: str, compact: bool, chunk_size: int | None
) -> None:
    mask = MASKS[pattern]
    hidden, weight, bias = make_linear(dtype)
    hidden[~mask] = torch.tensor([NAN, INF, -INF, 1e4], dtype=dtype).repeat(8)
    ours, gradients = check_linear(
        hidden,
        weight,
        make_target((N,), 517),
        bias=bias,
        mask=mask,
        temperature=torch.where(mask, 0.7, 0.0),
        chunk_size=chunk_size,
        execution=me.Execution(compact_rows=compact),
    )
    assert not ours.log_probs[~mask].any()
    assert not ours.entropy[~mask].any()
    assert not gradients["hidden"][~mask].any()


@every_dtype
@pytest.mark.parametrize("compact", [True, False])
def test_rows_without_upstream_gradient_get_none(dtype: torch.dtype, compact: bool) -> None:
    hidden, weight, bias = make_linear(dtype)
    for rows in (torch.arange(0, N, 2), torch.arange(N)):
        upstream = tuple(g.index_fill(0, rows, 0.0) for g in make_upstream((N,), dtype))
        _, gradients = check_linear(
            hidden,
            weight,
            make_target((N,), 517),
            bias=bias,
            upstream=upstream,
            chunk_size=7,
            execution=me.Execution(compact_rows=compact),
        )
        assert not gradients["hidden"][rows].any()
        if len(rows) == N:
            assert not gradients["weight"].any()
            assert not gradients["bias"].any()


@every_dtype
@pytest.mark.parametrize("compact", [True, False])
def test_rows_with_one_upstream_gradient_of_zero_count(dtype: torch.dtype, compact: bool) -> None:
    """A zero advantage with an entropy bonus, and the reverse; also -0.0."""
    hidden, weight, _ = make_linear(dtype)
    g_lp, g_h = make_upstream((N,), dtype)
    g_lp = g_lp.index_fill(0, torch.arange(0, N, 3), -0.0)
    g_h = g_h.index_fill(0, torch.arange(1, N, 3), 0.0)
    execution = me.Execution(compact_rows=compact)
    check_linear(hidden, weight, make_target((N,), 517), upstream=(g_lp, g_h), execution=execution)


@every_dtype
def test_ignored_targets_keep_their_entropy(dtype: torch.dtype) -> None:
    hidden, weight, _ = make_linear(dtype)
    for rows, ignore_index in ((torch.arange(0, N, 3), -100), (torch.arange(N), 5)):
        target = make_target((N,), 517).index_fill(0, rows, ignore_index)
        ours, _ = check_linear(hidden, weight, target, ignore_index=ignore_index, chunk_size=7)
        assert not ours.log_probs[rows].any()
        assert bool((ours.entropy[rows] > 0).all())


@every_dtype
def test_padded_columns_do_not_count(dtype: torch.dtype) -> None:
    hidden, weight, bias = make_linear(dtype)
    bias[500:] = 3e4
    target = make_target((N,), 500)
    target[0], target[1] = 0, 499
    _, gradients = check_linear(hidden, weight, target, bias=bias, vocab_size=500, chunk_size=7)
    assert not gradients["weight"][500:].any()
    assert not gradients["bias"][500:].any()


@every_dtype
def test_minus_infinity_in_the_bias_adds_nothing(dtype: torch.dtype) -> None:
    """The usual way to forbid tokens."""
    hidden, weight, bias = make_linear(dtype)
    dead = torch.rand(517, generator=torch.Generator().manual_seed(6)) < 0.4
    dead[[100, 200]] = torch.tensor([False, True])
    bias[dead] = -INF
    target = torch.full((N,), 100)
    for columns in (517, 101):
        _, gradients = check_linear(
            hidden, weight, target, bias=bias, chunk_size=7, temperature=0.6, vocab_size=columns
        )
        assert not gradients["weight"][dead].any()
        assert not gradients["bias"][dead].any()
    g_lp, g_h = make_upstream((N,), dtype)
    target[::2] = 200
    g_lp[::2] = 0.0
    ours, _ = check_linear(hidden, weight, target, bias=bias, upstream=(g_lp, g_h))
    assert bool((ours.log_probs[::2] == -INF).all())


@every_dtype
@pytest.mark.parametrize("what", [NAN, INF, "temperature 0", "temperature -1"])
@pytest.mark.parametrize("chunk_size", [1, None])
def test_a_bad_row_is_nan_alone(dtype: torch.dtype, what, chunk_size: int | None) -> None:
    hidden, weight, _ = make_linear(dtype)
    temperature = torch.full((N,), 0.8)
    if isinstance(what, str):
        temperature[[0, 11]] = float(what.removeprefix("temperature "))
    else:
        hidden[[0, 11], 5] = what
    ours, gradients = check_linear(
        hidden,
        weight,
        make_target((N,), 517),
        temperature=temperature,
        chunk_size=chunk_size,
        metrics=ref.METRICS,
    )
    bad = torch.zeros(N, dtype=torch.bool)
    bad[[0, 11]] = True
    assert bool((ours.entropy.isnan() == bad).all())
    assert bool((ours.log_probs.isnan() == bad).all())
    if what != INF:  # which makes some logits -inf
        assert bool(gradients["weight"].isnan().all())


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_casts_hidden_and_weight_once(hidden_dtype: torch.dtype, backward_inside: bool) -> None:
    """As F.linear would: the truth is that of the rounded inputs. The bias is added to the fp32 logits,
    so it is not rounded, and the statistics stay in fp32."""
    hidden, weight, bias = make_linear(torch.float32)
    hidden = hidden.to(hidden_dtype)
    given = {"hidden": hidden, "weight": weight, "bias": bias}
    leaves = {name: leaf(x) for name, x in given.items()}
    target, (g_lp, g_h) = make_target((N,), 517), make_upstream((N,), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        both = me.linear_log_probs_and_entropy(
            leaves["hidden"],
            leaves["weight"],
            target,
            bias=leaves["bias"],
            temperature=0.6,
            chunk_size=7,
        )
        if backward_inside:
            found = torch.autograd.grad((both.log_probs, both.entropy), list(leaves.values()), (g_lp, g_h))
    if not backward_inside:
        found = torch.autograd.grad((both.log_probs, both.entropy), list(leaves.values()), (g_lp, g_h))
    options = {"temperature": 0.6, "grad_log_probs": g_lp, "grad_entropy": g_h}
    h, w = hidden.bfloat16(), weight.bfloat16()
    truth = ref.truth_linear(h, w, target, bias=bias, **options)
    values = ref.eager_linear(h.float(), w.float(), target, bias=bias, **options)
    eager = ref.eager_linear(h, w, target, bias=bias.bfloat16(), **options)
    for name in ("log_probs", "entropy"):
        value = getattr(both, name)
        assert value.dtype == torch.float32
        assert_within_eager(value, getattr(truth, name), getattr(values, name), VALUES, name=name)
    for name, gradient in zip(leaves, found, strict=True):
        assert gradient.dtype == given[name].dtype
        how = head_gradients(torch.bfloat16, 0.0)
        compare_gradient(name, gradient, truth, eager, **how)


def test_autocast_leaves_fp64_and_logits_alone() -> None:
    hidden, weight, _ = make_linear(torch.float64)
    target = make_target((N,), 517)
    with torch.autocast("cpu", torch.bfloat16):
        check_linear(hidden, weight, target)
    logits = leaf(torch.nn.functional.linear(hidden, weight).float())
    outside = me.vocab_parallel_log_probs_and_entropy(logits, target)
    (expected,) = torch.autograd.grad((outside.log_probs.sum(), outside.entropy.sum()), logits)
    with torch.autocast("cpu", torch.bfloat16):
        inside = me.vocab_parallel_log_probs_and_entropy(logits, target)
        (gradient,) = torch.autograd.grad((inside.log_probs.sum(), inside.entropy.sum()), logits)
    assert_same_bits(inside.log_probs, outside.log_probs)
    assert_same_bits(inside.entropy, outside.entropy)
    assert_same_bits(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("infinity", [-INF, INF])
def test_infinite_logits_stay_infinite_under_a_softcap(dtype: torch.dtype, infinity: float) -> None:
    """A banned token keeps p = 0, which tanh alone would not give it; +inf is NaN, as everywhere."""
    hidden, weight, bias = make_linear(dtype)
    bias[[0, 5, 516]] = infinity
    target = make_target((N,), 500) + 6
    ours, _ = check_linear(hidden, weight, target, bias=bias, softcap=5.0)
    assert ours.entropy is not None
    assert bool(ours.entropy.isnan().all()) == (infinity == INF)


def test_a_tile_without_rows_has_a_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows masked, on a device that multiplies half precision: fp16 tiles are scaled by their largest."""
    monkeypatch.setattr(pytorch_backend, "multiplies_halves", lambda device: True)
    operand, factor = pytorch_backend.gradient_operand(torch.zeros(0, 5), torch.float16)
    assert operand.shape == (0, 5) and operand.dtype == torch.float16 and factor is None

"""The three functions on logits against the fp64 truth, on one rank.

The grid varies one thing at a time around a base case, for every dtype: 517, 1031 and 4099 are
divisible by no power of two (tails of every tile), 1 and 2 are the smallest vocabularies.
"""

from __future__ import annotations

import pytest
import torch

import mcore_entropy as me
from tests import reference as ref
from tests.comparison import VALUES, assert_same_bits, assert_within_eager
from tests.unit.cases import (
    DTYPES,
    FUNCTIONS,
    LAYOUTS,
    N,
    call_logits,
    check_logits,
    compare_gradient,
    dtype_name,
    leaf,
    make_logits,
    make_target,
    make_upstream,
)

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
every_function = pytest.mark.parametrize("function", FUNCTIONS)


@every_function
@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(function: str, dtype: torch.dtype, layout: str) -> None:
    x = LAYOUTS[layout](make_logits(517, dtype))
    log_probs, entropy, _ = check_logits(function, x, make_target(x.shape[:-1], 517))
    assert entropy.shape == x.shape[:-1]
    assert log_probs is None or log_probs.shape == x.shape[:-1]


@every_function
@pytest.mark.parametrize("rows", [(), (1,), (2, 3, 4), (1, 24, 1)])
@pytest.mark.parametrize("chunk_size", [1, 5, None])
def test_any_leading_shape(function: str, rows: tuple[int, ...], chunk_size: int | None) -> None:
    x = make_logits(37, torch.float32)
    x = x[0] if rows == () else x[: torch.Size(rows).numel()].reshape(*rows, 37)
    _, entropy, _ = check_logits(function, x, make_target(rows, 37), chunk_size=chunk_size)
    assert entropy.shape == rows


@every_function
@every_dtype
@pytest.mark.parametrize("columns", [1, 2, 1031, 4099])
def test_vocabularies(function: str, dtype: torch.dtype, columns: int) -> None:
    check_logits(function, make_logits(columns, dtype), make_target((N,), columns))


@every_function
@every_dtype
@pytest.mark.parametrize("temperature", [0.6, 1, 1.5, "per token"])
def test_temperature(function: str, dtype: torch.dtype, temperature) -> None:
    if temperature == "per token":
        temperature = torch.linspace(0.6, 1.5, N)
    check_logits(function, make_logits(1031, dtype), make_target((N,), 1031), temperature=temperature)


def test_temperature_per_token_follows_the_layout() -> None:
    x = LAYOUTS["sb view of bs"](make_logits(517, torch.float32))
    temperature = torch.linspace(0.6, 1.5, N).reshape(4, 6).t()
    check_logits("log-probs and entropy", x, make_target(x.shape[:-1], 517), temperature=temperature)


@every_function
@every_dtype
@pytest.mark.parametrize(("offset", "spread"), [(500, 1), (-500, 1), (0, 100), (0, 0.01)])
def test_offset_and_spread(function: str, dtype: torch.dtype, offset: float, spread: float) -> None:
    x = make_logits(1031, dtype, offset=offset, spread=spread)
    check_logits(function, x, make_target((N,), 1031))


@every_dtype
@pytest.mark.parametrize("chunk_size", [1, 7, N, N + 1000, None])
@pytest.mark.parametrize("function", FUNCTIONS[1:])
def test_chunk_sizes(function: str, dtype: torch.dtype, chunk_size: int | None) -> None:
    x = LAYOUTS["sb view of bs"](make_logits(517, dtype))
    options = {"mask": torch.arange(N).reshape(x.shape[:-1]) % 5 != 3, "temperature": 1.5}
    check_logits(function, x, make_target(x.shape[:-1], 517), chunk_size=chunk_size, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("offset", [0, 500])
def test_chunks_and_neighbours_move_values_by_8_ulp_at_most(dtype: torch.dtype, offset: float) -> None:
    x, target = make_logits(4099, dtype, offset=offset), make_target((N,), 4099)
    whole = me.vocab_parallel_log_probs_and_entropy(x, target, metrics=ref.METRICS)
    bound = 8 * torch.finfo(torch.float32).eps * x.float().abs().amax(-1)
    others = {size: call_logits("log-probs and entropy", x, target, size) for size in (1, 5, 11)}
    alone = [call_logits("log-probs and entropy", x[i : i + 1], target[i : i + 1]) for i in range(N)]
    others["alone"] = tuple(torch.cat([row[i] for row in alone]) for i in (0, 1))
    for name, (log_probs, entropy, *_) in others.items():
        assert bool(((log_probs - whole.log_probs).abs() <= bound).all()), name
        assert bool(((entropy - whole.entropy).abs() <= bound).all()), name


@every_dtype
def test_metrics(dtype: torch.dtype) -> None:
    mask = torch.arange(N) % 3 != 0
    for spread, chosen in ((0.01, None), (3, None), (3, mask), (100, None)):
        x = make_logits(1031, dtype, spread=spread)
        options = {"metrics": ref.METRICS, "temperature": 0.6, "mask": chosen, "vocab_size": 1000}
        check_logits("log-probs and entropy", x, make_target((N,), 1000), chunk_size=7, **options)


@pytest.mark.parametrize("asked", [(), ("max_prob",), ("varentropy", "sum_pi_squared")])
def test_metrics_are_those_asked_for(asked: tuple[str, ...]) -> None:
    x, target = leaf(make_logits(37, torch.float32)), make_target((N,), 37)
    both = me.vocab_parallel_log_probs_and_entropy(x, target, metrics=asked)
    assert set(both.metrics) == set(asked)
    assert not any(value.requires_grad for value in both.metrics.values())


@every_dtype
@pytest.mark.parametrize("chunk_size", [None, 7])
def test_without_entropy(dtype: torch.dtype, chunk_size: int | None) -> None:
    x, target = leaf(make_logits(517, dtype)), make_target((N,), 517)
    both = me.vocab_parallel_log_probs_and_entropy(x, target, entropy=False, chunk_size=chunk_size)
    assert both.entropy is None
    g_lp, _ = make_upstream((N,), dtype)
    truth = ref.truth_logits(x, target, grad_log_probs=g_lp)
    eager = ref.eager_logits(x, target, grad_log_probs=g_lp)
    assert_within_eager(both.log_probs, truth.log_probs, eager.log_probs, VALUES)
    (gradient,) = torch.autograd.grad(both.log_probs, x, g_lp)
    compare_gradient("logits", gradient, truth, eager)


@every_dtype
@pytest.mark.parametrize("asked", ["log_probs", "entropy"])
def test_gradient_of_one_result_alone(dtype: torch.dtype, asked: str) -> None:
    x, target = leaf(make_logits(517, dtype)), make_target((N,), 517)
    both = me.vocab_parallel_log_probs_and_entropy(x, target, chunk_size=7)
    g, _ = make_upstream((N,), dtype)
    (gradient,) = torch.autograd.grad(getattr(both, asked), x, g)
    truth = ref.truth_logits(x, target, **{f"grad_{asked}": g})
    eager = ref.eager_logits(x, target, **{f"grad_{asked}": g})
    compare_gradient("logits", gradient, truth, eager)


@every_function
@pytest.mark.parametrize("kind", ["expanded", "transposed", "sum().backward()"])
def test_upstream_gradients_of_any_stride(function: str, kind: str) -> None:
    x = make_logits(517, torch.float32).reshape(4, 6, 517)
    target, (g_lp, g_h) = make_target((4, 6), 517), make_upstream((4, 6), x.dtype)
    if kind == "expanded":
        g_lp, g_h = (torch.tensor(g).expand(4, 6) for g in (0.7, -0.3))
    elif kind == "transposed":
        g_lp, g_h = (g.t().contiguous().t() for g in (g_lp, g_h))
    else:
        g_lp = g_h = torch.tensor(1.0).expand(4, 6)
        parameter = leaf(x)
        log_probs, entropy, _ = call_logits(function, parameter, target)
        (entropy.sum() if log_probs is None else log_probs.sum() + entropy.sum()).backward()
        assert parameter.grad is not None
        _, _, gradient = check_logits(function, x, target, upstream=(g_lp, g_h))
        assert_same_bits(parameter.grad, gradient)
    check_logits(function, x, target, upstream=(g_lp, g_h))


@every_function
@every_dtype
@pytest.mark.parametrize("rows", [(0,), (2, 0), (0, 3)])
def test_no_tokens(function: str, dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    x, target = torch.zeros(*rows, 517, dtype=dtype), torch.zeros(rows, dtype=torch.long)
    mask, temperature = torch.zeros(rows, dtype=torch.bool), torch.ones(rows)
    for options in ({}, {"mask": mask, "temperature": temperature, "vocab_size": 500}):
        _, entropy, gradient = check_logits(function, x, target, **options)
        assert entropy.shape == rows
        assert gradient.shape == x.shape


@every_dtype
@pytest.mark.parametrize("value", [0.0, 500.25, -500.25])
def test_entropy_is_within_its_bounds(dtype: torch.dtype, value: float) -> None:
    for columns in (2, 517, 4099):
        x = torch.full((3, columns), value, dtype=dtype)  # uniform: the largest entropy
        x[1] = make_logits(columns, dtype, rows=1, spread=1e-3)[0]
        x[2, 1:] = -3e4  # one token has it all: the smallest
        for size in (1, 2048):
            entropy = me.vocab_parallel_entropy_with_chunking(x, size)
            largest = torch.log(torch.tensor(float(columns), dtype=torch.float64))
            rounding = 2 * torch.finfo(entropy.dtype).eps * largest
            assert bool((entropy.double() <= largest + rounding).all())
            assert bool((entropy.double() >= -rounding).all())
            assert abs(float(entropy[2])) <= float(rounding)


def test_positional_chunk_size_and_default() -> None:
    x = make_logits(517, torch.float32)
    default, seven = (
        me.vocab_parallel_entropy_with_chunking(x),
        me.vocab_parallel_entropy_with_chunking(x, chunk_size=7),
    )
    torch.testing.assert_close(default, me.vocab_parallel_entropy(x), rtol=0, atol=1e-5)
    torch.testing.assert_close(seven, default, rtol=0, atol=1e-5)


def test_function_class_is_the_one_below() -> None:
    assert issubclass(me.VocabParallelEntropy, torch.autograd.Function)
    entropy = me.vocab_parallel_entropy(leaf(make_logits(37, torch.float32)))
    node = entropy.grad_fn
    seen = []
    while node is not None:  # views may lie on top
        seen.append(type(node).__name__)
        node = node.next_functions[0][0] if node.next_functions else None
    assert "VocabParallelEntropyBackward" in seen

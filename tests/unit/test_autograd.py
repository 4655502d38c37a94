"""What autograd may expect of every public function: gradcheck, twice, in any order, never silently wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_entropy as me
from tests.comparison import assert_same_bits
from tests.unit.cases import (
    INF,
    N,
    dtype_name,
    leaf,
    make_linear,
    make_logits,
    make_target,
    make_upstream,
)

Forward = Callable[..., tuple[Tensor, ...]]


def _entropy(x: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return (me.vocab_parallel_entropy(x, **options),)


def _chunked(x: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return (me.vocab_parallel_entropy_with_chunking(x, 2, **options),)


def _both(x: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, ...]:
    both = me.vocab_parallel_log_probs_and_entropy(x, target, chunk_size=2, **options)
    return both.log_probs, both.entropy


def _linear(h: Tensor, w: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, ...]:
    both = me.linear_log_probs_and_entropy(h, w, target, chunk_size=2, **options)
    return both.log_probs, both.entropy


def _linear_bias(h: Tensor, w: Tensor, b: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, ...]:
    transform = me.LogitTransform(scale=0.8, softcap=4.0)
    both = me.linear_log_probs_and_entropy(h, w, target, bias=b, transform=transform, chunk_size=2, **options)
    return both.log_probs, both.entropy


FORWARDS: dict[str, Forward] = {
    "entropy": _entropy,
    "entropy in chunks": _chunked,
    "log-probs and entropy": _both,
    "linear": _linear,
    "linear with bias and transform": _linear_bias,
}
every_forward = pytest.mark.parametrize("name", FORWARDS)


def _inputs(name: str, dtype: torch.dtype, rows: int = N, columns: int = 37) -> tuple[Tensor, ...]:
    if not name.startswith("linear"):
        return (leaf(make_logits(columns, dtype, rows=rows)),)
    hidden, weight, bias = make_linear(dtype, rows=rows, columns=columns, width=6)
    return tuple(leaf(x) for x in ((hidden, weight, bias) if "bias" in name else (hidden, weight)))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "per token, mask, padding": {
        "temperature": torch.tensor([0.6, 1.0, 1.5, 2.0, 1.0], dtype=torch.float64),
        "mask": torch.tensor([True, False, True, True, True]),
        "vocab_size": 8,
    },
    "not compacted": {
        "mask": torch.tensor([True, False, True, True, True]),
        "execution": me.Execution(compact_rows=False),
    },
}


@every_forward
@pytest.mark.parametrize("case", OPTIONS)
def test_gradcheck(name: str, case: str) -> None:
    options = OPTIONS[case]
    inputs, target = _inputs(name, torch.float64, 5, 9), torch.tensor([0, 7, -100, 3, 7])
    assert torch.autograd.gradcheck(lambda *xs: FORWARDS[name](*xs, target, **options), inputs)


@pytest.mark.parametrize("name", [n for n in FORWARDS if not n.startswith("linear")])
def test_gradcheck_beside_minus_infinity(name: str) -> None:
    """Finite differences cannot start at -inf: the columns at -inf are put in by the function."""
    dead = torch.zeros(5, 9, dtype=torch.bool)
    dead[0, 2], dead[1, 1:], dead[3, :5] = True, True, True
    target = torch.tensor([0, 0, -100, 7, 1])
    (x,) = _inputs(name, torch.float64, 5, 9)
    assert torch.autograd.gradcheck(lambda x: FORWARDS[name](x.masked_fill(dead, -INF), target), (x,))


@every_forward
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_backward_twice_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    inputs, target = _inputs(name, dtype), make_target((N,), 37)
    results = FORWARDS[name](*inputs, target, mask=torch.arange(N) % 4 != 1)
    grads = make_upstream((N,), dtype)[: len(results)]
    upstream = [g.clone() for g in grads]
    first = torch.autograd.grad(results, inputs, grads, retain_graph=True)
    kept = [x.clone() for x in first]
    second = torch.autograd.grad(results, inputs, grads)
    for one, copy, two in zip(first, kept, second, strict=True):
        assert_same_bits(one, copy)  # the second pass does not write into the first's result
        assert_same_bits(one, two)
    for g, before in zip(grads, upstream, strict=True):
        assert_same_bits(g, before, "upstream gradient")
    with pytest.raises(RuntimeError, match=r"second time|already been freed"):
        torch.autograd.grad(results, inputs, grads)


@every_forward
def test_every_run_has_the_same_bits(name: str) -> None:
    runs = []
    for _ in range(2):
        inputs, target = _inputs(name, torch.float32), make_target((N,), 37)
        results = FORWARDS[name](*inputs, target)
        runs.append([*results, *torch.autograd.grad([r.sum() for r in results], inputs)])
    for one, two in zip(*runs, strict=True):
        assert_same_bits(one, two)


@every_forward
def test_gradients_accumulate_over_uses(name: str) -> None:
    inputs, target = _inputs(name, torch.float64), make_target((N,), 37)
    once = torch.autograd.grad([r.sum() for r in FORWARDS[name](*inputs, target)], inputs)
    for _ in range(2):
        torch.autograd.backward([r.sum() for r in FORWARDS[name](*inputs, target)])
    for x, g in zip(inputs, once, strict=True):
        torch.testing.assert_close(x.grad, 2 * g)


@every_forward
def test_results_changed_in_place_do_no_harm(name: str) -> None:
    """`entropy *= 3` and the like: a result that was saved for backward too would be noticed or harmless."""
    inputs, target = _inputs(name, torch.float64), make_target((N,), 37)
    plain = torch.autograd.grad([r.sum() * 3 for r in FORWARDS[name](*inputs, target)], inputs)
    results = FORWARDS[name](*inputs, target)
    try:
        for r in results:
            r.mul_(3)
        found = torch.autograd.grad([r.sum() for r in results], inputs)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return
    for g, expected in zip(found, plain, strict=True):
        torch.testing.assert_close(g, expected)


@every_forward
def test_input_changed_before_backward_is_noticed(name: str) -> None:
    inputs, target = _inputs(name, torch.float32), make_target((N,), 37)
    moved = [x * 1 for x in inputs]
    results = FORWARDS[name](*moved, target)
    with torch.no_grad():
        moved[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad([r.sum() for r in results], inputs)


@every_forward
def test_second_derivative_is_refused(name: str) -> None:
    inputs, target = _inputs(name, torch.float64), make_target((N,), 37)

    def second() -> None:
        loss = sum(r.square().sum() for r in FORWARDS[name](*inputs, target))
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    with pytest.raises(RuntimeError, match=r"(?i)second|twice|double"):
        second()


@every_forward
@pytest.mark.parametrize("reduction", ["sum", "square"])
def test_gradient_penalty_on_top_of_a_loss_is_refused(name: str, reduction: str) -> None:
    """The loss alone is differentiable, so the penalty could be dropped in silence: with `sum`, the
    upstream gradient does not depend on anything."""
    inputs, target = _inputs(name, torch.float64), make_target((N,), 37)

    def train() -> None:
        results = FORWARDS[name](*inputs, target)
        loss = sum(r.sum() if reduction == "sum" else r.square().sum() for r in results)
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        (loss + sum(g.square().sum() for g in first)).backward()

    with pytest.raises(RuntimeError, match=r"(?i)second|twice|double"):
        train()


@pytest.mark.parametrize("reduction", ["sum", "square"])
def test_first_derivative_of_a_graph_that_keeps_itself(reduction: str) -> None:
    """create_graph for another part of the model must not break the ordinary gradient's values."""
    (x,), target = _inputs("log-probs and entropy", torch.float64), make_target((N,), 37)
    results = _both(x, target)
    loss = sum(r.sum() if reduction == "sum" else r.square().sum() for r in results)
    (plain,) = torch.autograd.grad(loss, x, retain_graph=True)
    (kept,) = torch.autograd.grad(loss, x, create_graph=True)
    assert_same_bits(kept.detach(), plain)


def test_token_statistics_is_frozen() -> None:
    both = me.vocab_parallel_log_probs_and_entropy(make_logits(37, torch.float32), make_target((N,), 37))
    assert isinstance(both, me.TokenStatistics)
    with pytest.raises(dataclasses.FrozenInstanceError, match="entropy"):
        both.entropy = None
    for record, field in ((me.LogitTransform(), "scale"), (me.Execution(), "backend")):
        with pytest.raises(dataclasses.FrozenInstanceError, match=field):
            setattr(record, field, None)


def test_checks_do_not_disturb_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCORE_ENTROPY_CHECKS", "1")
    for name, forward in FORWARDS.items():
        inputs, target = _inputs(name, torch.float32), make_target((N,), 37)
        results = forward(*inputs, target, mask=torch.arange(N) > 3, temperature=torch.ones(N))
        torch.autograd.grad([r.sum() for r in results], inputs)


def test_gradient_penalty_under_autocast_is_refused() -> None:
    """What is saved there are cast copies, which need no gradient themselves."""
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = me.linear_log_probs_and_entropy(hidden, weight, torch.arange(5)).log_probs.sum()
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        (loss + gradient.square().sum()).backward()


def test_create_graph_inside_a_checkpoint_works_until_it_is_differentiated() -> None:
    logits = torch.randn(5, 11, requires_grad=True)
    entropy = torch.utils.checkpoint.checkpoint(me.vocab_parallel_entropy, logits, use_reentrant=False)
    (gradient,) = torch.autograd.grad(entropy.sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        gradient.sum().backward()

"""verl's functions on one rank: its signatures, result shapes and published test shapes, fp64's numbers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_entropy.adapters import verl as adapter
from tests import reference as ref
from tests.adapters.verl_cases import NEEDS_VERL, SHAPES, TEMPERATURE, Given
from tests.unit.cases import compare_gradient, compare_values, leaf, make_logits, make_target

N, H, V = 21, 16, 133
SMALL = (N, H, V)

# As verl 0.9.1 has them; every parameter can be given by position.
SIGNATURES = {
    "vocab_parallel_entropy": ["vocab_parallel_logits"],
    "vocab_parallel_entropy_with_chunking": ["vocab_parallel_logits", "chunk_size=2048"],
    "vocab_parallel_log_probs_from_logits": ["logits", "labels"],
    "vocab_parallel_sum_pi_squared": ["vocab_parallel_logits"],
    "linear_cross_entropy": [
        *("hidden", "weight", "labels", "temperature=1.0", "reduction='none'", "dist_process_group=None"),
    ],
    "entropy_from_logits": ["logits"],
    "entropy_from_logits_with_chunking": ["logits", "chunk_size=2048"],
    "logprobs_from_logits": ["logits", "labels", "inplace_backward=True"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    parameters = inspect.signature(getattr(adapter, name)).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    found = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in positional]
    assert found == SIGNATURES[name]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters if p not in positional)


# --- the fused head ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_published_shapes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    given = Given.of(shape, dtype)
    hidden, weight = leaf(given.hidden[None]), leaf(given.weight)
    log_probs, entropy = adapter.linear_cross_entropy(hidden, weight, given.labels[None], TEMPERATURE, "none")
    assert log_probs.dtype == entropy.dtype == torch.float32
    found = torch.autograd.grad((log_probs, entropy), (hidden, weight), given.upstream)
    assert found[0].shape == hidden.shape and found[0].dtype == found[1].dtype == dtype
    given.compare(log_probs, entropy, {"hidden": found[0][0], "weight": found[1]})


def jagged(values: Tensor, lengths: Tensor | None = None, offsets: Tensor | None = None) -> Tensor:
    offsets = torch.tensor([0, 5, 6, N]) if offsets is None else offsets
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths)


# How the tokens of hidden, labels and a temperature may lie.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "packed": lambda x: x,
    "[1, N]": lambda x: x[None],
    "[N, 1]": lambda x: x[:, None],
    "[3, 7]": lambda x: x.unflatten(0, (3, 7)),
    "jagged": jagged,
}


@pytest.mark.parametrize("of_labels", LAYOUTS)
@pytest.mark.parametrize("of_hidden", LAYOUTS)
def test_layouts_with_a_temperature_per_token(of_hidden: str, of_labels: str) -> None:
    given = replace(Given.of(SMALL, torch.float32), temperature=torch.linspace(0.5, 2.0, N))
    hidden, weight = leaf(LAYOUTS[of_hidden](given.hidden)), leaf(given.weight)
    labels, temperature = (LAYOUTS[of_labels](x) for x in (given.labels, given.temperature))
    log_probs, entropy = adapter.linear_cross_entropy(hidden, weight, labels, temperature)
    torch.autograd.backward((log_probs, entropy), given.upstream)
    assert log_probs.shape == entropy.shape == (N,)
    assert hidden.grad is not None and hidden.grad.shape == hidden.shape
    of_tokens = hidden.grad.values() if hidden.grad.is_nested else hidden.grad.reshape(N, H)
    given.compare(log_probs, entropy, {"hidden": of_tokens, "weight": weight.grad})


@pytest.mark.parametrize("temperature", [torch.tensor(0.7), torch.tensor([0.7]), torch.tensor([[0.7]]), 2])
def test_one_temperature(temperature: Any) -> None:
    given = replace(Given.of(SMALL, torch.float32), temperature=float(temperature))
    result = adapter.linear_cross_entropy(given.hidden, given.weight, given.labels, temperature)
    given.compare(*result, {})


@pytest.mark.parametrize("reduction", ["sum", "mean", "Mean"])
def test_reduction(reduction: str) -> None:
    """Of the log-probs alone, as a keyword too; minus the cross entropy that torch computes in fp64."""
    given = Given.of(SMALL, torch.float64)
    hidden, weight = leaf(given.hidden), leaf(given.weight)
    log_prob, entropy = adapter.linear_cross_entropy(hidden, weight, given.labels, reduction=reduction)
    assert log_prob.shape == () and entropy.shape == (N,)
    loss = F.cross_entropy(hidden @ weight.t(), given.labels, reduction=reduction.lower())
    torch.testing.assert_close(log_prob, -loss, rtol=1e-12, atol=0)
    found = torch.autograd.grad(log_prob, (hidden, weight))
    expected = torch.autograd.grad(-loss, (hidden, weight))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_weight_as_the_first_release_had_it() -> None:
    given = Given.of(SMALL, torch.float32)
    hidden, transposed = leaf(given.hidden), leaf(given.weight.t().contiguous())
    result = adapter.linear_cross_entropy(hidden, transposed, given.labels, TEMPERATURE)
    found = torch.autograd.grad(result, (hidden, transposed), given.upstream)
    assert found[1].shape == (H, V)
    given.compare(*result, {"hidden": found[0], "weight": found[1].t()})


def test_a_square_weight_is_of_today() -> None:
    given = Given.of((N, 24, 24), torch.float32)
    given.compare(*adapter.linear_cross_entropy(given.hidden, given.weight, given.labels, TEMPERATURE), {})


def test_what_is_asked_for() -> None:
    """No entropy unless wanted, and the sum of p squared beside it; log-probs and their gradients stay."""
    given = Given.of(SMALL, torch.float64)
    hidden = leaf(given.hidden)
    log_probs, entropy = adapter.linear_cross_entropy(
        hidden, given.weight, given.labels, TEMPERATURE, calculate_entropy=False
    )
    assert entropy is None
    log_p = (hidden @ given.weight.t() / TEMPERATURE).log_softmax(-1)
    expected = log_p.gather(1, given.labels[:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(x.sum(), hidden) for x in (log_probs, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)

    for wanted in (False, True):
        statistics = adapter.linear_cross_entropy_statistics(
            hidden,
            given.weight,
            given.labels,
            TEMPERATURE,
            calculate_entropy=wanted,
            calculate_sum_pi_squared=True,
        )
        assert (statistics.entropy is not None) == wanted and list(statistics.metrics) == ["sum_pi_squared"]
        squared = statistics.metrics["sum_pi_squared"]
        assert not squared.requires_grad
        torch.testing.assert_close(squared, log_p.exp().square().sum(-1).detach(), rtol=1e-12, atol=0)


def test_label_that_stands_for_none() -> None:
    """Log-prob 0 and no gradient, the entropy as ever; a mean is over all tokens."""
    given = Given.of(SMALL, torch.float64)
    labels = given.labels.clone()
    labels[4] = -100
    hidden = leaf(given.hidden)
    log_probs, entropy = adapter.linear_cross_entropy(hidden, given.weight, labels)
    others = torch.arange(N) != 4
    truth = ref.truth_linear(given.hidden, given.weight, given.labels)
    assert log_probs[4] == 0
    torch.testing.assert_close(log_probs[others], truth.log_probs[others], rtol=1e-12, atol=0)
    torch.testing.assert_close(entropy, truth.entropy, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(log_probs.sum(), hidden)
    assert not gradient[4].any() and gradient[others].all(1).all()
    mean, _ = adapter.linear_cross_entropy(hidden, given.weight, labels, reduction="mean")
    torch.testing.assert_close(mean, truth.log_probs[others].sum() / N, rtol=1e-12, atol=0)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "reduction": (
        dict(reduction="batch"),
        "reduction: expected 'none', 'sum' or 'mean', got 'batch'",
    ),
    "no reduction": (dict(reduction=None), "reduction: expected 'none', 'sum' or 'mean', got None"),
    "entropy": (dict(calculate_entropy=1), "calculate_entropy: expected True or False, got 1"),
    "label": (dict(labels=torch.full((3, 7), V)), "target: expected values in"),
    "labels": (dict(labels=torch.zeros(7, 3, dtype=torch.int64)), "labels: .* transpose the labels"),
    "more labels": (dict(labels=torch.zeros(22, dtype=torch.int64)), "labels: expected one value a token"),
    "no labels": (dict(labels=None), "labels: expected a tensor, got NoneType"),
    "temperatures": (dict(temperature=torch.ones(3)), "temperature: expected one value a token"),
    "temperature": (dict(temperature=0.0), "temperature: expected a positive, finite number"),
    "hidden": (dict(hidden=torch.zeros(H)), r"hidden: expected shape \[\*, H\]"),
    "no hidden": (dict(hidden=[1.0]), "hidden: expected a tensor, got list"),
    "gaps": (
        dict(hidden=jagged(torch.zeros(N, H), lengths=torch.tensor([4, 1, 15]))),
        "hidden: .* a contiguous nested one .* got one of layout torch.jagged, contiguous: False",
    ),
    "labels of other sequences": (
        dict(
            hidden=jagged(torch.zeros(5, H), offsets=torch.tensor([0, 2, 5])),
            labels=jagged(torch.zeros(5, dtype=torch.int64), offsets=torch.tensor([0, 3, 5])),
        ),
        r"labels: expected the sequences of hidden, of lengths \[2, 3\], got \[3, 2\]",
    ),
    "temperatures of other sequences": (
        dict(
            hidden=jagged(torch.zeros(5, H), offsets=torch.tensor([0, 2, 5])),
            labels=torch.zeros(5, dtype=torch.int64),
            temperature=jagged(torch.ones(5), offsets=torch.tensor([0, 2, 4, 5])),
        ),
        r"temperature: expected the sequences of hidden, of lengths \[2, 3\], got \[2, 2, 1\]",
    ),
    "weight": (dict(weight=torch.zeros(V, H + 1)), "weight: expected shape"),
    "no weight": (dict(weight=None), "weight: expected a tensor"),
    "group": (dict(dist_process_group="tp"), "tp_group: expected a torch.distributed.ProcessGroup"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    changes, message = WRONG[case]
    arguments = dict(
        hidden=torch.zeros(3, 7, H), weight=torch.zeros(V, H), labels=torch.zeros(3, 7, dtype=torch.int64)
    )
    with pytest.raises(ValueError, match=message):
        adapter.linear_cross_entropy(**(arguments | changes))


def test_wrong_arguments_of_the_others() -> None:
    logits, labels = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="inplace_backward: expected True or False, got 'yes'"):
        adapter.logprobs_from_logits(logits, labels, inplace_backward="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="calculate_sum_pi_squared: expected True or False, got None"):
        adapter.linear_cross_entropy_statistics(
            logits,
            logits,
            labels,
            calculate_sum_pi_squared=None,  # type: ignore[arg-type]
        )
    with pytest.raises(ValueError, match="vocab_parallel_logits: expected a tensor, got list"):
        adapter.vocab_parallel_sum_pi_squared([1.0])  # type: ignore[arg-type]
    nested = jagged(torch.zeros(5, 7), offsets=torch.tensor([0, 2, 5]))
    for function in (
        adapter.entropy_from_logits,
        adapter.vocab_parallel_entropy,
        adapter.vocab_parallel_sum_pi_squared,
        lambda logits: adapter.logprobs_from_logits(logits, torch.zeros(5, dtype=torch.int64)),
    ):
        with pytest.raises(ValueError, match=r"logits: .* got a nested one .*values\(\)"):
            function(nested)
    for function in (adapter.logprobs_from_logits, adapter.vocab_parallel_log_probs_from_logits):
        with pytest.raises(ValueError, match="target: expected values in"):
            function(logits, labels + 5)


# --- logits that exist ---

LOGITS: dict[str, Callable[[Tensor], Tensor]] = {
    "[N, V]": lambda x: x,
    "[1, N, V]": lambda x: x[None],
    "[b, s, V]": lambda x: x.unflatten(0, (4, 6)),
    "[s, b, V] view": lambda x: x.unflatten(0, (4, 6)).transpose(0, 1),
}


@pytest.mark.parametrize("layout", LOGITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_functions_of_logits(layout: str, dtype: torch.dtype) -> None:
    """All on the same logits, in an order in which verl's need a clone; chunks of 5 tokens among them."""
    x = leaf(LOGITS[layout](make_logits(V, dtype)))
    before = x.detach().clone()
    labels = make_target(x.shape[:-1], V)
    squared = adapter.vocab_parallel_sum_pi_squared(x)
    log_probs = {
        "sharded": adapter.vocab_parallel_log_probs_from_logits(logits=x, labels=labels),
        "whole": adapter.logprobs_from_logits(logits=x, labels=labels),
        "not in place": adapter.logprobs_from_logits(x, labels, inplace_backward=False),
    }
    entropy = {
        "sharded": adapter.vocab_parallel_entropy(x),
        "sharded, chunks": adapter.vocab_parallel_entropy_with_chunking(x, chunk_size=5),
        "whole": adapter.entropy_from_logits(x),
        "whole, chunks": adapter.entropy_from_logits_with_chunking(x, chunk_size=5),
    }
    truth, eager = ref.truth_logits(x), ref.eager_logits(x)
    assert not squared.requires_grad and squared.dtype == torch.float32
    compare_values(squared, truth.metrics["sum_pi_squared"], eager.metrics["sum_pi_squared"], "squares")
    upstream = torch.randn(x.shape[:-1], generator=torch.Generator().manual_seed(5))
    for kind, results in (("log_probs", log_probs), ("entropy", entropy)):
        gradient = {f"grad_{kind}": upstream}
        truth, eager = (f(x, labels, **gradient) for f in (ref.truth_logits, ref.eager_logits))
        for name, values in results.items():
            assert values.dtype == torch.float32
            compare_values(values, getattr(truth, kind), getattr(eager, kind), f"{name} {kind}")
            (found,) = torch.autograd.grad(values, x, upstream)
            compare_gradient("logits", found, truth, eager)
    assert torch.equal(x.detach(), before)


def test_none_is_a_whole_vocabulary_beside_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's FSDP engine calls these in processes where Megatron's groups may exist, but means none."""
    parallel_state: Any = ModuleType("megatron.core.parallel_state")
    parallel_state.model_parallel_is_initialized = lambda: True

    def asked(**_: Any) -> None:
        raise AssertionError("Megatron's group was asked for")

    parallel_state.get_tensor_model_parallel_group = asked
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", parallel_state)
    given = Given.of(SMALL, torch.float32)
    given.compare(*adapter.linear_cross_entropy(given.hidden, given.weight, given.labels, TEMPERATURE), {})
    adapter.logprobs_from_logits(given.hidden, given.labels % H)
    adapter.entropy_from_logits(given.hidden)
    for sharded in (adapter.vocab_parallel_entropy, adapter.vocab_parallel_sum_pi_squared):
        with pytest.raises(AssertionError, match="Megatron's group was asked for"):
            sharded(given.hidden)


# --- verl's own functions ---


def verl_module(name: str) -> Any:
    return pytest.importorskip(name, reason=NEEDS_VERL, exc_type=ImportError)


@pytest.mark.parametrize("shape", [(N, V), (3, 7, V)])
def test_like_verls_functions_of_logits(shape: tuple[int, ...]) -> None:
    """In fp64, as far as verl stays in it."""
    theirs = verl_module("verl.utils.torch_functional")
    logits = make_logits(V, torch.float64, rows=N).reshape(shape)
    labels = make_target(shape[:-1], V)
    pairs: list[tuple[Callable[[Any, Tensor], Tensor], float]] = [
        (lambda module, x: module.entropy_from_logits(x), 1e-10),
        (lambda module, x: module.logprobs_from_logits(x, labels), 1e-10),
        (lambda module, x: module.logprobs_from_logits(x, labels, inplace_backward=False), 1e-10),
    ]
    if len(shape) == 2:  # theirs takes no other
        pairs.append((lambda module, x: module.entropy_from_logits_with_chunking(x, 5), 1e-4))  # in fp32
    for function, tolerance in pairs:
        ours, other = leaf(logits), leaf(logits)
        values = function(adapter, ours), function(theirs, other)
        assert values[0].shape == values[1].shape
        torch.testing.assert_close(*values, rtol=tolerance, atol=tolerance, check_dtype=False)
        for value in values:
            value.double().square().sum().backward()
        torch.testing.assert_close(ours.grad, other.grad, rtol=tolerance, atol=tolerance)


def test_like_verls_fused_head() -> None:
    """Its torch one, which runs on a CPU; in fp32, which its log-probs always have."""
    theirs = verl_module("verl.utils.experimental.torch_functional").FusedLinearForPPO(chunk_size=32)
    given = Given.of(SHAPES[1], torch.float32)
    results = []
    for function in (adapter.linear_cross_entropy, theirs):
        hidden, weight = leaf(given.hidden), leaf(given.weight)
        values = function(hidden[None], weight, given.labels[None], temperature=TEMPERATURE)
        log_probs, entropy = (x.reshape(-1) for x in values)
        torch.autograd.backward((log_probs, entropy), given.upstream)
        results.append((log_probs, entropy, hidden.grad, weight.grad))
    for ours, other in zip(*results, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)


def test_signatures_are_verls() -> None:
    theirs = [
        verl_module(f"verl.utils.{name}")
        for name in ("torch_functional", "megatron.tensor_parallel", "kernel.linear_cross_entropy")
    ]
    for name, parameters in SIGNATURES.items():
        (function,) = {getattr(module, name) for module in theirs if hasattr(module, name)}
        if name == "linear_cross_entropy":  # an autograd.Function's, which takes no keywords
            function, parameters = theirs[2].LinearCrossEntropy.forward, ["ctx", *parameters]
        found = inspect.signature(function).parameters.values()
        assert [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in found] == parameters

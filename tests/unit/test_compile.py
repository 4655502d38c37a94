"""`torch.compile(fullgraph=True)` of the public functions on one rank: eager's bits, from the registered ops.

The compiled graph calls the code that eager calls, so nothing but a mistake in passing arguments can differ.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import mcore_entropy as me
from mcore_entropy.functional.linear import fused_head
from mcore_entropy.functional.linear_passes import LinearOptions
from mcore_entropy.functional.problem import Keywords
from mcore_entropy.statistics import METRICS, Wanted
from tests.comparison import assert_same_bits
from tests.conftest import build_tables_of_dynamo
from tests.unit.cases import N, leaf, make_linear, make_logits, make_target, make_upstream

COLUMNS = 37
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="inductor needs a C++ compiler, none was found",
)
BACKENDS = ["aot_eager", pytest.param("inductor", marks=needs_compiler)]
Function = Callable[..., tuple[Tensor, ...]]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="module")
def _dynamo_knows_torch() -> None:
    build_tables_of_dynamo()  # before every test gets other functions in the place of some


def entropy(x: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return (me.vocab_parallel_entropy(x, **options),)


def chunks(x: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return (me.vocab_parallel_entropy_with_chunking(x, 5, **options),)


def present(statistics: me.TokenStatistics) -> tuple[Tensor, ...]:
    values = (statistics.log_probs, statistics.entropy, *statistics.metrics.values())
    return tuple(value for value in values if value is not None)


def both(x: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return present(me.vocab_parallel_log_probs_and_entropy(x, target, **options))


def linear(h: Tensor, w: Tensor, b: Tensor | None, target: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return present(me.linear_log_probs_and_entropy(h, w, target, bias=b, **options))


def logits_of(dtype: torch.dtype) -> list[Tensor]:
    return [leaf(make_logits(COLUMNS, dtype))]


def head_of(dtype: torch.dtype, bias: bool = True, frozen: tuple[str, ...] = ()) -> list[Any]:
    named = zip(("hidden", "weight", "bias"), make_linear(dtype, columns=COLUMNS), strict=True)
    return [None if name == "bias" and not bias else x if name in frozen else leaf(x) for name, x in named]


def results_and_gradients(function: Function, inputs: list[Any], *rest: Any, **options: Any) -> list[Tensor]:
    """Results, then gradients of the inputs that want one; whether a result has one is kept too."""
    results = function(*inputs, *rest, **options)
    differentiable = [r for r in results if r.requires_grad]
    grads = make_upstream((N,), results[0].dtype)[: len(differentiable)]
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    return [*results, *torch.autograd.grad(differentiable, wanted, grads)]


def assert_compiled_is_eager(
    function: Function, inputs: list[Any], *rest: Any, backend: Any = "aot_eager", **options: Any
) -> None:
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    expected = results_and_gradients(function, inputs, *rest, **options)
    found = results_and_gradients(compiled, inputs, *rest, **options)
    for i, (ours, eager) in enumerate(zip(found, expected, strict=True)):
        assert ours.requires_grad == eager.requires_grad
        assert ours.stride() == eager.stride()
        assert_same_bits(ours.detach(), eager.detach(), f"result {i}")


MASK = torch.arange(N) % 3 != 0
# No target in the last two columns, which "padded vocabulary" leaves out.
TARGET = make_target((N,), COLUMNS - 2).index_fill(0, torch.tensor([2, 5]), -1)
PLAIN: dict[str, Any] = {}
# One thing at a time, and all together.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "mask": {"mask": MASK},
    "not compacted": {"mask": MASK, "execution": me.Execution(compact_rows=False)},
    "temperature": {"temperature": 0.6},
    "temperature per token": {"temperature": torch.linspace(0.5, 2.0, N)},
    "one temperature in a tensor": {"temperature": torch.tensor(0.7)},
    "padded vocabulary": {"vocab_size": COLUMNS - 2},
}
BOTH: dict[str, dict[str, Any]] = {
    "without entropy": {"entropy": False},
    "metrics": {"metrics": METRICS},
    "metrics without entropy": {"entropy": False, "metrics": METRICS[:1]},
    "chunks": {"chunk_size": 7},
}
HEAD: dict[str, dict[str, Any]] = {
    "transform": {"transform": me.LogitTransform(scale=0.8, softcap=4.0)},
    "all": {
        "transform": me.LogitTransform(scale=0.8),
        "mask": MASK,
        "temperature": torch.linspace(0.5, 2.0, N),
        "metrics": METRICS,
        "chunk_size": 7,
        "vocab_size": COLUMNS - 2,
        "execution": me.Execution(workspace_mib=1),
    },
}


@pytest.mark.parametrize(
    ("function", "name"), [(chunks, name) for name in OPTIONS] + [(entropy, "plain"), (entropy, "mask")]
)
def test_entropy(function: Function, name: str) -> None:
    assert_compiled_is_eager(function, logits_of(torch.float32), TARGET, **OPTIONS[name])


@pytest.mark.parametrize("name", ["plain", "mask", "temperature per token", *BOTH])
def test_log_probs_and_entropy(name: str) -> None:
    options = {"ignore_index": -1} | (OPTIONS | BOTH)[name]
    assert_compiled_is_eager(both, logits_of(torch.bfloat16), TARGET, **options)


@pytest.mark.parametrize("name", OPTIONS | BOTH | HEAD)
def test_linear(name: str) -> None:
    options = {"ignore_index": -1} | (OPTIONS | BOTH | HEAD)[name]
    assert_compiled_is_eager(linear, head_of(torch.bfloat16), TARGET, **options)


@pytest.mark.parametrize(
    ("frozen", "bias"),
    [((), False), (("hidden",), False), (("weight", "bias"), True), (("hidden", "weight"), True)],
    ids=str,
)
def test_linear_gradients_that_are_asked_for(frozen: tuple[str, ...], bias: bool) -> None:
    inputs = head_of(torch.float32, bias, frozen)
    assert_compiled_is_eager(linear, inputs, TARGET, ignore_index=-1)


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        *((dtype, "aot_eager") for dtype in (torch.float32, torch.float16, torch.float64)),
        pytest.param(torch.bfloat16, "inductor", marks=needs_compiler),  # the first one takes a while
    ],
    ids=str,
)
def test_between_other_operations(dtype: torch.dtype, backend: str) -> None:
    """As in a model: what comes in and what goes out are intermediate results of the same graph."""

    def loss(x: Tensor, h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        of_logits = me.vocab_parallel_log_probs_and_entropy(x * 2, TARGET, ignore_index=-1)
        of_head = me.linear_log_probs_and_entropy(
            h.reshape(4, -1, h.shape[-1]).transpose(0, 1),
            w,
            TARGET.reshape(4, -1).t(),
            bias=b,
            ignore_index=-1,
            mask=MASK.reshape(4, -1).t(),
            metrics=("max_prob",),
        )
        assert of_logits.entropy is not None and of_head.entropy is not None
        tokens = (
            of_logits.log_probs + of_head.entropy.t().flatten() * of_head.metrics["max_prob"].t().flatten()
        )
        return (tokens + me.vocab_parallel_entropy(x),)

    inputs = logits_of(dtype) + head_of(dtype)
    assert_compiled_is_eager(loss, inputs, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend: str) -> None:
    """Around the compiled function and inside it; the graph made without it is not used under it."""
    compiled = torch.compile(linear, fullgraph=True, backend=backend)

    def inside(*arguments: Any) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            return linear(*arguments)

    compiled_inside = torch.compile(inside, fullgraph=True, backend=backend)
    target = make_target((N,), COLUMNS)
    for enabled, ours, eager in (
        (False, compiled, linear),
        (True, compiled, linear),
        (False, compiled, linear),
        (False, compiled_inside, inside),
    ):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found = ours(*head_of(torch.float32), target)
            expected = eager(*head_of(torch.float32), target)
        for one, two in zip(found, expected, strict=True):
            assert_same_bits(one.detach(), two.detach())
    found, expected = (
        results_and_gradients(f, head_of(torch.float32), target) for f in (compiled_inside, inside)
    )
    for one, two in zip(found, expected, strict=True):
        assert_same_bits(one.detach(), two.detach())


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_grad(backend: str) -> None:
    inputs, target = head_of(torch.float32), make_target((N,), COLUMNS)
    with torch.no_grad():
        found = torch.compile(linear, fullgraph=True, backend=backend)(*inputs, target)
        expected = linear(*inputs, target)
    for ours, eager in zip(found, expected, strict=True):
        assert not ours.requires_grad
        assert_same_bits(ours, eager)


def test_a_number_of_tokens_compiles_nothing_again() -> None:
    """torch 2.11 compiles once more for the second number, newer ones only for the first."""
    backend = CompileCounterWithBackend("aot_eager")

    def step(h: Tensor, w: Tensor, x: Tensor, target: Tensor, mask: Tensor, temperature: Tensor) -> Tensor:
        options = {"mask": mask, "temperature": temperature}
        head = me.linear_log_probs_and_entropy(h, w, target, chunk_size=7, **options)
        logits = me.vocab_parallel_log_probs_and_entropy(x, target, **options)
        assert head.entropy is not None
        return head.log_probs + head.entropy + logits.log_probs

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    _, weight, _ = make_linear(torch.float32, columns=COLUMNS)
    compiled_so_far = []
    for rows in (24, 17, 5, 31):
        hidden, _, _ = make_linear(torch.float32, rows=rows, columns=COLUMNS)
        inputs = [leaf(x) for x in (hidden, weight, make_logits(COLUMNS, torch.float32, rows=rows))]
        mask, temperature = torch.arange(rows) % 3 != 0, torch.linspace(0.5, 2.0, rows)
        rest = make_target((rows,), COLUMNS), mask, temperature
        found, expected = (torch.autograd.grad(f(*inputs, *rest).sum(), inputs) for f in (compiled, step))
        for ours, eager in zip(found, expected, strict=True):
            assert_same_bits(ours, eager)
        compiled_so_far.append(backend.frame_count)
    assert compiled_so_far[1:] == compiled_so_far[1:2] * 3
    assert compiled_so_far[1] <= 2


def test_no_token_at_all() -> None:
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    inputs = [leaf(x) for x in make_linear(torch.float32, rows=0)]
    results = compiled(*inputs, make_target((0,), COLUMNS))
    gradients = torch.autograd.grad([r.sum() for r in results], inputs)
    assert [r.shape for r in results] == [(0,), (0,)]
    assert not gradients[1].any()


# --- gradient accumulation fusion ---


def fused(h: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    keywords = Keywords(target=TARGET, ignore_index=-1, wanted=Wanted())
    return present(fused_head(h, w, None, LinearOptions(accumulate_into_main_grad=True), keywords))


def with_main_grad(dtype: torch.dtype, tied: bool) -> Any:
    weight: Any = torch.nn.Parameter(make_linear(torch.bfloat16, columns=COLUMNS)[1])
    # As Megatron's: a view of one buffer for all parameters.
    weight.main_grad = torch.zeros(weight.numel() + 64, dtype=dtype)[64:].view(weight.shape)
    if tied:
        weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, True
    return weight


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
def test_weight_gradient_goes_into_main_grad(dtype: torch.dtype, tied: bool, backend: str) -> None:
    compiled = torch.compile(fused, fullgraph=True, backend=backend)
    hidden, _, _ = make_linear(torch.bfloat16, columns=COLUMNS)
    ours, eager = (with_main_grad(dtype, tied) for _ in range(2))
    for _ in range(2):  # micro-batches add up
        for function, weight in ((compiled, ours), (fused, eager)):
            torch.autograd.backward(function(leaf(hidden), weight), make_upstream((N,), torch.bfloat16))
    assert eager.main_grad.any()
    assert_same_bits(ours.main_grad, eager.main_grad)
    # For Megatron's hooks to run; adding it to main_grad, as they do with a tied weight's, changes nothing.
    assert (ours.grad is not None) == (eager.grad is not None) == tied
    assert not tied or not ours.grad.any()


def test_main_grad_written_to_between_forward_and_backward_is_noticed() -> None:
    weight, (hidden, _, _) = (
        with_main_grad(torch.float32, False),
        make_linear(torch.bfloat16, columns=COLUMNS),
    )
    results = torch.compile(fused, fullgraph=True, backend="aot_eager")(leaf(hidden), weight)
    weight.main_grad.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(results, make_upstream((N,), torch.bfloat16))


# --- what is refused ---


def test_kept_logits_are_refused() -> None:
    execution = me.Execution(logits_budget_mib=4)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="logits_budget_mib: expected 0 under"):
        compiled(*head_of(torch.float32), TARGET, ignore_index=-1, execution=execution)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "vocab_size": ({"vocab_size": 99}, "vocab_size: expected at most"),
    "temperature": ({"temperature": -1.0}, "temperature: expected a positive"),
    "mask": ({"mask": MASK[:3]}, "mask: expected shape"),
    "chunk_size": ({"chunk_size": 0}, "chunk_size: expected a positive"),
    "target": ({"ignore_index": -2}, "target: expected values in"),
}


@pytest.mark.parametrize("name", BAD)
def test_values_that_do_not_fit_are_the_same_error(name: str) -> None:
    """Raised by the op where it runs, so that it is no matter of tracing."""
    options, match = BAD[name]
    for function, inputs in ((both, logits_of(torch.float32)), (linear, head_of(torch.float32))):
        with pytest.raises(ValueError, match=match):
            torch.compile(function, fullgraph=True, backend="aot_eager")(
                *inputs, TARGET, **({"ignore_index": -1} | options)
            )


UNTRACEABLE: dict[str, tuple[dict[str, Any], str]] = {
    "execution": ({"execution": "fast"}, "execution: expected an Execution"),
    "metrics": ({"metrics": ("perplexity",)}, "metrics: expected names out of"),
    "tp_group": ({"tp_group": 3}, "tp_group: expected a torch.distributed.ProcessGroup"),
}


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_what_is_no_argument_of_an_op_is_named(name: str) -> None:
    """Dynamo quotes an error that it meets while it traces."""
    options, match = UNTRACEABLE[name]
    with pytest.raises(Exception, match=match) as found:
        torch.compile(both, fullgraph=True, backend="aot_eager")(*logits_of(torch.float32), TARGET, **options)
    assert isinstance(found.value, torch._dynamo.exc.Unsupported)


@pytest.mark.parametrize("function", [both, linear])
@pytest.mark.parametrize(
    ("backend", "match"),
    [("eager", "mcore_entropy has no second derivatives"), ("aot_eager", "double backward")],
)
def test_second_derivative_is_refused(function: Function, backend: str, match: str) -> None:
    """By our ops with a graph that autograd records, by AOTAutograd with one that it compiles."""
    inputs = logits_of(torch.float32) if function is both else head_of(torch.float32)
    results = torch.compile(function, fullgraph=True, backend=backend)(*inputs, TARGET, ignore_index=-1)

    def train() -> None:
        gradients = torch.autograd.grad([r.sum() for r in results], inputs, create_graph=True)
        (results[0].sum() + gradients[0].square().sum()).backward()

    with pytest.raises(RuntimeError, match=match):
        train()

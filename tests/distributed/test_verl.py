"""verl's functions on two ranks: hidden's gradient is a rank's part, complete once its caller has summed it.

With sequence parallelism the caller gathers the sequence, with a reduce-scatter in backward; without, every
rank has all hidden states, and the caller's backward is an all-reduce or nothing. s tokens of one packed
sequence, H hidden size, V vocabulary over the ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_entropy.adapters import verl as adapter
from tests import reference as ref
from tests.adapters.verl_cases import NEEDS_VERL, SHAPES, TEMPERATURE, Given
from tests.comparison import assert_same_bits
from tests.distributed.test_collectives import watching
from tests.ranks import run_ranks
from tests.unit.cases import leaf, make_logits, make_target

RANKS = 2
SMALL = (22, 16, 134)
# Over two ranks every sequence is even: N is one more than verl's where that is odd.
EVEN = [(tokens + tokens % RANKS, *others) for tokens, *others in SHAPES]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class _Gather(torch.autograd.Function):
    """All ranks' [s/tp, ...] as [s, ...]; backward sums every rank's gradient and takes this rank's rows."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor) -> Tensor:
        whole = shard.new_empty(RANKS * shard.shape[0], *shard.shape[1:])
        dist.all_gather_into_tensor(whole, shard)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        shard = gradient.new_empty(gradient.shape[0] // RANKS, *gradient.shape[1:])
        dist.reduce_scatter_tensor(shard, gradient.contiguous())
        return shard


class _Copy(torch.autograd.Function):
    """As given; backward sums every rank's gradient."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor) -> Tensor:
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def part(given: Given) -> tuple[Tensor, slice]:
    """This rank's rows of the weight, a leaf, and where they are."""
    columns = given.weight.shape[0] // RANKS
    rows = slice(dist.get_rank() * columns, (dist.get_rank() + 1) * columns)
    return leaf(given.weight[rows].clone()), rows


Answer = dict[str, Tensor]


def answer(outputs: tuple[Tensor, Tensor], gradients: tuple[Tensor, ...]) -> Answer:
    """What `check` compares; hidden's gradient comes as [s, 1, H]."""
    (log_probs, entropy), (hidden, weight) = outputs, gradients
    return dict(
        log_probs=log_probs.detach(), entropy=entropy.detach(), hidden=hidden.squeeze(1), weight=weight
    )


def step(given: Given, caller: str, function: Callable[..., Any] = adapter.linear_cross_entropy) -> Answer:
    """This rank's results and gradients, hidden's as the caller gets it; labels lie as Megatron's, [1, s]."""
    weight, _ = part(given)
    hidden = given.hidden[:, None]
    if caller == "gather":
        hidden = leaf(hidden.chunk(RANKS)[dist.get_rank()].clone())
        whole = _Gather.apply(hidden)
    else:
        hidden = leaf(hidden)
        whole = _Copy.apply(hidden) if caller == "copy" else hidden
    outputs = function(whole, weight, given.labels[None], TEMPERATURE, "none", dist.group.WORLD)
    found = torch.autograd.grad(outputs, (hidden, weight), given.upstream)
    return answer(outputs, found)


@contextlib.contextmanager
def tokens_of_a_chunk(count: int) -> Iterator[None]:
    """What verl's signature has no argument for."""
    with mock.patch("mcore_entropy.functional.linear_passes.default_chunk_size", return_value=count):
        yield


def steps(given: list[Given], caller: str, chunk_size: int) -> list[Answer]:
    with tokens_of_a_chunk(chunk_size):
        return [step(each, caller) for each in given]


def check(given: Given, caller: str, first: Answer, second: Answer) -> None:
    for name in ("log_probs", "entropy"):
        assert_same_bits(first[name], second[name], name)
    hidden = first["hidden"]
    if caller == "gather":
        hidden = torch.cat((hidden, second["hidden"]))
    else:
        assert_same_bits(hidden, second["hidden"], "hidden's gradient")
    weight = torch.cat((first["weight"], second["weight"]))
    given.compare(first["log_probs"], first["entropy"], {"hidden": hidden, "weight": weight})


@pytest.mark.parametrize("caller", ["gather", "copy"])
def test_published_shapes(caller: str) -> None:
    given = [Given.of(shape, dtype) for shape in EVEN for dtype in (torch.bfloat16, torch.float32)]
    for case in zip(given, *run_ranks(RANKS, steps, given, caller, 2048), strict=True):
        check(case[0], caller, *case[1:])


@pytest.mark.parametrize("caller", ["gather", "copy"])
def test_chunks(caller: str) -> None:
    given = [Given.of(SMALL, dtype) for dtype in DTYPES]
    for case in zip(given, *run_ranks(RANKS, steps, given, caller, 5), strict=True):
        check(case[0], caller, *case[1:])


# --- the part ---


def parts(chunk_size: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's part of hidden's gradient, in fp64, and its formula: the dense gradient of the logits of
    this rank's columns, times this rank's rows of the weight."""
    given = Given.of(SMALL, torch.float64)
    with tokens_of_a_chunk(chunk_size):
        found = step(given, "none")["hidden"]
    weight, rows = part(given)
    truth = ref.truth_logits(
        given.hidden @ given.weight.t(),
        given.labels,
        temperature=TEMPERATURE,
        grad_log_probs=given.upstream[0],
        grad_entropy=given.upstream[1],
    )
    return [(found, truth.gradients["logits"][:, rows] @ weight.detach())]


@pytest.mark.parametrize("chunk_size", [5, 2048])
def test_a_ranks_part_of_hiddens_gradient(chunk_size: int) -> None:
    answers = run_ranks(RANKS, parts, chunk_size)
    for ((found, expected),) in answers:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(answers[0][0][0], answers[1][0][0])


def collectives_of_backward() -> list[Any]:
    given = Given.of(SMALL, torch.float32)
    weight, _ = part(given)
    hidden = leaf(given.hidden)
    with watching() as forward:
        outputs = adapter.linear_cross_entropy(
            hidden, weight, given.labels, TEMPERATURE, "none", dist.group.WORLD
        )
    assert forward
    with watching() as backward:
        torch.autograd.backward(outputs, given.upstream)
    return list(backward)


def test_backward_communicates_nothing() -> None:
    assert run_ranks(RANKS, collectives_of_backward) == [[], []]


def compiled_and_eager() -> list[tuple[Answer, Answer]]:
    torch._dynamo.reset()
    compiled = torch.compile(adapter.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    given = Given.of(SMALL, torch.float32)
    return [(step(given, "none", compiled), step(given, "none"))]


def test_compiled_is_eager() -> None:
    for ((compiled, eager),) in run_ranks(RANKS, compiled_and_eager):
        for name, value in eager.items():
            assert_same_bits(compiled[name], value, name)


# --- reductions, and one label on each rank's columns ---


def reduced(reduction: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = Given.of(SMALL, torch.float64)
    weight, _ = part(given)
    hidden = leaf(given.hidden)
    log_prob, entropy = adapter.linear_cross_entropy(
        _Copy.apply(hidden), weight, given.labels, reduction=reduction, dist_process_group=dist.group.WORLD
    )
    log_prob.backward()
    assert hidden.grad is not None and weight.grad is not None
    return log_prob.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reduction(reduction: str) -> None:
    given = Given.of(SMALL, torch.float64)
    tokens = given.labels.numel()
    upstream = torch.full((tokens,), 1.0 if reduction == "sum" else 1 / tokens, dtype=torch.float64)
    truth = ref.truth_linear(given.hidden, given.weight, given.labels, grad_log_probs=upstream)
    answers = run_ranks(RANKS, reduced, reduction)
    for log_prob, entropy, hidden, _ in answers:
        torch.testing.assert_close(log_prob, (truth.log_probs * upstream).sum(), rtol=1e-12, atol=0)
        torch.testing.assert_close(entropy, truth.entropy, rtol=1e-12, atol=0)
        torch.testing.assert_close(hidden, truth.gradients["hidden"], rtol=1e-9, atol=1e-12)
    weight = torch.cat([answer[3] for answer in answers])
    torch.testing.assert_close(weight, truth.gradients["weight"], rtol=1e-9, atol=1e-12)


def wrong_on_one_rank() -> list[str]:
    """Each message, on every rank; the arguments are wrong on rank 1."""
    group, messages = dist.group.WORLD, []
    for wrong in (dict(reduction="batch"), dict(labels=torch.zeros(3)), dict(calculate_entropy=None)):
        arguments: dict[str, Any] = dict(
            hidden=torch.zeros(4, 8), weight=torch.zeros(9, 8), labels=torch.zeros(4, dtype=torch.int64)
        )
        if dist.get_rank() == 1:
            arguments |= wrong
        checks = mock.patch.dict(os.environ, {"MCORE_ENTROPY_CHECKS": "1"})
        with checks, pytest.raises(ValueError, match="expected") as raised:
            adapter.linear_cross_entropy(**arguments, dist_process_group=group)
        messages.append(str(raised.value))
    return messages


def test_checks_tell_every_rank() -> None:
    for rank, messages in enumerate(run_ranks(RANKS, wrong_on_one_rank)):
        for name, message in zip(("reduction", "labels", "calculate_entropy"), messages, strict=True):
            where = "" if rank == 1 else "another rank of the group failed before the collectives: rank 1: "
            assert message.startswith(f"{where}{name}: expected")


# --- beside Megatron's groups: logits, and verl's own code ---

TOKENS, COLUMNS = 12, 130
VOCABULARY_FUNCTIONS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "entropy": lambda module, x, labels: module.vocab_parallel_entropy(x),
    "entropy in chunks": lambda module, x, labels: module.vocab_parallel_entropy_with_chunking(x, 2048),
    "log-probs": lambda module, x, labels: module.vocab_parallel_log_probs_from_logits(x, labels),
    "squares": lambda module, x, labels: module.vocab_parallel_sum_pi_squared(x),
}


@contextlib.contextmanager
def megatrons_groups() -> Iterator[None]:
    from mcore_entropy.megatron.cpu import megatron_on_cpu

    with megatron_on_cpu():
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(RANKS)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def upstream_of_logits() -> Tensor:
    return torch.randn(1, TOKENS, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def of_logits(module: Any, name: str) -> tuple[Tensor, Tensor | None]:
    """A function's values on this rank's columns of [1, N, V], and its gradient, if it has one."""
    whole, labels = make_logits(COLUMNS, torch.float64, rows=TOKENS)[None], make_target((1, TOKENS), COLUMNS)
    x = leaf(whole.chunk(RANKS, dim=-1)[dist.get_rank()].clone())
    values = VOCABULARY_FUNCTIONS[name](module, x, labels)
    if name == "squares":
        return values.detach(), None
    values.backward(upstream_of_logits().to(values.dtype))
    return values.detach(), x.grad


def ours_of_logits() -> dict[str, tuple[Tensor, Tensor | None]]:
    with megatrons_groups():
        return {name: of_logits(adapter, name) for name in VOCABULARY_FUNCTIONS}


def test_functions_of_logits_use_megatrons_group() -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    whole, labels = make_logits(COLUMNS, torch.float64, rows=TOKENS)[None], make_target((1, TOKENS), COLUMNS)
    of = {"log-probs": "log_probs"}
    answers = run_ranks(RANKS, ours_of_logits)
    for name in VOCABULARY_FUNCTIONS:
        kind = of.get(name, "entropy")
        truth = ref.truth_logits(whole, labels, **{f"grad_{kind}": upstream_of_logits()})
        expected = truth.metrics["sum_pi_squared"] if name == "squares" else getattr(truth, kind)
        for answer in answers:
            torch.testing.assert_close(answer[name][0], expected, rtol=1e-12, atol=1e-12)
        gradients = [answer[name][1] for answer in answers]
        if name != "squares":
            found = torch.cat(gradients, dim=-1)  # type: ignore[arg-type]
            torch.testing.assert_close(found, truth.gradients["logits"], rtol=1e-9, atol=1e-12)


def ours_and_theirs() -> dict[str, list[tuple[Tensor, Tensor | None]]]:
    with megatrons_groups(), torch.compiler.set_stance("force_eager"):
        import verl.utils.megatron.tensor_parallel as theirs

        return {name: [of_logits(m, name) for m in (adapter, theirs)] for name in VOCABULARY_FUNCTIONS}


def test_like_verls_functions_of_logits() -> None:
    """In fp64; its log-probs, which are Megatron's, and its entropy in chunks are fp32."""
    pytest.importorskip("verl.utils.megatron.tensor_parallel", reason=NEEDS_VERL, exc_type=ImportError)
    for found in run_ranks(RANKS, ours_and_theirs):
        for name, (ours, theirs) in found.items():
            tolerance = 1e-5 if name in ("log-probs", "entropy in chunks") else 1e-10
            how: dict[str, Any] = dict(rtol=tolerance, atol=tolerance, check_dtype=False)
            torch.testing.assert_close(ours[0], theirs[0], **how)
            if name != "squares":
                torch.testing.assert_close(ours[1], theirs[1], **how)


def through_verls_call_site(given: Given, sequence_parallel: bool) -> Answer:
    """verl's processor of Megatron's hidden states with ours in place of its kernel."""
    from verl.models.mcore import model_forward_fused as site

    weight, _ = part(given)
    hidden = given.hidden[:, None]
    hidden = leaf(hidden.chunk(RANKS)[dist.get_rank()].clone() if sequence_parallel else hidden)
    with megatrons_groups(), mock.patch.object(site, "linear_cross_entropy", adapter.linear_cross_entropy):
        output = site.fused_output_processor(
            hidden_states=hidden,
            output_layer=SimpleNamespace(weight=weight),
            output_weight=None,
            labels=given.labels[None],
            context=site.FusedOutputProcessorContext(temperature=TEMPERATURE),
            config=SimpleNamespace(sequence_parallel=sequence_parallel, config_logger_dir=""),
        )
        outputs = output.log_probs, output.entropy
        found = torch.autograd.grad(outputs, (hidden, weight), given.upstream)
    return answer(outputs, found)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_through_verls_call_site(dtype: torch.dtype, sequence_parallel: bool) -> None:
    """With sequence parallelism hidden's gradient is whole; without, verl's caller adds nothing up."""
    pytest.importorskip("verl.models.mcore.model_forward_fused", reason=NEEDS_VERL, exc_type=ImportError)
    given = Given.of(EVEN[0], dtype)
    first, second = run_ranks(RANKS, through_verls_call_site, given, sequence_parallel)
    if not sequence_parallel:
        first["hidden"] = second["hidden"] = first["hidden"] + second["hidden"]
    check(given, "gather" if sequence_parallel else "copy", first, second)

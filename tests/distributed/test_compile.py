"""`torch.compile(fullgraph=True)` on two ranks: eager's bits, with the collectives inside the ops."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import mcore_entropy as me
from tests.comparison import assert_same_bits
from tests.distributed.cases import Case, build, call, shard
from tests.ranks import run_ranks
from tests.reference import METRICS
from tests.unit.cases import leaf, make_linear, make_target
from tests.unit.test_compile import BACKENDS, present

CASES = [
    Case((129, 129), "entropy"),
    Case((1, 257), "chunks", temperature="per token", mask="half"),
    Case((129, 129), "both", vocab_size=201, chunk_size=5, metrics=METRICS, layout="sb view of bs"),
    Case((129, 129), "linear", bias=True, chunk_size=5, mask="half", softcap=5.0),
    Case(
        (1, 257), "linear", torch.bfloat16, layout="sb view of bs", temperature="per token", metrics=METRICS
    ),
]
SEQUENCE_PARALLEL = [replace(case, sequence_parallel=True) for case in CASES if case.form == "linear"]


def differentiated(case: Case, group: dist.ProcessGroup | None, backend: str | None) -> list[Tensor]:
    """This rank's results and gradients, compiled unless there is no backend."""
    rank, whole = dist.get_rank(), build(case)
    parts = shard(case, whole, rank)

    def results(*inputs: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(parts, inputs, strict=True))
        log_probs, entropy, metrics = call(case, named, whole, rank, group)
        return tuple(x for x in (log_probs, entropy, *metrics.values()) if x is not None)

    function = results
    if backend is not None:
        torch._dynamo.reset()
        function = torch.compile(results, fullgraph=True, backend=backend)
    found = function(*parts.values())
    values = [x for x in found if x.requires_grad]
    upstream = whole.upstream[-len(values) :]
    return [*found, *torch.autograd.grad(values, list(parts.values()), upstream)]


def compare(cases: list[Case], backend: str) -> None:
    for case in cases:
        eager, ours = (differentiated(case, dist.group.WORLD, b) for b in (None, backend))
        for i, (one, two) in enumerate(zip(ours, eager, strict=True)):
            assert one.requires_grad == two.requires_grad
            assert_same_bits(one.detach(), two.detach(), f"{case}: result {i}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_is_eager(backend: str) -> None:
    run_ranks(2, compare, CASES if backend == "aot_eager" else CASES[2:4], backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_is_eager_with_sequence_parallelism(backend: str) -> None:
    run_ranks(2, compare, SEQUENCE_PARALLEL, backend)


def compare_with_checks() -> None:
    with mock.patch.dict(os.environ, {"MCORE_ENTROPY_CHECKS": "1"}):
        compare([CASES[2], CASES[3]], "aot_eager")
        target = make_target((24,), 40) + dist.get_rank()
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x: me.vocab_parallel_log_probs_and_entropy(x, target, tp_group=dist.group.WORLD).log_probs,
            fullgraph=True,
            backend="aot_eager",
        )
        with pytest.raises(ValueError, match="target: expected the same on every rank"):
            compiled(torch.zeros(24, 40))


def test_checks_are_made_by_the_op() -> None:
    run_ranks(2, compare_with_checks)


def compare_with_megatrons_group() -> None:
    """A stand-in for Megatron, of which only its parallel state is asked."""
    parallel_state: Any = ModuleType("parallel_state")
    group = dist.new_group([0, 1])
    parallel_state.model_parallel_is_initialized = lambda: True
    parallel_state.get_tensor_model_parallel_group = lambda check_initialized: group
    eager = differentiated(CASES[3], group, None)
    with mock.patch.dict(sys.modules, {"megatron.core.parallel_state": parallel_state}):
        ours = differentiated(CASES[3], None, "aot_eager")
    for one, two in zip(ours, eager, strict=True):
        assert_same_bits(one.detach(), two.detach())


def test_no_group_is_megatrons() -> None:
    run_ranks(2, compare_with_megatrons_group)


def compile_lengths() -> int:
    """Compiles over sequences of several lengths."""
    backend = CompileCounterWithBackend("aot_eager")

    def step(h: Tensor, w: Tensor, target: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
        return present(
            me.linear_log_probs_and_entropy(
                h,
                w,
                target,
                temperature=temperature,
                sequence_parallel=True,
                tp_group=dist.group.WORLD,
                chunk_size=8,
            )
        )

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for length in (8, 14, 10):  # the first unlike any other size: dynamo takes equal sizes for one
        hidden, weight, _ = make_linear(torch.float32, rows=3 * length // 2, columns=40, seed=dist.get_rank())
        inputs = [leaf(hidden.view(length // 2, 3, -1)), leaf(weight)]
        rest = make_target((length, 3), 80), torch.full((length, 3), 0.7)
        found, expected = (
            torch.autograd.grad([x.sum() for x in f(*inputs, *rest)], inputs) for f in (compiled, step)
        )
        for ours, eager in zip(found, expected, strict=True):
            assert_same_bits(ours, eager)
    return backend.frame_count


def test_dynamic_sequence_length_compiles_once() -> None:
    assert run_ranks(2, compile_lengths) == [1, 1]

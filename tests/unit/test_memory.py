"""Peak memory in training: tokens × hidden, not tokens × vocabulary. Measured, twice over.

`live_bytes` follows every storage that an operator hands out until it is freed; `allocator_bytes` reads
the profiler's trace of the CPU allocator, which also sees what kernels allocate inside. Both count from
the call on: inputs exist before.

Legend: N tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mcore_entropy as me
from tests.unit.cases import leaf

MIB = 2**20
WORKSPACE = 1  # MiB, in every call here


class _Live(TorchDispatchMode):
    """Sums the bytes of the storages that operators return and that are still referenced."""

    def __init__(self, existing: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known = {x.untyped_storage().data_ptr() for x in existing}

    def _free(self, address: int, size: int) -> None:
        self.now -= size
        self.known.discard(address)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if not isinstance(x, Tensor):
                continue
            storage = x.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            if size and address not in self.known:
                self.known.add(address)
                self.now += size
                weakref.finalize(storage, self._free, address, size)
        self.peak = max(self.peak, self.now)
        return result


def live_bytes(run: Callable[[], Any], inputs: list[Tensor]) -> int:
    with _Live(inputs) as mode:
        kept = run()
    del kept
    return mode.peak


def allocator_bytes(run: Callable[[], Any], inputs: list[Tensor]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        kept = run()
    del kept
    now = peak = 0
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


MEASURES = {"live": live_bytes, "allocator": allocator_bytes}
every_measure = pytest.mark.parametrize("measure", MEASURES)


def _training(
    measure: str,
    n: int,
    h: int,
    v: int,
    dtype: torch.dtype = torch.float32,
    frozen: bool = False,
    **options: Any,
) -> int:
    """Peak of forward + backward of the fused head; gradients are among it."""
    torch.manual_seed(0)
    hidden, weight = leaf(torch.randn(n, h, dtype=dtype)), (torch.randn(v, h) * h**-0.5).to(dtype)
    weight.requires_grad_(not frozen)
    target, ones = torch.randint(0, v, (n,)), torch.ones(n)
    inputs = [hidden] if frozen else [hidden, weight]
    options.setdefault("execution", me.Execution(workspace_mib=WORKSPACE))

    def run() -> Any:
        both = me.linear_log_probs_and_entropy(hidden, weight, target, **options)
        return torch.autograd.grad((both.log_probs, both.entropy), inputs, (ones, ones))

    return MEASURES[measure](run, [hidden, weight, target, ones])


@every_measure
def test_the_measures_see_the_softmax_of_eager(measure: str) -> None:
    hidden, weight = leaf(torch.randn(512, 16)), leaf(torch.randn(4000, 16))

    def run() -> Any:
        log_p = torch.log_softmax(hidden @ weight.t(), -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return torch.autograd.grad(entropy.sum(), [hidden, weight])

    tile = 512 * 4000 * 4
    assert 3 * tile < MEASURES[measure](run, [hidden, weight]) < 8 * tile


@every_measure
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_needs_no_tokens_times_vocabulary(measure: str, dtype: torch.dtype) -> None:
    n, h, v = 2048, 32, 8000  # [N, V] in fp32: 62 MiB
    peak = _training(measure, n, h, v, dtype)
    gradients = (n + v) * h * (dtype.itemsize + 4)  # in the inputs' dtype, and accumulated in fp32
    a_few_numbers_a_token = 32 * n * 4
    assert peak <= gradients + 2 * WORKSPACE * MIB + a_few_numbers_a_token
    assert peak < n * v * 4 / 12


@every_measure
def test_head_grows_with_the_weight_gradient_only(measure: str) -> None:
    """Twice the vocabulary at the same workspace: the fp32 weight gradient grows, nothing else does."""
    n, h, v = 1024, 32, 8000
    growth = _training(measure, n, h, 2 * v) - _training(measure, n, h, v)
    assert growth <= v * h * 4 * 1.1 + WORKSPACE * MIB / 4  # tiles are cut in whole rows or columns
    growth = _training(measure, n, h, 2 * v, frozen=True) - _training(measure, n, h, v, frozen=True)
    assert growth <= WORKSPACE * MIB / 4


@every_measure
@pytest.mark.parametrize("chunk_size", [None, 256])
def test_head_grows_with_tokens_times_hidden(measure: str, chunk_size: int | None) -> None:
    n, h, v = 1024, 64, 4000
    growth = _training(measure, 2 * n, h, v, chunk_size=chunk_size) - _training(
        measure, n, h, v, chunk_size=chunk_size
    )
    # The hidden gradient, one copy of hidden at most, and a few numbers a token; [N, V] would be 16 MiB.
    assert growth <= n * (2 * h + 32) * 4 + WORKSPACE * MIB / 4


@every_measure
def test_head_frozen_weight_pays_no_weight_gradient(measure: str) -> None:
    n, h, v = 64, 256, 16000  # the weight gradient would be 15.6 MiB
    assert _training(measure, n, h, v) > v * h * 4
    assert _training(measure, n, h, v, frozen=True) < v * h * 4 / 4


@every_measure
def test_head_masked_rows_cost_less(measure: str) -> None:
    """One row in sixteen: chunks hold the rows that count, gradients are full."""
    n, h, v = 2048, 32, 4000
    mask = torch.arange(n) % 16 == 0
    assert _training(measure, n, h, v, mask=mask) <= _training(measure, n, h, v) + n * h * 4


def _logits_training(measure: str, x: Tensor, forward_only: bool, **options: Any) -> int:
    target = torch.zeros(x.shape[:-1], dtype=torch.long)
    ones, x = torch.ones(x.shape[:-1]), leaf(x)
    execution = me.Execution(workspace_mib=WORKSPACE)

    def run() -> Any:
        both = me.vocab_parallel_log_probs_and_entropy(x, target, execution=execution, **options)
        if forward_only:
            return both
        return torch.autograd.grad((both.log_probs, both.entropy), [x], (ones, ones))

    return MEASURES[measure](run, [x, target, ones])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "N": lambda x: x,
    "bs": lambda x: x.view(16, 64, -1),
    "sb view of bs": lambda x: x.view(16, 64, -1).transpose(0, 1),
    "offset view": lambda x: torch.cat((x[:1], x))[1:, 3:],
}


@every_measure
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_need_the_gradient_and_a_workspace(measure: str, dtype: torch.dtype, layout: str) -> None:
    x = LAYOUTS[layout](torch.randn(1024, 4000).to(dtype))  # 15.6 MiB in fp32
    gradient, few = x.numel() * dtype.itemsize, 64 * 1024 * 4
    assert _logits_training(measure, x, forward_only=True) <= 2 * WORKSPACE * MIB + few
    assert _logits_training(measure, x, forward_only=False) <= gradient + 2 * WORKSPACE * MIB + few


@every_measure
def test_entropy_in_chunks_needs_the_gradient_and_a_chunk(measure: str) -> None:
    x = leaf(torch.randn(1024, 4000))
    ones = torch.ones(1024)

    def run() -> Any:
        return torch.autograd.grad(me.vocab_parallel_entropy_with_chunking(x, 64), [x], ones)

    chunk = 64 * 4000 * 4
    assert MEASURES[measure](run, [x, ones]) <= x.numel() * 4 + 4 * chunk + 64 * 1024 * 4


def _saved(run: Callable[[], Any], inputs: list[Tensor]) -> tuple[set[int], int]:
    """Which inputs are saved for backward by reference, and how many other numbers are."""
    addresses = {x.untyped_storage().data_ptr(): i for i, x in enumerate(inputs)}
    by_reference, others = set(), 0

    def pack(x: Tensor) -> Tensor:
        nonlocal others
        index = addresses.get(x.untyped_storage().data_ptr())
        if index is None:
            others += x.untyped_storage().nbytes() // x.element_size()
        else:
            by_reference.add(index)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kept = run()
    del kept
    return by_reference, others


@pytest.mark.parametrize(
    "options", [{}, {"mask": torch.arange(64) % 2 == 0, "temperature": torch.ones(64)}], ids=str
)
def test_saved_for_backward_is_the_input_and_a_few_numbers_a_token(options: dict[str, Any]) -> None:
    x, target = leaf(torch.randn(64, 4000)), torch.zeros(64, dtype=torch.long)
    hidden, weight, bias = (
        leaf(torch.randn(64, 32)),
        leaf(torch.randn(4000, 32)),
        leaf(torch.randn(4000)),
    )
    head = (hidden, weight, target)
    runs = {
        "entropy": (lambda: me.vocab_parallel_entropy(x, **options), [x]),
        "chunks": (lambda: me.vocab_parallel_entropy_with_chunking(x, 7, **options), [x]),
        "both": (lambda: me.vocab_parallel_log_probs_and_entropy(x, target, **options), [x]),
        "linear": (
            lambda: me.linear_log_probs_and_entropy(*head, bias=bias, **options),
            [hidden, weight],
        ),
    }
    per_token = list(options.values())
    for name, (run, parents) in runs.items():
        known = [*parents, target, bias, *per_token]
        by_reference, others = _saved(run, known)
        assert set(range(len(parents))) <= by_reference, name
        assert others <= 8 * 64, name


@every_measure
def test_nothing_large_stays_alive_between_forward_and_backward(measure: str) -> None:
    """Hooks see what autograd saves; this also sees what a context might hold on to by itself."""
    hidden, weight = leaf(torch.randn(2048, 32)), leaf(torch.randn(4000, 32))
    logits, target = leaf(torch.randn(2048, 512)), torch.zeros(2048, dtype=torch.long)
    after = {}

    def run() -> Any:
        kept = (
            me.linear_log_probs_and_entropy(hidden, weight, target),
            me.vocab_parallel_log_probs_and_entropy(logits, target),
        )
        # All temporaries are gone by now, so one more large allocation marks the level reached.
        marker = torch.zeros(64 * MIB // 4)
        after["marker"] = marker.numel() * 4
        return kept, marker

    peak = MEASURES[measure](run, [hidden, weight, logits, target])
    assert peak - after["marker"] <= 2 * 16 * 2048 * 4


def test_entropy_not_asked_for_saves_and_computes_less() -> None:
    hidden, weight = leaf(torch.randn(64, 32)), leaf(torch.randn(400, 32))
    target = torch.zeros(64, dtype=torch.long)
    saved = {}
    for entropy in (True, False):
        run = lambda entropy=entropy: me.linear_log_probs_and_entropy(hidden, weight, target, entropy=entropy)  # noqa: E731
        saved[entropy] = _saved(run, [hidden, weight, target])[1]
    assert saved[False] < saved[True]

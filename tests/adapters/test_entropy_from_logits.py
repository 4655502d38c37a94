"""The entropy under verl's names: right for every layout and dtype, cheaper than its formula in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_entropy.adapters.entropy_from_logits import (
    entropy_from_logits,
    entropy_from_logits_with_chunking,
    entropy_function,
)
from mcore_entropy.functional import problem
from mcore_entropy.parallel import token_chunks
from tests.comparison import assert_same_bits
from tests.reference import eager_logits, truth_logits
from tests.unit.cases import compare_gradient, compare_values, leaf, make_upstream
from tests.unit.test_memory import live_bytes

OPTIONS = [
    dict(
        entropy_from_logits_with_chunking=chunks,
        entropy_checkpointing=again,
        entropy_from_logits_chunk_size=7,
    )
    for chunks in (False, True)
    for again in (False, True)
]
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "plain": entropy_from_logits,
    "chunks": lambda x, **keywords: entropy_from_logits_with_chunking(x, 7, **keywords),
    **{str(i): entropy_function(**options) for i, options in enumerate(OPTIONS)},
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "packed": lambda x: x,
    "padded": lambda x: x.view(4, 6, -1),
    "transposed": lambda x: x.view(6, 4, -1).transpose(0, 1),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_value_and_gradient(function: str, layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = leaf(LAYOUTS[layout]((3 * torch.randn(24, 301)).to(dtype)))
    mask = torch.arange(24).view(x.shape[:-1]) % 5 != 0
    _, upstream = make_upstream(x.shape[:-1], dtype)
    entropy = FUNCTIONS[function](x, mask=mask)
    assert entropy.dtype == torch.float32 and entropy.shape == x.shape[:-1]
    truth = truth_logits(x, grad_entropy=upstream, mask=mask)
    eager = eager_logits(x, grad_entropy=upstream, mask=mask)
    compare_values(entropy, truth.entropy, eager.entropy, "entropy")
    (gradient,) = torch.autograd.grad(entropy, x, upstream)
    compare_gradient("logits", gradient, truth, eager)
    assert not gradient[~mask].any()


def verl(logits: Tensor) -> Tensor:
    """Its formula on half-precision logits: everything in their dtype."""
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


def verl_in_chunks(logits: Tensor) -> Tensor:
    """Its formula, in fp32 a chunk at a time."""
    return torch.cat([verl(chunk.float()) for chunk in logits.split(64)])


def training(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[int, int]:
    """Peak bytes of forward and backward beside the logits; bytes saved for backward besides them."""
    x = leaf(x)
    saved: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() != x.untyped_storage().data_ptr():
            saved[storage.data_ptr()] = storage.nbytes()
        return value

    def run() -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            entropy = function(x)
        kept.append(entropy)  # so that no address is used twice
        return torch.autograd.grad(entropy.sum(), x)

    kept: list[Tensor] = []
    return live_bytes(run, [x]), sum(saved.values())


@pytest.mark.parametrize("shape", [(512, 8000), (4, 128, 8000)], ids=["packed", "padded"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_memory_in_training(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """bf16 logits of 8 MB; their gradient is as large."""
    x = torch.randn(shape).bfloat16()
    size = x.numel() * 2
    ours = entropy_function(**{**options, "entropy_from_logits_chunk_size": 64})
    peak, saved = training(ours, x)
    assert saved <= 4 * 512 * 4
    tiles = 16 * 2**20  # the CPU's workspace is 12 MiB, or a chunk in fp32 a few times over
    assert peak <= size + tiles
    packed = x.view(-1, 8000)
    assert training(verl, packed)[1] >= 0.99 * size
    assert training(verl_in_chunks, packed)[1] >= 3.9 * size  # chunking costs memory there: fp32, kept
    assert training(verl_in_chunks, packed)[0] > peak


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_chunk_size_is_honoured(
    options: dict[str, Any], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With checkpointing and in three dimensions too, where verl's own drop it.

    A forward without a mask has no use for chunks: its tiles are bounded, and there is nothing to reduce.
    """
    chunks: list[int] = []

    def seen(*args: Any) -> Any:
        for chunk in token_chunks(*args):
            chunks.append(chunk.tokens)
            yield chunk

    monkeypatch.setattr(problem, "token_chunks", seen)
    x = leaf(LAYOUTS[layout](torch.randn(24, 11)))
    expected = [7, 7, 7, 3] if options["entropy_from_logits_with_chunking"] else [24]
    for mask, in_forward in ((None, [24]), (torch.ones(x.shape[:-1], dtype=torch.bool), expected)):
        entropy = entropy_function(**options)(x, mask=mask)
        assert chunks == in_forward
        chunks.clear()
        entropy.sum().backward()
        assert chunks == expected
        chunks.clear()


def test_beside_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensor-parallel group is not for logits that are whole on every rank."""
    from mcore_entropy import parallel, vocab_parallel_entropy

    monkeypatch.setattr(parallel, "_megatron_group", lambda: "a group")
    x = torch.randn(5, 11)
    with pytest.raises(ValueError, match="tp_group"):
        vocab_parallel_entropy(x)
    expected = -(x.softmax(-1) * x.log_softmax(-1)).sum(-1)
    for function in FUNCTIONS.values():
        torch.testing.assert_close(function(x), expected)


def test_chunks_change_nothing() -> None:
    x = torch.randn(4, 6, 301)
    whole = entropy_from_logits(x)
    for size in (1, 7, 24, 10**6):
        torch.testing.assert_close(entropy_from_logits_with_chunking(x, size), whole, rtol=1e-6, atol=1e-6)
    assert_same_bits(entropy_function()(x), whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"entropy_from_logits_chunk_size": 0}, "chunk_size: expected a positive number"),
        ({"entropy_checkpointing": 1}, "entropy_checkpointing: expected True or False"),
        ({"entropy_from_logits_with_chunking": "yes"}, "with_chunking: expected True or False"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        entropy_function(**options)

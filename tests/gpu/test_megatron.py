"""A bf16 GPTModel on GPUs: the swapped head and Megatron's own against the same head in fp64.

The truth takes what enters the output layer and its weight, computes log-prob, entropy and the loss densely
in fp64, and sends hidden's gradient into the model's body. The stock head does the same from its bf16 logits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from mcore_entropy import EntropyConfig, swap_output_layer
from tests.gpu.gpt import GPT, HAS_TRANSFORMER_ENGINE, build, causal_mask, make_text, model_parallel, spawn

COEFFICIENT = 0.3

needs_transformer_engine = pytest.mark.skipif(
    not HAS_TRANSFORMER_ENGINE, reason="transformer-engine is not installed"
)
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

Step = tuple[Tensor, Tensor, dict[str, Tensor]]  # log-prob and entropy [b, s], gradients by name


def loss(log_probs: Tensor, entropy: Tensor) -> Tensor:
    return -(log_probs + COEFFICIENT * entropy).mean()


def dense(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of whole logits [b, s, V], in fp64."""
    log_p = torch.log_softmax(logits.double(), -1)
    return log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def gathered(shard: Tensor, dimension: int) -> Tensor:
    """The tensor-parallel ranks' shards side by side, without a gradient."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard.detach().contiguous(), group=group)
    return torch.cat(shards, dimension)


@contextlib.contextmanager
def hidden_states(model: Any) -> Iterator[list[Tensor]]:
    """What enters the output layer, [s, b, H]."""
    seen: list[Tensor] = []
    handle = model.output_layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        handle.remove()


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def truth_step(model: Any, options: GPT, inputs: tuple[Any, ...], labels: Tensor) -> Step:
    from megatron.core import parallel_state

    with hidden_states(model) as seen:
        model(*inputs)
    own = seen[0]
    weight = model.shared_embedding_or_output_weight() if options.tied else model.output_layer.weight
    whole_weight = gathered(weight, 0).double().requires_grad_()
    whole_hidden = (gathered(own, 0) if options.sequence_parallel else own.detach()).double().requires_grad_()
    log_probs, entropy = dense((whole_hidden @ whole_weight.t()).transpose(0, 1), labels)
    loss(log_probs, entropy).backward()
    rank = parallel_state.get_tensor_model_parallel_rank()
    hidden_gradient = whole_hidden.grad
    if options.sequence_parallel:
        hidden_gradient = hidden_gradient.chunk(options.tensor_parallel)[rank]
    own.backward(hidden_gradient.to(own.dtype))
    found = gradients(model)
    head = "embedding.word_embeddings.weight" if options.tied else "output_layer.weight"
    own_shard = whole_weight.grad.chunk(options.tensor_parallel)[rank]
    found[head] = own_shard + found[head] if head in found else own_shard
    return log_probs.detach(), entropy.detach(), found


def stock_step(model: Any, inputs: tuple[Any, ...], labels: Tensor) -> Step:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    log_probs, entropy = dense(gather_from_tensor_model_parallel_region(model(*inputs)), labels)
    loss(log_probs, entropy).backward()
    return log_probs.detach(), entropy.detach(), gradients(model)


def swapped_step(model: Any, inputs: tuple[Any, ...], labels: Tensor) -> Step:
    handle = swap_output_layer(model, EntropyConfig(chunk_size=96))
    output = model(*inputs, labels=labels)
    handle.restore()
    assert output.log_probs.dtype == output.entropy.dtype == torch.float32
    loss(output.log_probs, output.entropy).backward()
    return output.log_probs.detach(), output.entropy.detach(), gradients(model)


def compare(options: GPT) -> None:
    model = build(options)
    text = make_text(options)
    labels = text[:, 1:].contiguous()
    positions = torch.arange(options.sequence_length, device="cuda").expand_as(labels)
    inputs = text[:, :-1].contiguous(), positions, causal_mask(options.sequence_length)
    right_log_probs, right_entropy, right = truth_step(model, options, inputs, labels)
    stock_log_probs, _, stock = stock_step(model, inputs, labels)
    log_probs, entropy, ours = swapped_step(model, inputs, labels)

    # Products of bf16 summed in fp32: far below what rounding the logits to bf16 costs.
    assert (log_probs - right_log_probs).abs().max() < 1e-5
    assert (entropy - right_entropy).abs().max() < 1e-5
    assert (stock_log_probs - right_log_probs).abs().max() > 1e-4  # else the comparison says nothing
    assert ours.keys() == right.keys() == stock.keys()
    for name, gradient in right.items():
        largest = gradient.abs().max()
        error, stock_error = ((g[name] - gradient).abs().max() / largest for g in (ours, stock))
        # Each is rounded to bf16 on its way through the body, by other sums: an ulp or so.
        assert error <= 1.5 * stock_error + 2**-8, f"{name}: {error:.2e}, the stock head {stock_error:.2e}"


ONE_GPU = {
    "local": GPT(),
    "local-tied": GPT(tied=True),
    "te": GPT(transformer_engine=True),
    "te-tied": GPT(transformer_engine=True, tied=True),
}
TWO_GPUS = {
    f"{spec}-{'sp' if sp else 'tp'}{'-tied' if tied else ''}": GPT(
        transformer_engine=spec == "te", tensor_parallel=2, sequence_parallel=sp, tied=tied
    )
    for spec in ("local", "te")
    for sp in (False, True)
    for tied in (False, True)
    if spec == "te" or not sp  # torch's norm, of the local spec, refuses sequence parallelism
}


def marked(cases: dict[str, GPT]) -> list[Any]:
    return [
        pytest.param(options, id=name, marks=[needs_transformer_engine] if options.transformer_engine else [])
        for name, options in cases.items()
    ]


@pytest.mark.parametrize("options", marked(ONE_GPU))
def test_one_gpu(options: GPT) -> None:
    spawn(1, compare, options)


@needs_two_gpus
@pytest.mark.parametrize("options", marked(TWO_GPUS))
def test_tensor_parallel_over_nccl(options: GPT) -> None:
    spawn(2, compare, options)


def packed(options: GPT) -> None:
    """Three sequences in one row without padding, against each of them alone."""
    from megatron.core.packed_seq_params import PackedSeqParams

    model = build(options)
    swap_output_layer(model, EntropyConfig())
    lengths = [40, 56, 32]
    text = make_text(options)[0]
    pieces = list(text[:-1].split(lengths))
    following = list(text[1:].split(lengths))
    alone = []
    for piece, labels in zip(pieces, following, strict=True):
        positions = torch.arange(len(piece), device="cuda").unsqueeze(0)
        alone.append(model(piece.unsqueeze(0), positions, None, labels=labels.unsqueeze(0)))
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    packing = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    positions = torch.cat([torch.arange(length) for length in lengths]).cuda().unsqueeze(0)
    row = model(
        text[:-1].unsqueeze(0), positions, None, labels=text[1:].unsqueeze(0), packed_seq_params=packing
    )
    for name in ("log_probs", "entropy"):
        right = torch.cat([getattr(output, name) for output in alone], 1)
        # Attention's kernels differ for packed rows: bf16 hidden states an ulp apart.
        torch.testing.assert_close(getattr(row, name), right, rtol=0, atol=2e-2)
    loss(row.log_probs, row.entropy).backward()
    in_one = gradients(model)
    total = sum(len(piece) for piece in pieces)
    for output in alone:
        (loss(output.log_probs, output.entropy) * output.log_probs.numel() / total).backward()
    for name, gradient in gradients(model).items():
        assert (in_one[name] - gradient).abs().max() <= 0.05 * gradient.abs().max(), name


@needs_transformer_engine
def test_packed_sequences() -> None:
    spawn(1, packed, GPT(transformer_engine=True))


def context_parallel(options: GPT) -> None:
    """Each rank's tokens against the same tokens of the whole sequence on one rank, and the loss's sums."""
    from megatron.core import parallel_state

    from mcore_entropy.megatron.loss import EntropyLoss

    text = make_text(options)
    tokens, labels = text[:, :-1], text[:, 1:]
    positions = torch.arange(options.sequence_length, device="cuda").expand_as(tokens)
    single = replace(options, context_parallel=1, context_communication=None)
    model_parallel(single)
    whole_model = build(single)
    weights = whole_model.state_dict()
    swap_output_layer(whole_model, EntropyConfig())
    whole = whole_model(tokens, positions, None, labels=labels)
    model_parallel(options)
    model = build(options)
    model.load_state_dict(weights)
    swap_output_layer(model, EntropyConfig())
    rank, ranks = parallel_state.get_context_parallel_rank(), options.context_parallel
    halves = torch.arange(options.sequence_length, device="cuda").chunk(2 * ranks)
    own = torch.cat([halves[rank], halves[2 * ranks - 1 - rank]])  # a rank has an early and a late piece
    output = model(tokens[:, own], positions[:, own], None, labels=labels[:, own])
    torch.testing.assert_close(output.log_probs, whole.log_probs[:, own], rtol=0, atol=2e-2)
    torch.testing.assert_close(output.entropy, whole.entropy[:, own], rtol=0, atol=2e-2)
    config = EntropyConfig(entropy_coeff=COEFFICIENT)
    mask = torch.ones_like(output.log_probs)
    _, _, report = EntropyLoss(config)(mask, output)
    total = report["entropy"].clone()
    dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
    right = torch.stack([whole.entropy.sum(), torch.tensor(float(labels.numel()), device="cuda")])
    torch.testing.assert_close(total, right.detach(), rtol=1e-4, atol=0)


@needs_two_gpus
@needs_transformer_engine
@pytest.mark.parametrize("communication", ["p2p", "a2a"], ids=["ring", "ulysses"])
def test_context_parallel(communication: str) -> None:
    spawn(
        2,
        context_parallel,
        GPT(transformer_engine=True, context_parallel=2, context_communication=communication),
    )

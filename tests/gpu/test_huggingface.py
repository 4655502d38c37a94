"""Swapped Hugging Face models on a GPU: bf16 through the Triton backend, FSDP2, and memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

pytest.importorskip("transformers", reason="needs transformers: pip install 'mcore-entropy[hf]'")

import mcore_entropy as me
from mcore_entropy.adapters.huggingface import swap_lm_head
from tests.adapters.tiny_models import tiny_model

SIZES = dict(vocab_size=20_000, hidden_size=256, intermediate_size=512, max_position_embeddings=512)
SIZES_OF_LLAMA = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}


def ids() -> torch.Tensor:
    return torch.randint(3, SIZES["vocab_size"], (4, 512), device="cuda")


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.float() for name, p in model.named_parameters()}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM", "GraniteForCausalLM"])
def test_bf16_against_fp64(architecture: str) -> None:
    """No farther from fp64, in loss and in the gradients together, than the stock head in bf16."""
    stock = tiny_model(architecture, **SIZES_OF_LLAMA).to("cuda", torch.bfloat16)
    model, truth = copy.deepcopy(stock), copy.deepcopy(stock).double()
    swap_lm_head(model, me.EntropyConfig())
    text = ids()
    true_loss = truth(input_ids=text, labels=text).loss
    true_gradients = gradients(truth, true_loss)
    losses, errors = [], []
    for m in (model, stock):
        loss = m(input_ids=text, labels=text).loss
        losses.append(abs(float(loss) - float(true_loss)))
        found = gradients(m, loss)
        squares = [((found[name] - value) ** 2).sum() for name, value in true_gradients.items()]
        errors.append(float(torch.stack(squares).sum().sqrt()))
    assert losses[0] <= 1.2 * losses[1] + 1e-3
    assert errors[0] <= 1.2 * errors[1]


def test_memory_of_a_step() -> None:
    model = tiny_model("LlamaForCausalLM", **SIZES_OF_LLAMA).to("cuda", torch.bfloat16)
    text = ids()
    logits = text.numel() * SIZES["vocab_size"] * 4

    def peak() -> int:
        model(input_ids=text, labels=text, use_cache=False).loss.backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(input_ids=text, labels=text, use_cache=False).loss.backward()
        return torch.cuda.max_memory_allocated() - before

    stock = peak()
    swap_lm_head(model, me.EntropyConfig(execution=me.Execution(workspace_mib=16)))
    assert stock > 2 * logits
    assert peak() < 0.6 * logits  # a weight gradient in fp32 and in bf16 and a workspace; activations


def test_fsdp2_on_one_gpu() -> None:
    import torch.distributed as dist

    from mcore_entropy.adapters.fsdp import wrap_fsdp2

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = tiny_model("LlamaForCausalLM", **SIZES_OF_LLAMA).cuda()
        plain = copy.deepcopy(model)
        for parameter in plain.parameters():  # FSDP leaves the rotary frequencies, a buffer, in fp32
            parameter.data = parameter.data.bfloat16()
        for m in (model, plain):
            swap_lm_head(m, me.EntropyConfig())
        wrap_fsdp2(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        text = ids()
        output, expected = (m(input_ids=text, labels=text, use_cache=False) for m in (model, plain))
        assert output.log_probs.dtype == torch.float32
        torch.testing.assert_close(output.entropy, expected.entropy, rtol=1e-5, atol=1e-5)
        output.loss.backward()
    finally:
        dist.destroy_process_group()

"""A swapped Hugging Face model in training never has its logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'mcore-entropy[hf]'")

import mcore_entropy as me
from mcore_entropy.adapters.huggingface import swap_lm_head
from tests.adapters.tiny_models import tiny_model
from tests.unit.test_memory import live_bytes

TOKENS, VOCABULARY = 512, 20_000


def training_peak(model: Any) -> int:
    ids = torch.randint(3, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    return live_bytes(step, [ids, *model.parameters()])


@pytest.mark.parametrize("tied", [False, True])
def test_peak_of_a_training_step(tied: bool) -> None:
    """The stock head holds fp32 logits, their softmax and their gradient; the swapped one a tile."""
    sizes = dict(vocab_size=VOCABULARY, max_position_embeddings=TOKENS, tie_word_embeddings=tied)
    model = tiny_model("LlamaForCausalLM", **sizes)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    logits = TOKENS * VOCABULARY * 4
    stock = training_peak(model)
    model.zero_grad()
    swap_lm_head(model, me.EntropyConfig(execution=me.Execution(workspace_mib=1)))
    ours = training_peak(model)
    assert stock > 2.5 * logits
    # Gradients of all parameters, as many again while they add up (a tied weight has two), activations.
    assert ours < 2.5 * parameters + 0.15 * logits

"""Models of Qwen2.5's shapes with random weights, and what people write by hand on their logits."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

_TIED_HALF_BILLION = dict(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": _TIED_HALF_BILLION,
    "7b": dict(  # four of its layers
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=4,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    ),
    "tiny": _TIED_HALF_BILLION
    | dict(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    ),
}


def build(shape: str, device: str, **others: int) -> Any:
    """In bf16 with checkpointed layers, and with gradients, so that a step's peak does not count them."""
    config = transformers.Qwen2Config(
        **(SHAPES[shape] | others),
        max_position_embeddings=32768,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.gradient_checkpointing_enable()
    model.train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def eager_statistics(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy [b, s - 1] of token ids [b, s], by an fp32 log_softmax of all logits."""
    log_p = model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
    return log_p.gather(-1, ids[:, 1:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)

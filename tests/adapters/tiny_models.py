"""Hugging Face causal LMs at toy size, each with its own classes."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 97

_SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_EXPERTS = dict(
    experts_implementation="eager", num_experts=4, num_local_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=24, shared_expert_intermediate_size=24, output_router_logits=True,
)  # fmt: skip
_ROUTED_EXPERTS = dict(
    experts_implementation="eager",
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
)
_LATENT_ATTENTION = dict(
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
)
# What an architecture needs besides, or has under another name. Transforms far from the identity.
_SPECIAL: dict[str, dict[str, Any]] = {
    "CohereForCausalLM": dict(logit_scale=0.25),
    "Cohere2ForCausalLM": dict(logit_scale=0.25),
    "DeepseekV2ForCausalLM": dict(_LATENT_ATTENTION | _ROUTED_EXPERTS, topk_method="greedy"),
    "DeepseekV3ForCausalLM": _LATENT_ATTENTION | _ROUTED_EXPERTS,
    "FalconH1ForCausalLM": dict(
        lm_head_multiplier=0.3, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8,
        mamba_chunk_size=8,
    ),
    "Gemma2ForCausalLM": dict(head_dim=8, final_logit_softcapping=3.0),
    "Gemma3ForCausalLM": dict(head_dim=8, final_logit_softcapping=3.0),
    "Glm4MoeForCausalLM": _ROUTED_EXPERTS,
    "GemmaForCausalLM": dict(head_dim=8),
    "GraniteForCausalLM": dict(logits_scaling=4.0),
    "GraniteMoeForCausalLM": dict(_EXPERTS, logits_scaling=4.0),
    "GraniteMoeSharedForCausalLM": dict(_EXPERTS, logits_scaling=4.0),
    "HyperCLOVAXForCausalLM": dict(logits_scaling=0.25),
    "HeliumForCausalLM": dict(head_dim=8),
    "MinistralForCausalLM": dict(head_dim=8),
    "MiniCPM3ForCausalLM": dict(_LATENT_ATTENTION, dim_model_base=8),
    "MixtralForCausalLM": _EXPERTS,
    "NanoChatForCausalLM": dict(final_logit_softcapping=3.0),
    "OlmoeForCausalLM": _EXPERTS,
    "Qwen2MoeForCausalLM": _EXPERTS,
    "Qwen3MoeForCausalLM": _EXPERTS,
    "GptOssForCausalLM": _EXPERTS,
    "RecurrentGemmaForCausalLM": dict(logits_soft_cap=3.0, lru_width=32, num_hidden_layers=3),
    "VaultGemmaForCausalLM": dict(head_dim=8, final_logit_softcapping=3.0),
}  # fmt: skip


def tiny_model(architecture: str, seed: int = 0, **config: Any) -> Any:
    """A random model in fp32 whose logits are spread enough for a transform to matter; dropout is off."""
    model_class = getattr(transformers, architecture)
    sizes = {**_SIZES, **_SPECIAL.get(architecture, {}), **config}
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**sizes)).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(std=0.5)
    return model

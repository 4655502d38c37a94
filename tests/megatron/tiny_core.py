"""The config and the GPTModel of one stage that a `TinyGPT` asks for, with Megatron's own initial weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.megatron.tiny_gpt import TinyGPT


def transformer_config(options: TinyGPT) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.transformer_config import TransformerConfig

    arguments: dict[str, Any] = dict(
        num_layers=options.layers,
        hidden_size=options.hidden_size,
        num_attention_heads=options.heads,
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
        context_parallel_size=options.context_parallel,
        expert_model_parallel_size=options.expert_parallel,
        sequence_parallel=options.sequence_parallel,
        mtp_num_layers=options.mtp_layers or None,
        mtp_loss_scaling_factor=0.1,
        params_dtype=options.dtype,
        pipeline_dtype=options.dtype,
        bf16=options.dtype == torch.bfloat16,
        fp16=options.dtype == torch.float16,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        finalize_model_grads_func=finalize_model_grads,
    )
    if options.virtual_stages > 1:
        arguments["virtual_pipeline_model_parallel_size"] = options.virtual_stages
    if options.experts:
        arguments |= dict(
            num_moe_experts=options.experts,
            moe_router_topk=2,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="allgather",  # the others have CUDA streams
            moe_router_dtype="fp64",
            add_bias_linear=False,
        )
    return TransformerConfig(**{**arguments, **options.transformer})


def gpt_model(config: Any, options: TinyGPT, virtual_stage: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

    spec = get_gpt_layer_local_spec(num_experts=options.experts or None)
    if not options.attention:
        spec.submodules.input_layernorm = IdentityOp
        spec.submodules.self_attention = IdentityOp
        spec.submodules.self_attn_bda = IdentityFuncOp
    stage: dict[str, Any] = {"ignore_virtual": False, "vp_stage": virtual_stage}
    return GPTModel(
        config,
        spec,
        vocab_size=options.padded_vocab_size,
        max_sequence_length=options.sequence_length,
        position_embedding_type="rope" if options.attention else "none",
        share_embeddings_and_output_weights=options.tied,
        parallel_output=options.parallel_output,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        if options.mtp_layers
        else None,
        **({"vp_stage": virtual_stage} if options.virtual_stages > 1 else {}),
    )

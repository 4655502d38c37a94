"""A small GPT out of Megatron-core's parts: the model, what it takes, its optimizer, its checkpoint."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from launch import World
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


@dataclass(frozen=True)
class ModelInputs:
    """What GPTModel takes, and which tokens count. The labels are the tokens one place further on."""

    tokens: torch.Tensor  # [b, s]
    labels: torch.Tensor  # [b, s]
    loss_mask: torch.Tensor  # [b, s]
    position_ids: torch.Tensor  # [b, s]
    attention_mask: torch.Tensor  # [1, 1, s, s], True where a token must not look

    @classmethod
    def from_rows(cls, rows: torch.Tensor, *, end_of_text: int, device: torch.device) -> ModelInputs:
        rows = rows.to(device)
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        length = tokens.size(1)
        return cls(
            tokens=tokens,
            labels=labels,
            loss_mask=tokens != end_of_text,  # nothing tells how the next document starts
            position_ids=torch.arange(length, device=device).expand_as(tokens),
            attention_mask=causal_mask(length, device),
        )


def causal_mask(length: int, device: torch.device) -> torch.Tensor:
    """[1, 1, s, s], True where a token must not look: at those after it."""
    return torch.ones(1, 1, length, length, device=device).triu(1).bool()


class TorchLayerNorm:
    """torch's LayerNorm in Megatron's layers, whose own wrapper of it refuses sequence parallelism."""

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float, **_: object
    ) -> torch.nn.LayerNorm:
        norm = torch.nn.LayerNorm(hidden_size, eps)
        for parameter in norm.parameters():
            # Each rank sees its share of the sequence; by this mark finalize_model_grads adds them up.
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,  # the same weights whatever the tensor-parallel size
        gradient_accumulation_fusion=False,  # Megatron's own layers need apex for it
        calculate_per_token_loss=True,  # loss_func gives sums, and all ranks' tokens divide the gradients
        finalize_model_grads_func=finalize_model_grads,
    )


def build_model(args: argparse.Namespace, config: TransformerConfig, world: World) -> GPTModel:
    torch.manual_seed(args.seed)
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TorchLayerNorm
    gpt = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=TorchLayerNorm),
        vocab_size=args.vocab_size,
        max_sequence_length=args.seq_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )
    return gpt.to(world.device)


def wrap_for_training(gpt: GPTModel, config: TransformerConfig) -> DistributedDataParallel:
    """bf16 if asked for; gradients accumulated in fp32 and reduced over the data-parallel ranks."""
    module = Float16Module(config, gpt) if config.bf16 else gpt
    return DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module)


def build_optimizer(args: argparse.Namespace, model: DistributedDataParallel) -> MegatronOptimizer:
    """AdamW (fp32 master weights under bf16), with the learning rate --lr until a schedule sets another."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.lr / 10,
        weight_decay=args.weight_decay,
        clip_grad=args.clip_grad,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
    )
    return get_megatron_optimizer(config, [model])


def build_schedule(
    args: argparse.Namespace, optimizer: MegatronOptimizer, decay: str = "cosine"
) -> OptimizerParamScheduler:
    """A learning rate that warms up, and then decays in this style of Megatron's."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.lr / 10,
        lr_warmup_steps=min(args.lr_warmup_iters, args.train_iters - 1),
        lr_decay_steps=args.train_iters,
        lr_decay_style=decay,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters,
        wd_incr_style="constant",
    )


def parameter_count(gpt: GPTModel) -> int:
    """Of the whole model: the shards of all tensor-parallel ranks together."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    return sum(
        p.numel() * (size if getattr(p, "tensor_model_parallel", False) else 1) for p in gpt.parameters()
    )


def save_checkpoint(gpt: GPTModel, world: World, args: argparse.Namespace) -> Path:
    """Megatron's layout: SAVE/iter_0000123/ in the torch_dist format, and a file that names the iteration."""
    checkpoint = args.save / f"iter_{args.train_iters:07d}"
    if world.rank == 0:
        shutil.rmtree(checkpoint, ignore_errors=True)  # of an earlier run with the same --save
        checkpoint.mkdir(parents=True)
    world.meet()
    state = {"model": gpt.sharded_state_dict(), "iteration": args.train_iters, "args": vars(args)}
    dist_checkpointing.save(state, str(checkpoint))
    if world.rank == 0:
        (args.save / "latest_checkpointed_iteration.txt").write_text(str(args.train_iters))
    return checkpoint

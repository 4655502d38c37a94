"""A small GPTModel on GPUs, one process each, for tests that compare heads on the same hidden states.

spawn(2, check, GPT(tensor_parallel=2))      # check(options) runs on every rank, in Megatron's parallel state
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

HAS_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None


@dataclass(frozen=True)
class GPT:
    """What to build; hidden size and heads are what fused attention takes."""

    transformer_engine: bool = False
    tensor_parallel: int = 1
    context_parallel: int = 1
    context_communication: str | None = None
    sequence_parallel: bool = False
    tied: bool = False
    dtype: torch.dtype = torch.bfloat16
    vocab_size: int = 4096
    hidden_size: int = 256
    layers: int = 2
    heads: int = 4
    sequence_length: int = 128
    batch_size: int = 2


def spawn(ranks: int, function: Callable[[GPT], None], options: GPT) -> None:
    """Call `function(options)` on `ranks` processes; an error on one of them is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank_main, (ranks, folder, function, options), nprocs=ranks)


def _rank_main(rank: int, ranks: int, folder: str, function: Callable[[GPT], None], options: GPT) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", ranks)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, device_id=device)
    model_parallel(options)
    function(options)
    dist.destroy_process_group()


def model_parallel(options: GPT) -> None:
    """Megatron's parallel state and random state as `options` ask for, instead of what was there."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        options.tensor_parallel, context_parallel_size=options.context_parallel
    )
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0, force_reset_rng=True)


def build(options: GPT) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden_size,
        num_attention_heads=options.heads,
        tensor_model_parallel_size=options.tensor_parallel,
        context_parallel_size=options.context_parallel,
        cp_comm_type=options.context_communication,
        sequence_parallel=options.sequence_parallel,
        params_dtype=options.dtype,
        pipeline_dtype=options.dtype,
        bf16=options.dtype == torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
    )
    spec = (
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
        if options.transformer_engine
        else gpt_layer_specs.get_gpt_layer_local_spec()
    )
    return GPTModel(
        config,
        spec,
        vocab_size=options.vocab_size,
        max_sequence_length=options.sequence_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=options.tied,
    ).to("cuda", options.dtype)  # all of it, as Float16Module does


def make_text(options: GPT) -> Tensor:
    """[b, s + 1] tokens, the same on every rank."""
    shape = (options.batch_size, options.sequence_length + 1)
    return torch.randint(options.vocab_size, shape, generator=torch.Generator().manual_seed(1)).cuda()


def causal_mask(length: int) -> Tensor:
    """[1, 1, s, s], True where attention is forbidden."""
    return torch.ones(1, 1, length, length, dtype=torch.bool, device="cuda").triu(diagonal=1)

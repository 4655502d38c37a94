"""A small Hugging Face Llama: the model, its data parallelism three ways, its optimizer, its checkpoint."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from corpus import END_OF_TEXT, END_OF_TEXT_ID, Corpus
from launch import World
from tokenizers import Tokenizer
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mcore_entropy.adapters.fsdp import wrap_fsdp1, wrap_fsdp2


def llama_config(args: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_attention_heads,
        num_key_value_heads=args.num_key_value_heads,
        tie_word_embeddings=not args.untie_embeddings_and_output_weights,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        use_cache=False,  # while it trains
    )


def build_model(args: argparse.Namespace, world: World) -> LlamaForCausalLM:
    """The whole model on every rank, the same weights: small enough. FSDP then keeps a rank's share of it."""
    torch.manual_seed(args.seed)
    return LlamaForCausalLM(llama_config(args)).to(world.device)


def wrap(model: LlamaForCausalLM, args: argparse.Namespace) -> nn.Module:
    """Data parallelism over all ranks. With --bf16 FSDP gathers weights in bf16, adds gradients in fp32."""
    half, full = torch.bfloat16, torch.float32
    if args.parallel == "fsdp2":
        return wrap_fsdp2(
            model, mp_policy=MixedPrecisionPolicy(param_dtype=half, reduce_dtype=full) if args.bf16 else None
        )
    if args.parallel == "fsdp1":
        return wrap_fsdp1(
            model, mixed_precision=MixedPrecision(param_dtype=half, reduce_dtype=full) if args.bf16 else None
        )
    return DistributedDataParallel(model)


def precision(args: argparse.Namespace, world: World) -> AbstractContextManager[Any]:
    """Around each call of the model: DDP has no precision of its own."""
    if args.bf16 and args.parallel == "ddp":
        return torch.autocast(world.device.type, torch.bfloat16)
    return nullcontext()


@contextmanager
def gradient_accumulation(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Around a micro-batch's forward and backward: gradients go over the ranks with the last one alone."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        yield
    else:
        with nullcontext() if last else model.no_sync():
            yield


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Returns the norm over all parameters, of all ranks, before it is clipped."""
    if isinstance(model, FullyShardedDataParallel):  # its parameters are a rank's shards, and plain tensors
        return model.clip_grad_norm_(max_norm).item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def build_optimizer(
    args: argparse.Namespace, model: nn.Module
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW on the wrapped model's parameters, and a learning rate that warms up and decays as a cosine."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay
    )
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_lr(args))


def share_of_lr(args: argparse.Namespace) -> Callable[[int], float]:
    """The learning rate of iteration `done + 1` as a share of --lr: --min-lr's in the last one."""
    warmup = min(args.lr_warmup_iters, args.train_iters - 1)
    least = args.min_lr / args.lr

    def share(done: int) -> float:
        iteration = min(done + 1, args.train_iters)
        if iteration <= warmup:
            return iteration / warmup
        progress = (iteration - warmup) / (args.train_iters - warmup)
        return least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2

    return share


def save_checkpoint(model: nn.Module, text: Corpus, world: World, args: argparse.Namespace) -> Path:
    """SAVE/checkpoint/ as transformers writes it; whole weights in fp32, whatever wraps the model."""
    folder: Path = args.save / "checkpoint"
    # On all ranks, as they gather. From a GPU the weights go to the CPU one by one, of rank 0 alone. Those of
    # FSDP1 that lie on the CPU are lost by being sent there: github.com/pytorch/pytorch/issues/188989
    options = StateDictOptions(full_state_dict=True, cpu_offload=world.device.type != "cpu")
    state = get_model_state_dict(model, options=options)
    if world.rank == 0:
        transformers.utils.logging.disable_progress_bar()
        with torch.device("meta"):  # no memory: the gathered weights are put in place of its own
            plain = LlamaForCausalLM(llama_config(args))
        plain.load_state_dict(state, assign=True)
        plain.tie_weights()
        plain.save_pretrained(folder)
        tokenizer = Tokenizer.from_str(text.tokenizer_json)
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT
        ).save_pretrained(folder)
    world.meet()
    return folder

"""`swap_lm_head`: an entropy-aware head in the place of a Hugging Face causal LM's, and back.

b batch, s sequence.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from mcore_entropy.adapters.architectures import (
    known_architectures,
    register_architecture,
    transform_of_model,
)
from mcore_entropy.adapters.causal_lm import SwappedCausalLM, check_loss_function
from mcore_entropy.adapters.foreign_parallelism import foreign_parallelism
from mcore_entropy.adapters.lm_head import EntropyAwareLMHead
from mcore_entropy.config import EntropyConfig
from mcore_entropy.swap_handle import SWAP, SwapHandle, check_same_config

__all__ = ["known_architectures", "register_architecture", "swap_lm_head"]


def swap_lm_head(model: nn.Module, config: EntropyConfig) -> SwapHandle:
    """Make the head of a Hugging Face causal LM entropy-aware, in place, before anything wraps the model.

    Called without labels, the swapped model does what it did, `generate` included. Called with labels [b, s]
    it never has logits: the result is the model's own output class with

    - ``loss``: the model's own (mean over the labels that count, or their sum over ``num_items_in_batch``; a
      router's auxiliary loss is added), less ``config.entropy_coeff`` times the entropy's mean over the same
      tokens; fp32,
    - ``logits``: None,
    - ``log_probs`` [b, s], ``entropy`` [b, s] (None with ``entropy=False``) and the config's metrics, fp32,
      exact in value and gradient. Labels are shifted as the model's loss does it: position t holds the
      log-prob of label t + 1 and the entropy of the distribution it was drawn from; the last position's
      log-prob is 0. Entropy is there where a label is ignored, too: a mask of a request leaves it out. With
      ``shift_labels`` nothing is shifted. With ``logits_to_keep`` they are those of the
      positions kept.

    A request's mask and temperature are in the places of the labels and shifted with them. Who takes the
    labels out of the call (Trainer with ``label_smoothing_factor`` or ``compute_loss_func``) gets logits, and
    no entropy bonus.

    Parameters, their names, checkpoints, ties and `save_pretrained` do not change. A copy of a swapped model
    is a swapped model of its own; swap it again, with an equal config, for its handle.

    Args:
        model: a causal LM of transformers, of a known architecture, or PEFT's wrapper of one. FSDP, DDP,
            accelerate and torch.compile come after the swap.
        config: how to compute the statistics. The transform is the architecture's.

    Returns:
        A handle to pass per-micro-batch requests through and to undo the swap.

    Raises:
        ValueError: the model, its head or the config is of a kind that cannot be swapped, by name; nothing
            changes then.
    """
    if not isinstance(config, EntropyConfig):
        raise ValueError(f"config: expected an EntropyConfig, got {config!r}")
    causal_lm = _causal_lm(model)
    if SWAP in vars(causal_lm):
        swapped = SwappedCausalLM(causal_lm)
        if swapped.head_was_replaced:
            swapped.restore()
        else:
            check_same_config(swapped, config)
    if SWAP not in vars(causal_lm):
        _check_config(config)
        _check_not_wrapped(causal_lm)
        head_name = _head_name(causal_lm)
        check_loss_function(causal_lm)
        head_class = _head_class(causal_lm.get_submodule(head_name))
        transform = transform_of_model(causal_lm, head_name)
        swapped = SwappedCausalLM.swapped(causal_lm, head_name, head_class, transform, config)
    return SwapHandle(config, [swapped])


def _causal_lm(model: Any) -> Any:
    """The causal LM itself, out of PEFT's wrapper."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    for name in ("_fsdp_wrapped_module", "_orig_mod", "module"):
        if isinstance(model, nn.Module) and isinstance(model._modules.get(name), nn.Module):
            raise ValueError(
                f"model: expected one that nothing wraps yet, got a {type(model).__name__}; swap the head "
                "first, and wrap the model then"
            )
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model: expected a causal LM of transformers, got a {type(model).__name__}")
    return model


def _check_config(config: EntropyConfig) -> None:
    if config.transform is not None:
        raise ValueError(
            f"transform: expected None, as the architecture says what it does to its logits, got "
            f"{config.transform}; register_architecture tells another"
        )
    if config.head != "fused":
        raise ValueError(
            f"head: expected 'fused', got {config.head!r}; without labels the model gives logits"
        )
    if config.log_interval != 1:
        raise ValueError(f"log_interval: expected 1, as nothing is logged here, got {config.log_interval}")


def _check_not_wrapped(model: Any) -> None:
    if hasattr(model, "_get_fsdp_state"):
        raise ValueError(
            "model: expected one that is not sharded yet, got one that fully_shard was applied to; swap first"
        )
    if "forward" in vars(model):
        raise ValueError(
            "model: expected its class's own forward, got one that something has put on the instance "
            "(accelerate, a device_map); swap first"
        )


def _head_name(model: Any) -> str:
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head:
            return str(name)
    raise ValueError(f"model: expected {type(model).__name__} to have an output embedding, got {head!r}")


def _head_class(head: Any) -> type[nn.Module]:
    """The class that a head of this kind is swapped for."""
    parallelism = foreign_parallelism(head)
    if parallelism is not None:
        raise ValueError(
            "head: expected one whose results nothing brings into another layout, got one under "
            f"{parallelism}; leave the head out of the plan, swap it, and shard it with "
            "mcore_entropy.adapters.dtensor.parallelize_lm_head"
        )
    if "forward" in vars(head) or hasattr(head, "_hf_hook"):
        raise ValueError(
            "head: expected its class's own forward, got one that something has put on the instance (a "
            "device_map, offloading); swap first"
        )
    lora = sys.modules.get("peft.tuners.lora")  # without it no head can be one of PEFT's
    with_lora = lora is not None and type(head) is lora.Linear
    linear = head.base_layer if with_lora else head
    if type(linear) not in (nn.Linear, EntropyAwareLMHead):  # ours, if LoRA came after a swap
        raise ValueError(
            "head: expected exactly a torch.nn.Linear, or PEFT's LoRA around one, got "
            f"{type(linear).__module__}.{type(linear).__qualname__}, whose forward does something else"
        )
    if type(linear.weight) is not nn.Parameter:
        raise ValueError(
            f"head: expected a weight that is a plain parameter, got a {type(linear.weight).__name__}; swap "
            "the head first, and shard it then"
        )
    if with_lora:
        from mcore_entropy.adapters.lora_head import EntropyAwareLoraHead

        return EntropyAwareLoraHead
    return EntropyAwareLMHead

"""`swap_output_layer`: an `EntropyAwareOutputLayer` in the place of a model's output layer, and back."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from torch import nn

from mcore_entropy.config import EntropyConfig
from mcore_entropy.megatron.arguments import config_from_args
from mcore_entropy.megatron.supported import check_model
from mcore_entropy.megatron.swapped_head import SwappedHead
from mcore_entropy.swap_handle import SWAP, SwapHandle, check_same_config

# Arguments of Megatron-LM under which its own hooks or losses read the output layer's logits.
_TAKE_LOGITS = ("logits_save_dir", "logits_load_dir", "modelopt_enabled")


def swap_output_layer(model_or_chunks: nn.Module | Sequence[nn.Module], config: EntropyConfig) -> SwapHandle:
    """Make the output layer of a GPTModel or HybridModel an `EntropyAwareOutputLayer`, in place.

    Called with labels, the model then gives `TokenStatistics` in [b, s] instead of a loss (MTP losses stay
    what they were); without labels it gives the stock head's logits. Parameters, their names, checkpoints and
    tied weights do not change. Swapping again with an equal config changes nothing.

    Args:
        model_or_chunks: a GPTModel, HybridModel or MambaModel, wrapped (Float16Module,
            DistributedDataParallel) or not, or a list of model chunks. A pipeline stage without a head is
            left alone.
        config: how to compute the statistics.

    Returns:
        A handle to pass per-micro-batch requests through and to undo the swap.

    Raises:
        ValueError: the model or its head is of a kind that cannot be swapped, by name; nothing changes then.
    """
    if not isinstance(config, EntropyConfig):
        raise ValueError(f"config: expected an EntropyConfig, got {config!r}")
    chunks = [model_or_chunks] if isinstance(model_or_chunks, nn.Module) else list(model_or_chunks)
    models = [model for chunk in chunks if (model := _model_with_head(chunk)) is not None]
    swapped = [getattr(model, SWAP, None) for model in models]
    for model, head in zip(models, swapped, strict=True):
        _check_model(model, head, config)
    return SwapHandle(
        config, [head or SwappedHead(model, config) for model, head in zip(models, swapped, strict=True)]
    )


def swap_from_args(
    model_or_chunks: nn.Module | list[nn.Module], args: argparse.Namespace
) -> nn.Module | list[nn.Module]:
    """`swap_output_layer` if the arguments of `add_entropy_args` ask for it; gives the model or chunks back.

    Raises:
        ValueError: see `swap_output_layer` and `config_from_args`; or `args` also ask Megatron-LM for
            something that takes the head's logits.
    """
    config = config_from_args(args)
    if config is not None:
        for name in _TAKE_LOGITS:
            if getattr(args, name, None):
                raise ValueError(
                    f"{name}: expected it off, got {getattr(args, name)!r}; distillation takes the logits of "
                    "the output layer, and with the entropy-aware one there are none"
                )
        swap_output_layer(model_or_chunks, config)
    return model_or_chunks


def _model_with_head(chunk: Any) -> Any | None:
    """The model inside its wrappers; None on a stage without a head."""
    while not hasattr(chunk, "post_process") and isinstance(getattr(chunk, "module", None), nn.Module):
        chunk = chunk.module
    if not hasattr(chunk, "post_process"):
        raise ValueError(
            f"model: expected a Megatron GPTModel or a wrapper of one, got {type(chunk).__name__}"
        )
    return chunk if chunk.post_process else None


def _check_model(model: Any, head: SwappedHead | None, config: EntropyConfig) -> None:
    if head is None:
        check_model(model, config)
    else:
        check_same_config(head, config)

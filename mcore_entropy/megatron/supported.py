"""What a swap and a call with labels refuse, by name: where the stock head would have done something else.

No refusal is needed for what has no meaning here. `cross_entropy_loss_fusion`, its `fusion_impl`,
`fp16_lm_cross_entropy` and a GPTModel's `logit_dtype` choose how logits become a loss; statistics are
computed in fp32 whatever they say. `parallel_output` and `runtime_gather_output` gather logits; statistics
are over the whole vocabulary either way. Recomputation, offloading and per-layer CUDA graphs leave the head
out in Megatron itself.
"""

from __future__ import annotations

from typing import Any

from mcore_entropy.config import EntropyConfig
from mcore_entropy.megatron.mindspeed import check_import_order  # before Megatron: it looks who came first

try:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear as ColumnParallelLinear
except ImportError as error:
    raise ImportError(
        "mcore_entropy's output layer needs Megatron-core: pip install megatron-core psutil"
    ) from error

# What our layer derives from. MindSpeed rebinds the name above, as in every module, but nothing in a tuple.
_DERIVED_FROM = (ColumnParallelLinear,)


def check_switches(layer: ColumnParallelLinear) -> None:
    """Raise ValueError, naming it, for a switch of the layer or its config that statistics cannot honour."""
    if layer.config.defer_embedding_wgrad_compute:
        raise ValueError(
            "defer_embedding_wgrad_compute: expected False, got True; it keeps the whole gradient of the "
            "logits, which this layer never has"
        )
    if layer.is_expert or layer.disable_grad_reduce:
        raise ValueError(
            "output_layer: expected the model's head, got an expert's layer or one with disable_grad_reduce, "
            "whose hidden gradient must not be reduced"
        )
    remat_size = getattr(layer, "gtp_remat_size", 1)  # from megatron-core 0.19 on
    if remat_size > 1:
        raise ValueError(
            f"gtp_weight_remat_size: expected 1, got {remat_size}; the layer holds only a part of its "
            "columns then, and gathers them in a product that this layer does not run"
        )


def check_head(layer: Any) -> None:
    """Raise ValueError, naming the reason, for an output layer whose job ours cannot do."""
    if ColumnParallelLinear is not _DERIVED_FROM[0]:
        raise ValueError(
            "output_layer: expected the ColumnParallelLinear that our layer derives from, got a class that "
            "has replaced it in Megatron since; what replaces it (MindSpeed's adaptor or its repatch) has to "
            "run before mcore_entropy.megatron is imported"
        )
    if type(layer) is not ColumnParallelLinear:
        raise ValueError(
            f"output_layer: expected Megatron's ColumnParallelLinear, got {type(layer).__module__}."
            f"{type(layer).__qualname__}; a head that was replaced or wrapped (LoRA, mxfp8) would be bypassed"
        )
    if "forward" in vars(layer):
        raise ValueError(
            "output_layer: expected ColumnParallelLinear's own forward, got one that something else has put "
            "in its place and that would be bypassed"
        )
    check_switches(layer)


def name_of_head_caller(model: Any) -> str:
    """The method that is given labels and calls the output layer."""
    if hasattr(model, "_postprocess"):
        return "_postprocess"
    # HybridModel, and MambaModel before 0.18, end their forward with it. By name: neither is in every
    # version, and other kinds of model have a forward that takes labels too.
    if {"HybridModel", "MambaModel"} & {kind.__name__ for kind in type(model).__mro__}:
        return "forward"
    raise ValueError(
        "model: expected a GPTModel of megatron-core 0.13 or newer, a HybridModel or a MambaModel, got a "
        f"{type(model).__name__} without _postprocess"
    )


def check_model(model: Any, config: EntropyConfig) -> None:
    """Raise ValueError, naming the reason, for a model that cannot be swapped with this config."""
    check_import_order()
    for method in (name_of_head_caller(model), "compute_language_model_loss", "_scale_logits"):
        if method in vars(model):
            raise ValueError(
                f"model: expected {type(model).__name__}'s own {method}, got one that something else has put "
                "in its place"
            )
    check_head(getattr(model, "output_layer", None))
    if getattr(model.config, "use_mup", False) and not model.config.mup_output_mult > 0:
        raise ValueError(
            f"mup_output_mult: expected a positive number, got {model.config.mup_output_mult}; it scales the "
            "logits that statistics are of"
        )
    if getattr(model.config, "overlap_moe_expert_parallel_comm", False):
        raise ValueError(
            "overlap_moe_expert_parallel_comm: expected False, got True; its schedule takes one tensor from "
            "the model and its gradient back, and statistics are more than one"
        )
    if _captures_whole_iterations(model.config) and config.execution.compact_rows:
        raise ValueError(
            "compact_rows: expected False with a CUDA graph of the full iteration, got True; finding the "
            "rows that cost nothing waits for the GPU, which a capture forbids"
        )


def _captures_whole_iterations(model_config: Any) -> bool:
    if getattr(model_config, "cuda_graph_impl", "none") == "full_iteration":  # from megatron-core 0.18 on
        return True
    scope = getattr(model_config, "cuda_graph_scope", None)
    scopes = scope if isinstance(scope, list) else [scope]
    return any(getattr(one, "name", one) == "full_iteration" for one in scopes)


def check_call(model: Any, inference_context: Any) -> None:
    """Raise ValueError for labels where only the last token of each request would reach the head.

    And if MindSpeed came after the swap.
    """
    check_import_order()
    keeps_last = any(
        getattr(owner, "materialize_only_last_token_logits", False)
        for owner in (inference_context, getattr(inference_context, "config", None))
    )
    if keeps_last and _in_inference_mode(model):
        raise ValueError(
            "labels: expected none in inference mode with materialize_only_last_token_logits, which keeps "
            "only the last token's hidden state of each request"
        )


def _in_inference_mode(model: Any) -> bool:
    """As GPTModel decides it where it has an inference context."""
    try:
        from megatron.core.inference.utils import InferenceMode
    except ImportError:  # before megatron-core 0.18
        return not model.training
    return bool(InferenceMode.is_active())

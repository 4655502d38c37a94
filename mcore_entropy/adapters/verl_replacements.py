"""Which names of verl are replaced, and by what of ours: the table that `verl_switch` goes by."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

VERSIONS = ("0.9.0", "0.9.1")  # whose call sites were read, and run in tests


@dataclass(frozen=True)
class Replacement:
    """One name of verl.

    Attributes:
        module: the module that defines it, or uses it under its own name.
        name: of a function or class there, or "Class.method".
        ours: where ours is, "module:name".
        made_from_stock: whether ours is a function that takes stock's and returns what replaces it.
    """

    module: str
    name: str
    ours: str
    made_from_stock: bool = False

    def made(self, stock: Any) -> Any:
        module, name = self.ours.split(":")
        found = getattr(importlib.import_module(f"mcore_entropy.adapters.{module}"), name)
        return found(stock) if self.made_from_stock else found


_FUSED = "verl.models.mcore.model_forward_fused"
_MEGATRON = "verl.workers.engine.megatron.transformer_impl"
_FSDP = "verl.workers.engine.fsdp.transformer_impl"
_SHARDED = "verl.utils.megatron.tensor_parallel"
_WHOLE = "verl.utils.torch_functional"
# Names that one module alone uses in another sense than the rest of verl, and that other modules keep.
LOCAL = (
    Replacement(_FUSED, "gather_from_sequence_parallel_region", "verl_megatron:gathered_by_the_head"),
    Replacement(_FUSED, "linear_cross_entropy", "verl_megatron:gathering_linear_cross_entropy"),
)
_EVERYWHERE = (
    Replacement(_FUSED, "fused_output_processor", "verl_megatron:fused_output_processor"),
    Replacement(_FUSED, "fused_forward_model_engine", "verl_megatron:fused_forward_model_engine_on", True),
    Replacement(_MEGATRON, "_resolve_fused_temperature", "verl_megatron:resolve_fused_temperature_on", True),
    Replacement(
        _MEGATRON,
        "MegatronEngineWithLMHead._lm_head_logits_processor",
        "verl_megatron:lm_head_logits_processor_on",
        True,
    ),
    Replacement(_MEGATRON, "MegatronEngineWithLMHead.forward_step", "verl_megatron:forward_step_on", True),
    Replacement(_SHARDED, "vocab_parallel_entropy", "verl:vocab_parallel_entropy"),
    Replacement(
        _SHARDED, "vocab_parallel_entropy_with_chunking", "verl:vocab_parallel_entropy_with_chunking"
    ),
    Replacement(
        _SHARDED, "vocab_parallel_log_probs_from_logits", "verl:vocab_parallel_log_probs_from_logits"
    ),
    Replacement(_SHARDED, "vocab_parallel_sum_pi_squared", "verl:vocab_parallel_sum_pi_squared"),
    Replacement(
        "verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy", "verl_fsdp:linear_cross_entropy"
    ),
    Replacement(
        "verl.utils.experimental.torch_functional", "FusedLinearForPPO", "verl_fsdp:FusedLinearForPPO"
    ),
    Replacement(_WHOLE, "entropy_from_logits", "verl:entropy_from_logits"),
    Replacement(_WHOLE, "entropy_from_logits_with_chunking", "verl:entropy_from_logits_with_chunking"),
    Replacement(_WHOLE, "logprobs_from_logits", "verl:logprobs_from_logits"),
    Replacement(_WHOLE, "calculate_sum_pi_squared_from_logits", "verl_fsdp:sum_pi_squared_of_logits"),
    Replacement(
        _FSDP, "FSDPEngineWithLMHead.prepare_model_inputs", "verl_fsdp:prepare_model_inputs_on", True
    ),
    Replacement(
        _FSDP, "FSDPEngineWithLMHead.prepare_model_outputs", "verl_fsdp:prepare_model_outputs_on", True
    ),
)
# What computes the same and stays verl's, or another library's.
LEFT = (
    "verl.workers.engine.veomni: fused kernels are VeOmni's own",
    "verl.workers.engine.automodel: fused kernels are NeMo Automodel's own",
    "verl.models.mcore.model_forward_1f1b_overlap: calls linear_cross_entropy after a gather of its own, and "
    "leaves the hidden gradient partial without sequence parallelism; no engine calls it",
)
REPLACEMENTS = LOCAL + _EVERYWHERE  # the local ones first: they hide what the others would find there

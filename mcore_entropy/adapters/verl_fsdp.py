"""verl's FSDP engine on our head: its two fused heads, and what its engine refuses together with them.

n packed tokens of this rank, H hidden size, V vocabulary. Replacements that need the function they replace
are made from it by a function named `..._on`. `verl_switch` says where each one goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_entropy.adapters import verl
from mcore_entropy.adapters.verl_request import Asked, HeadRequest, at_least_smallest, request_of, with_flags
from mcore_entropy.functional.linear import fused_head
from mcore_entropy.functional.linear_passes import LinearOptions
from mcore_entropy.functional.problem import Keywords
from mcore_entropy.parallel import TensorParallelGroup

_REQUEST = "mcore_entropy_request"  # its key among the engine's output_args
_BACKENDS = ("torch", "liger")
_FORWARDS = ("forward_with_torch_backend", "forward_with_triton_backend")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor | HeadRequest = 1.0,
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`adapters.verl.linear_cross_entropy`, which answers a `HeadRequest` too, with reduction "none"."""
    if not isinstance(temperature, HeadRequest):
        return verl.linear_cross_entropy(hidden, weight, labels, temperature, reduction, dist_process_group)
    if reduction != "none":
        raise ValueError(f"reduction: expected 'none', as verl's models call it, got {reduction!r}")
    asked = temperature.asked
    statistics = temperature.answered_by(
        verl.linear_cross_entropy_statistics(
            hidden,
            weight,
            labels,
            asked.temperature,
            dist_process_group,
            calculate_entropy=asked.entropy,
            calculate_sum_pi_squared=asked.sum_pi_squared,
        )
    )
    return statistics.log_probs, statistics.entropy


class FusedLinearForPPO(torch.nn.Module):
    """verl's module of this name, for a vocabulary that is not sharded.

    Args:
        chunk_size: tokens of one pass; None leaves it to the head, whose memory is bounded either way.
        impl_backend: "torch" or "liger", verl's two ways to compute this. Neither is needed here: the
            device of the tensors decides.

    Raises:
        ValueError: another backend.
    """

    def __init__(self, chunk_size: int | None = None, impl_backend: str = "torch") -> None:
        super().__init__()
        if impl_backend not in _BACKENDS:
            raise ValueError(f"impl_backend: expected one of {_BACKENDS}, got {impl_backend!r}")
        self.chunk_size = chunk_size
        self.impl_backend = impl_backend

    def forward(
        self,
        hidden_states: Tensor,
        vocab_weights: Tensor,
        input_ids: Tensor,
        temperature: float | Tensor | HeadRequest = 1.0,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probability of each label and entropy, both in the labels' shape and in fp32.

        Args:
            hidden_states: [*, H].
            vocab_weights: [V, H].
            input_ids: the labels, [*].
            temperature: a number, one per token in a shape that expands to the labels', or a request.

        Gradients and what is saved for backward: see `linear_log_probs_and_entropy`.
        """
        request = request_of(temperature)
        at = request.asked.temperature
        if isinstance(at, Tensor):
            at = at.expand(input_ids.shape)
        keywords = Keywords(
            target=input_ids, temperature=at, chunk_size=self.chunk_size, wanted=request.asked.wanted
        )
        options = LinearOptions(tp_group=TensorParallelGroup.single_rank())
        statistics = request.answered_by(fused_head(hidden_states, vocab_weights, None, options, keywords))
        return statistics.log_probs, statistics.entropy


def sum_pi_squared_of_logits(logits: Tensor) -> Tensor:
    """Sum of p squared of each token's distribution, [*], fp32 (fp64 for fp64 logits); detached.

    Args:
        logits: [*, V]: the whole vocabulary, whatever groups Megatron has. Never changed.

    Raises:
        ValueError: an argument does not fit.
    """
    return verl.sum_pi_squared_over(TensorParallelGroup.single_rank(), logits)


def prepare_model_inputs_on(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`FSDPEngineWithLMHead.prepare_model_inputs` with a temperature for each sample under fused kernels.

    Stock refuses those. Here it prepares the micro-batch as without fused kernels, and so packs, pads and
    slices the temperatures, which go to the head in a `HeadRequest`.
    """

    def prepare_model_inputs(self: Any, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        from verl.utils import tensordict_utils as tu

        fused = tu.get_non_tensor_data(micro_batch, "use_fused_kernels", False)
        if not (fused and _calls_our_head(self.module)):
            inputs: tuple[dict[str, Any], dict[str, Any]] = stock(self, micro_batch)
            return inputs
        model_inputs, output_args = stock(self, with_flags(micro_batch, use_fused_kernels=False))
        temperature = micro_batch["temperature"]
        if not isinstance(temperature, Tensor):
            at: float | Tensor = float(temperature)
        elif "temperature_rmpad" in output_args:
            at = output_args["temperature_rmpad"].unsqueeze(0)  # [1, n], as the model's input_ids
        else:
            at = output_args["temperature"].unsqueeze(-1).expand(model_inputs["input_ids"].shape)
        request = HeadRequest(
            Asked(
                at_least_smallest(at),
                entropy=tu.get_non_tensor_data(micro_batch, "calculate_entropy", False),
                sum_pi_squared=tu.get_non_tensor_data(micro_batch, "calculate_sum_pi_squared", False),
            )
        )
        model_inputs.update(temperature=request, return_dict=True)
        if "temperature_rmpad" in output_args:
            # Rolled over the whole packed sequence: a roll of this rank's slice would be wrong at its ends.
            model_inputs["shift_labels"] = output_args["input_ids_rmpad_rolled"].unsqueeze(0)
        output_args[_REQUEST] = request
        return model_inputs, output_args

    return prepare_model_inputs


def prepare_model_outputs_on(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`FSDPEngineWithLMHead.prepare_model_outputs` with the sum of p squared under fused kernels.

    Stock refuses that. Here it unpacks log-probs and entropy, and the sums are unpacked beside them.
    """

    def prepare_model_outputs(
        self: Any, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Any]:
        request = output_args.get(_REQUEST)
        if request is None:
            outputs: dict[str, Any] = stock(self, output, output_args, micro_batch, logits_processor_func)
            return outputs
        packed = "pad_size" in output_args
        if not packed:  # padded [b, s]: linear_cross_entropy's results, [N], get their shape back
            rows = micro_batch["input_ids"].shape[0]
            output.log_probs = output.log_probs.view(rows, -1)
            if output.entropy is not None:
                output.entropy = output.entropy.view(rows, -1)
        unasked = with_flags(micro_batch, calculate_sum_pi_squared=False)
        outputs = stock(self, output, output_args, unasked, logits_processor_func)
        if request.asked.sum_pi_squared:
            offsets = micro_batch["input_ids"].offsets()
            values = request.taken_sum_pi_squared()
            if packed:
                values = self._gather_and_unpad_packed(values.reshape(-1), output_args["pad_size"])
            else:
                values = values.view(output.log_probs.shape)
                places = torch.arange(values.shape[1], device=values.device)
                values = values[places < offsets.diff().unsqueeze(1)]
            outputs["sum_pi_squared"] = torch.nested.nested_tensor_from_jagged(values, offsets)
        return outputs

    return prepare_model_outputs


def _calls_our_head(module: torch.nn.Module) -> bool:
    """Whether the model in its wrappers has the forward of verl that calls one of the two fused heads.

    VeOmni's engine, which inherits these methods, has not: its models bring their own fused head.
    """
    forwards = (type(part).forward for part in module.modules())
    return any(
        getattr(forward, "__name__", "") in _FORWARDS
        and forward.__module__.startswith("verl.models.transformers.")
        for forward in forwards
    )

"""verl's Megatron engine on our head: gather and head in one, and what its engine refuses together with it.

s packed tokens of this context-parallel rank, H hidden size, V vocabulary. Replacements that need the
function they replace are made from it by a function named `..._on`. `verl_switch` says where each one goes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_entropy.adapters.verl_request import Asked, HeadRequest, at_least_smallest, request_of, with_flags
from mcore_entropy.functional.linear import fused_head
from mcore_entropy.functional.linear_passes import LinearOptions
from mcore_entropy.functional.logits import vocab_parallel_log_probs_and_entropy
from mcore_entropy.functional.problem import Keywords
from mcore_entropy.statistics import TokenStatistics

# Between the engine's step, which knows, and the head's call inside it, whose arguments have no place for it.
_SUM_PI_SQUARED: ContextVar[bool] = ContextVar("calculate_sum_pi_squared", default=False)


def fused_output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    labels: Tensor,
    context: Any,
    config: Any,
    **_: Any,
) -> Any:
    """verl's output processor of Megatron-core 0.18 and newer: gather and head in one.

    Args:
        hidden_states: [s, b, H], or this rank's part of s under sequence parallelism.
        labels: [b, s].
        context: has the temperature or request.

    Returns:
        verl's CausalLMOutputForPPO with log_probs and entropy [b·s] in the labels' order, entropy None where
        it is not asked for.
    """
    from megatron.core import parallel_state
    from verl.utils.model import CausalLMOutputForPPO

    from mcore_entropy.megatron.output_layer import after_mup

    options = LinearOptions(
        transform=after_mup(config, None),
        sequence_parallel=config.sequence_parallel,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
    weight = output_layer.weight if output_weight is None else output_weight
    statistics = _answer(
        hidden_states, weight, output_layer.bias, labels, request_of(context.temperature), options
    )
    return CausalLMOutputForPPO(
        hidden_states=hidden_states, log_probs=statistics.log_probs, entropy=statistics.entropy
    )


def gathered_by_the_head(hidden_states: Tensor) -> Tensor:
    """In the place of Megatron's gather before `gathering_linear_cross_entropy`: there is none left to do."""
    return hidden_states


def gathering_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor | HeadRequest,
    reduction: str,
    dist_process_group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor | None]:
    """verl's `linear_cross_entropy` in its forward for Megatron-core before 0.18, with the gather before it.

    hidden's gradient is complete, without sequence parallelism and with it (that of this rank's part).

    Args:
        hidden: [s, b, H], or [s/tp, b, H] under sequence parallelism, which the labels' number tells.
        labels: [b, s].
        reduction: "none", as that forward calls it.

    Returns:
        log_probs and entropy, [b·s] in the labels' order.

    Raises:
        ValueError: an argument does not fit.
    """
    if reduction != "none":
        raise ValueError(f"reduction: expected 'none', as verl's forward calls it, got {reduction!r}")
    options = LinearOptions(
        sequence_parallel=hidden.shape[:-1].numel() < labels.numel(), tp_group=dist_process_group
    )
    statistics = _answer(hidden, weight, None, labels, request_of(temperature), options)
    return statistics.log_probs, statistics.entropy


def _answer(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    request: HeadRequest,
    options: LinearOptions,
) -> TokenStatistics:
    """Statistics of [b, s] labels, flat in their order; the head works in [s, b]."""
    at = request.asked.temperature
    keywords = Keywords(
        target=labels.transpose(0, 1),
        temperature=at.transpose(0, 1) if isinstance(at, Tensor) else at,
        wanted=request.asked.wanted,
    )
    found = fused_head(hidden, weight, bias, options, keywords)

    def flat(values: Tensor) -> Tensor:
        return values.transpose(0, 1).reshape(-1)

    return request.answered_by(
        TokenStatistics(
            flat(found.log_probs),
            None if found.entropy is None else flat(found.entropy),
            {name: flat(values) for name, values in found.metrics.items()},
        )
    )


def resolve_fused_temperature_on(stock: Callable[..., float]) -> Callable[..., float | Tensor]:
    """The engine's `_resolve_fused_temperature`, which refuses samples of different temperatures.

    One for each sample stays a tensor, and is packed by `fused_forward_model_engine_on`. Nothing waits for
    the device to find out whether they differ.
    """

    def resolve_fused_temperature(temperature: float | Tensor) -> float | Tensor:
        if isinstance(temperature, Tensor) and temperature.dim() == 1:
            return temperature
        return stock(temperature)

    return resolve_fused_temperature


def fused_forward_model_engine_on(stock: Callable[..., Any]) -> Callable[..., Any]:
    """verl's `fused_forward_model_engine`, whose forward passes on what the micro-batch needs.

    A temperature for each sample, no entropy where none is asked for, the sum of p squared. It raises
    ValueError for an output layer that is not Megatron's own, such as one with LoRA, which would be bypassed,
    and for MuP's factor where verl's forward for Megatron-core before 0.18 leaves it out.
    """

    def fused_forward_model_engine(vision_model: bool = False) -> Callable[..., Any]:
        forward = stock(vision_model)
        signature = inspect.signature(forward)

        def with_request(*args: Any, **kwargs: Any) -> Any:
            from verl.models.mcore.util import postprocess_thd_engine

            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            _check_head_of(given["model"])
            temperature, sum_pi_squared = given["temperature"], _SUM_PI_SQUARED.get()
            input_ids = given["input_ids"]
            if isinstance(temperature, Tensor) or sum_pi_squared:
                each = torch.as_tensor(temperature, dtype=torch.float32, device=input_ids.device)
                packed, packed_seq_params = _packed(each.expand(input_ids.shape[0]), given)
                temperature = packed if isinstance(temperature, Tensor) else temperature
            request = HeadRequest(
                Asked(at_least_smallest(temperature), given["calculate_entropy"], sum_pi_squared)
            )
            given["temperature"] = request
            output = forward(*bound.args, **bound.kwargs)
            if sum_pi_squared and isinstance(output, dict):  # the last pipeline stage's
                output["sum_pi_squared"] = postprocess_thd_engine(
                    request.taken_sum_pi_squared().unsqueeze(0),
                    packed_seq_params,
                    input_ids,
                    input_ids.shape[0],
                    local_cp_size=given["local_cp_size"],
                    cp_layout=given["cp_layout"],
                )
            return output

        return with_request

    return fused_forward_model_engine


def _check_head_of(model: Any) -> None:
    from verl.models.mcore import model_forward_fused

    from mcore_entropy.megatron.supported import check_head

    core = model_forward_fused._get_patching_model(model)
    if core is None or not core.post_process:  # none that verl's forward fits; a stage without a head
        return
    check_head(core.output_layer)
    hook = model_forward_fused._use_output_processor_hook(model)
    if getattr(core.config, "use_mup", False) and not hook:
        raise ValueError(
            "use_mup: expected False with fused kernels before megatron-core 0.18, got True; verl's forward "
            "there leaves the factor of the logits out"
        )


def _packed(each: Tensor, given: dict[str, Any]) -> tuple[Tensor, Any]:
    """One value for each sample, [b], as one for each packed token, [1, s]; and how tokens are packed."""
    from verl.models.mcore.util import preprocess_thd_engine
    from verl.utils.megatron_utils import unwrap_model
    from verl.utils.torch_functional import expand_as_nested

    config = unwrap_model(given["model"]).config
    dsv4 = getattr(config, "experimental_attention_variant", None) == "dsv4_hybrid"
    packed, packed_seq_params, _ = preprocess_thd_engine(
        expand_as_nested(each, given["input_ids"]),
        use_fp8_padding=config.fp8 in ("e4m3", "hybrid"),
        min_local_rows=config.csa_window_size if dsv4 else None,
        pad_to_length_bucket=given["pad_to_length_bucket"],
        cp_layout=given["cp_layout"],
        local_cp_size=given["local_cp_size"],
    )
    return packed, packed_seq_params


def forward_step_on(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`MegatronEngineWithLMHead.forward_step` with the sum of p squared under fused kernels.

    Stock refuses that. Here it sees a micro-batch that does not ask for it, and
    `fused_forward_model_engine_on` adds it to the outputs.
    """

    def forward_step(self: Any, batch_iter: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        from verl.utils import tensordict_utils as tu

        batch = next(batch_iter)
        fused = tu.get_non_tensor_data(batch, "use_fused_kernels", self.engine_config.use_fused_kernels)
        sum_pi_squared = bool(fused and tu.get_non_tensor_data(batch, "calculate_sum_pi_squared", False))
        if sum_pi_squared:
            batch = with_flags(batch, calculate_sum_pi_squared=False)
        token = _SUM_PI_SQUARED.set(sum_pi_squared)
        try:
            return stock(self, iter((batch,)), *args, **kwargs)
        finally:
            _SUM_PI_SQUARED.reset(token)

    return forward_step


def lm_head_logits_processor_on(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`MegatronEngineWithLMHead._lm_head_logits_processor`: everything from the logits in one pass.

    The logits are neither divided in place nor cloned, and nothing waits for the device. Distillation, which
    takes the scaled logits themselves, goes stock's way.
    """

    def lm_head_logits_processor(
        self: Any,
        logits: Tensor,
        label: Tensor,
        temperature: Tensor,
        *,
        calculate_sum_pi_squared: bool,
        calculate_entropy: bool,
        distillation_use_topk: bool,
        distillation_only: bool,
        **others: Any,
    ) -> dict[str, Tensor]:
        if distillation_use_topk or distillation_only:
            outputs: dict[str, Tensor] = stock(
                self,
                logits,
                label,
                temperature,
                calculate_sum_pi_squared=calculate_sum_pi_squared,
                calculate_entropy=calculate_entropy,
                distillation_use_topk=distillation_use_topk,
                distillation_only=distillation_only,
                **others,
            )
            return outputs
        config = self.engine_config
        chunked = config.entropy_from_logits_with_chunking
        found = vocab_parallel_log_probs_and_entropy(
            logits,
            label,
            temperature=at_least_smallest(temperature),
            chunk_size=config.entropy_from_logits_chunk_size if chunked else None,
            entropy=calculate_entropy,
            metrics=("sum_pi_squared",) if calculate_sum_pi_squared else (),
        )
        outputs = dict(found.metrics)
        if found.entropy is not None:
            outputs["entropy"] = found.entropy
        return outputs | {"log_probs": found.log_probs}

    return lm_head_logits_processor

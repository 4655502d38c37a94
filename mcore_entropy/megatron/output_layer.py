"""`EntropyAwareOutputLayer`: Megatron's output layer that can give statistics instead of logits.

s sequence, b batch, H hidden size, V/tp columns of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mcore_entropy.config import EntropyConfig
from mcore_entropy.functional.agreement import errors_on_every_rank
from mcore_entropy.functional.linear import fused_head
from mcore_entropy.functional.linear_passes import LinearOptions
from mcore_entropy.functional.logits import vocab_parallel_log_probs_and_entropy
from mcore_entropy.functional.problem import Keywords
from mcore_entropy.megatron.supported import ColumnParallelLinear, check_switches
from mcore_entropy.parallel import TensorParallelGroup
from mcore_entropy.statistics import LogitTransform, TokenStatistics, Wanted


@dataclass
class PendingCall:
    """What the swap leaves for the layer: the model calls it without keywords of ours.

    Attributes:
        logits_calls: calls that still come first and want logits: one for each MTP layer.
        target, mask, temperature: [s, b], as for `EntropyAwareOutputLayer.forward`.
    """

    logits_calls: int
    target: Tensor
    mask: Tensor | None
    temperature: float | Tensor | None
    entropy: bool


# mypy does not follow Megatron's imports, so the base class is Any to it.
class EntropyAwareOutputLayer(ColumnParallelLinear):  # type: ignore[misc, unused-ignore]
    """Megatron's `ColumnParallelLinear` that, given a target, results in its log-prob and the entropy.

    Parameters, their names, checkpoints and tied weights are the parent's. `entropy_config` says how to
    compute; `swap_output_layer` sets it. Logits do not exist with a target: see
    `linear_log_probs_and_entropy` for dtypes, what is saved, and the collectives, which are over the
    layer's own tensor-parallel group.
    """

    entropy_config: EntropyConfig = EntropyConfig()
    pending_call: PendingCall | None = None

    # Megatron-FSDP knows layers by the name of their class, and one it does not know by these.
    tensor_model_parallel = True
    partition_dim = 0

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        target: Tensor | None = None,
        mask: Tensor | None = None,
        temperature: float | Tensor | None = None,
        entropy: bool | None = None,
    ) -> tuple[Any, Tensor | None]:
        """The parent's forward without a target, to the bit; statistics with one.

        Args:
            input_: hidden states [s, b, H], or with sequence parallelism this rank's [s/tp, b, H].
            weight: [V/tp, H] to use instead of the layer's own (tied embeddings).
            runtime_gather_output: as the parent's. Statistics are over the whole vocabulary either way.
            target: labels as global vocabulary indices, [s, b].
            mask: bool [s, b]; tokens where it is False give 0 and cost nothing.
            temperature: a number or [s, b]; None for entropy_config's.
            entropy: whether to compute the entropy; None for entropy_config's.

        Returns:
            (TokenStatistics of shape [s, b], bias or None) with a target, (logits, bias or None) without:
            as the parent, the bias comes second, and is left out of the logits, where skip_bias_add is set.

        Raises:
            ValueError: an argument does not fit, or comes without a target.
        """
        if target is None:
            if mask is not None or temperature is not None or entropy is not None:
                raise ValueError("target: expected one together with mask, temperature or entropy, got None")
            pending = self._take_pending_call()
            if pending is None:
                logits: tuple[Any, Tensor | None] = super().forward(input_, weight, runtime_gather_output)
                return logits
            target, mask, temperature, entropy = (
                pending.target,
                pending.mask,
                pending.temperature,
                pending.entropy,
            )
        statistics = self._statistics(input_, weight, target, mask, temperature, entropy)
        return statistics, self.bias if self.skip_bias_add else None

    def _take_pending_call(self) -> PendingCall | None:
        pending = self.pending_call
        if pending is None:
            return None
        if pending.logits_calls > 0:
            pending.logits_calls -= 1
            return None
        self.pending_call = None
        return pending

    def _statistics(
        self,
        hidden: Tensor,
        weight: Tensor | None,
        target: Tensor,
        mask: Tensor | None,
        temperature: float | Tensor | None,
        entropy: bool | None,
    ) -> TokenStatistics:
        config = self.entropy_config
        if weight is None:
            weight = self.weight
        with errors_on_every_rank(TensorParallelGroup.resolve(self.tp_group)):
            check_switches(self)
            expected_shape = (self.output_size_per_partition, self.input_size)
            if weight is None or weight.shape != expected_shape:
                raise ValueError(
                    f"weight: expected shape {expected_shape}, the layer's own or a tied embedding's, got "
                    f"{None if weight is None else tuple(weight.shape)}"
                )
            wanted = Wanted.checked(config.entropy if entropy is None else entropy, config.metrics)
        if self.config.deterministic_mode:
            config = replace(config, execution=replace(config.execution, deterministic=True))
        temperature = config.temperature if temperature is None else temperature
        if config.head == "logits":
            return self._statistics_of_logits(config, hidden, weight, target, mask, temperature, wanted)
        keywords = Keywords(
            target=target,
            mask=mask,
            temperature=temperature,
            ignore_index=config.ignore_index,
            vocab_size=config.vocab_size,
            chunk_size=config.chunk_size,
            execution=config.execution,
            wanted=wanted,
        )
        options = LinearOptions(
            transform=after_mup(self.config, config.transform),
            sequence_parallel=self.sequence_parallel,
            tp_group=self.tp_group,
            # A reference model, called without a graph, needs no main_grad.
            accumulate_into_main_grad=(
                self.gradient_accumulation_fusion and weight.requires_grad and torch.is_grad_enabled()
            ),
        )
        return fused_head(hidden, weight, None if self.skip_bias_add else self.bias, options, keywords)

    def _statistics_of_logits(
        self,
        config: EntropyConfig,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        mask: Tensor | None,
        temperature: float | Tensor,
        wanted: Wanted,
    ) -> TokenStatistics:
        logits, _ = super().forward(hidden, weight, runtime_gather_output=False)
        transform = after_mup(self.config, config.transform)
        if isinstance(temperature, Tensor):  # a half-precision one would round the quotient below
            temperature = temperature.to(torch.promote_types(temperature.dtype, torch.float32))
        return vocab_parallel_log_probs_and_entropy(
            logits,
            target,
            mask=mask,
            temperature=temperature if transform is None else temperature / transform.scale,
            ignore_index=config.ignore_index,
            vocab_size=config.vocab_size,
            chunk_size=config.chunk_size,
            tp_group=self.tp_group,
            entropy=wanted.entropy,
            metrics=wanted.metrics,
            execution=config.execution,
        )


def after_mup(model_config: Any, transform: LogitTransform | None) -> LogitTransform | None:
    """The transform, after MuP's factor: what the model does to the logits of its stock head."""
    if not getattr(model_config, "use_mup", False):  # from megatron-core 0.17 on
        return transform
    own = LogitTransform() if transform is None else transform
    return LogitTransform(float(model_config.mup_output_mult) * own.scale, own.softcap)

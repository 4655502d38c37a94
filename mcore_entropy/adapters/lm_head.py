"""`EntropyAwareLMHead`: an `nn.Linear` head that can give statistics instead of logits.

[*, H] hidden states, V vocabulary. FSDP gathers a module's weight for the time of its forward and hangs the
reduction of its gradient on what that forward gives: so the work is done in the forward, and its result is
one tensor, which FSDP, activation checkpointing and forward hooks pass through as they do logits.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mcore_entropy.adapters.dtensor import column_parallel_logits, dtensor_linear_log_probs_and_entropy
from mcore_entropy.config import EntropyConfig
from mcore_entropy.functional.linear import fused_head
from mcore_entropy.functional.linear_passes import LinearOptions
from mcore_entropy.functional.problem import Keywords
from mcore_entropy.parallel import TensorParallelGroup
from mcore_entropy.statistics import LogitTransform, TokenStatistics, Wanted


class HeadCall:
    """What one call of a head is to compute.

    It passes through the wrappers of a head as one opaque keyword: mixed-precision policies cast the tensors
    that they find among a module's arguments, in dataclasses too, and a temperature in bf16 is another one.
    """

    def __init__(
        self,
        target: Tensor,
        mask: Tensor | None,
        temperature: float | Tensor,
        ignore_index: int,
        entropy: bool,
        transform: LogitTransform,
        config: EntropyConfig,
    ) -> None:
        self.target = target
        self.mask = mask
        self.temperature = temperature
        self.ignore_index = ignore_index
        self.entropy = entropy
        self.transform = transform
        self.config = config

    def statistics(self, hidden: Tensor, weight: Tensor, bias: Any) -> Tensor:
        """The statistics of hidden [*, H] and weight [V, H] as one tensor [*, k]; see `named`.

        A weight that is a DTensor is column-parallel: `mcore_entropy.adapters.dtensor.parallelize_lm_head`.
        """

        def on_device(value: Any) -> Any:
            return value.to(hidden.device) if isinstance(value, Tensor) else value

        keywords = dict(
            target=on_device(self.target),
            mask=on_device(self.mask),
            temperature=on_device(self.temperature),
            ignore_index=self.ignore_index,
            vocab_size=self.config.vocab_size,
            chunk_size=self.config.chunk_size,
            execution=self.config.execution,
        )
        if isinstance(weight, DTensor):
            statistics = dtensor_linear_log_probs_and_entropy(
                hidden,
                weight,
                bias=bias,
                transform=self.transform,
                entropy=self.entropy,
                metrics=self.config.metrics,
                **keywords,
            )
        else:
            options = LinearOptions(self.transform, tp_group=TensorParallelGroup.single_rank())
            wanted = Wanted.checked(self.entropy, self.config.metrics)
            statistics = fused_head(hidden, weight, bias, options, Keywords(wanted=wanted, **keywords))
        columns = [statistics.log_probs, *statistics.metrics.values()]
        if statistics.entropy is not None:
            columns.append(statistics.entropy)
        return torch.stack(columns, dim=-1)

    def fits(self, packed: Tensor) -> bool:
        """Whether `packed` can be what `statistics` gave."""
        columns = 1 + len(self.config.metrics) + self.entropy
        wide = packed.dtype in (torch.float32, torch.float64)
        return wide and packed.shape == (*self.target.shape, columns)

    def named(self, packed: Tensor) -> TokenStatistics:
        """The statistics that `statistics` packed."""
        # Copies: FSDP hangs its hooks on what a model gives, and an in-place operation on a view drops them.
        log_probs, *rest = (column.clone() for column in packed.unbind(-1))
        entropy = rest.pop() if self.entropy else None
        metrics = (value.detach() for value in rest)
        return TokenStatistics(log_probs, entropy, dict(zip(self.config.metrics, metrics, strict=True)))


class EntropyAwareLMHead(nn.Linear):
    """An `nn.Linear` head; with a `HeadCall`, statistics come instead of logits, and logits do not exist.

    Parameters, their names, checkpoints and ties are `nn.Linear`'s. See `linear_log_probs_and_entropy` for
    dtypes, gradients and what is saved for backward.
    """

    gives_statistics: ClassVar[bool] = True

    def forward(self, input: Tensor, call: HeadCall | None = None) -> Tensor:
        """Logits [*, V] as the parent's; with a call [*, k], fp32 (fp64 for fp64 input), for its `named`."""
        if call is None:
            weight: Any = self.weight
            if isinstance(weight, DTensor):
                return column_parallel_logits(input, weight, self.bias)  # type: ignore[arg-type] # as its weight
            return super().forward(input)
        return call.statistics(input, self.weight, self.bias)


_WRAPPED_AS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "original_module")


def entropy_aware_head(module: Any) -> Any | None:
    """Our head inside the wrappers that hand on a call's keywords as they are; None if there is none.

    FSDP1, checkpoint wrappers, torch.compile and PEFT's modules_to_save (whose copies of our head are ours)
    wrap a module by another one; FSDP2 makes its class another.
    """
    while isinstance(module, nn.Module):
        if getattr(type(module), "gives_statistics", False):
            return module
        module = next(
            (
                getattr(module, name)
                for name in _WRAPPED_AS
                if isinstance(module._modules.get(name), nn.Module)
            ),
            None,
        )
    return None

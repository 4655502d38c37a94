"""What verl's engines ask of the head for one micro-batch, and cannot say in verl's own arguments.

A request travels as the argument `temperature`, which verl hands from its engines to the head without
looking at it. It is a plain object: FSDP casts every tensor among a model's arguments to the dtype of the
parameters, and would round temperatures to bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_entropy.statistics import TokenStatistics, Wanted

# verl's: it divides by at least this, where a sample's temperature is 0 or padding has none.
SMALLEST_TEMPERATURE = 1e-8


@dataclass(frozen=True)
class Asked:
    """Which statistics, and at which temperature.

    Attributes:
        temperature: a number, or one per token in the shape of the labels that the head gets.
        entropy, sum_pi_squared: whether to compute them.
    """

    temperature: float | Tensor
    entropy: bool = True
    sum_pi_squared: bool = False

    @property
    def wanted(self) -> Wanted:
        return Wanted(entropy=self.entropy, metrics=("sum_pi_squared",) if self.sum_pi_squared else ())


class HeadRequest:
    """A question on its way to the head, and the part of the answer that verl's outputs have no field for.

    No dataclass: FSDP1 looks into those for tensors to cast.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.sum_pi_squared: Tensor | None = None

    def answered_by(self, statistics: TokenStatistics) -> TokenStatistics:
        """`statistics`, after the sum of p squared was kept for `taken_sum_pi_squared`."""
        self.sum_pi_squared = statistics.metrics.get("sum_pi_squared")
        return statistics

    def taken_sum_pi_squared(self) -> Tensor:
        """The sums of the head's tokens, in its order.

        Raises:
            RuntimeError: no head of ours was called with this request.
        """
        if self.sum_pi_squared is None:
            raise RuntimeError(
                "calculate_sum_pi_squared: expected the model to call the head that verl was switched to, "
                "and it did not; its forward was replaced after the switch, or returned early"
            )
        return self.sum_pi_squared


def request_of(temperature: float | Tensor | HeadRequest) -> HeadRequest:
    """The request that came as `temperature`; for a temperature of verl's own, one with the entropy."""
    return temperature if isinstance(temperature, HeadRequest) else HeadRequest(Asked(temperature))


def at_least_smallest(temperature: float | Tensor) -> float | Tensor:
    """As verl's engines read a temperature: one that is not positive is the smallest. NaN stays NaN."""
    if isinstance(temperature, Tensor):
        temperature = temperature.to(torch.float32)
        return torch.where(temperature <= 0, SMALLEST_TEMPERATURE, temperature)
    return max(temperature, SMALLEST_TEMPERATURE)


def with_flags(micro_batch: Any, **flags: bool) -> Any:
    """A shallow copy of verl's micro-batch with other flags."""
    from verl.utils import tensordict_utils as tu

    copy = micro_batch.copy()
    tu.assign_non_tensor(copy, **flags)
    return copy

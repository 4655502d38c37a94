"""What a swapped head is told once: `EntropyConfig`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from mcore_entropy.execution import Execution
from mcore_entropy.functional.arguments import checked_chunk_size, checked_temperature_number
from mcore_entropy.statistics import LogitTransform, Wanted

Head = Literal["fused", "logits"]


@dataclass(frozen=True)
class EntropyConfig:
    """How a swapped head computes its statistics; immutable, every field has a default.

    Args:
        entropy: compute the entropy as well as the log-prob, unless a request says otherwise.
        temperature: the logits are divided by it, unless a request says otherwise; positive and finite.
        chunk_size: tokens of one reduction over the tensor-parallel group; None means 8192 on a GPU and
            2048 on the CPU for the fused head, all tokens for head="logits".
        vocab_size: columns of the vocabulary that count, so that Megatron's padding has p = 0. None counts
            the padding too, as Megatron's own loss does.
        ignore_index: a label of this value gives log-prob 0 and no gradient.
        metrics: detached extras out of ``"sum_pi_squared"``, ``"varentropy"``, ``"max_prob"``.
        transform: what the model does to its logits after the head.
        execution: how to compute it.
        head: ``"fused"`` never has logits in memory and never rounds them to half precision; ``"logits"``
            takes those of Megatron's own layer, in its dtype and with its memory.
        entropy_coeff: what the loss takes off, times the entropy: that of `mcore_entropy.megatron.loss`, or
            of a swapped Hugging Face model.
        log_interval: Megatron's loss reports entropy and metrics anew every so many iterations.

    Raises:
        ValueError: a field is out of its range, or contradicts another.

    Example:
        >>> EntropyConfig(entropy_coeff=0.01, vocab_size=50257).head
        'fused'
    """

    entropy: bool = True
    temperature: float = 1.0
    chunk_size: int | None = None
    vocab_size: int | None = None
    ignore_index: int = -100
    metrics: tuple[str, ...] = ()
    transform: LogitTransform | None = None
    execution: Execution = field(default_factory=Execution)
    head: Head = "fused"
    entropy_coeff: float = 0.0
    log_interval: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", Wanted.checked(self.entropy, self.metrics).metrics)
        checked_temperature_number(self.temperature)
        checked_chunk_size(self.chunk_size, default=1)
        if self.vocab_size is not None and (type(self.vocab_size) is not int or self.vocab_size <= 0):
            raise ValueError(f"vocab_size: expected a positive int or None, got {self.vocab_size!r}")
        if type(self.ignore_index) is not int:
            raise ValueError(f"ignore_index: expected an int, got {self.ignore_index!r}")
        if self.transform is not None and not isinstance(self.transform, LogitTransform):
            raise ValueError(f"transform: expected a LogitTransform or None, got {self.transform!r}")
        if not isinstance(self.execution, Execution):
            raise ValueError(f"execution: expected an Execution, got {self.execution!r}")
        if self.head not in get_args(Head):
            raise ValueError(f"head: expected one of {get_args(Head)}, got {self.head!r}")
        if self.head == "logits" and self.execution.logits_budget_mib:
            raise ValueError(
                "logits_budget_mib: expected 0 with head='logits', which keeps all of Megatron's logits "
                f"anyway, got {self.execution.logits_budget_mib}"
            )
        if self.head == "logits" and self.transform is not None and self.transform.softcap is not None:
            raise ValueError("transform: expected no softcap with head='logits', got one; use head='fused'")
        if type(self.log_interval) is not int or self.log_interval < 1:
            raise ValueError(f"log_interval: expected a positive int, got {self.log_interval!r}")
        number = isinstance(self.entropy_coeff, int | float) and not isinstance(self.entropy_coeff, bool)
        if not number or not math.isfinite(self.entropy_coeff):
            raise ValueError(f"entropy_coeff: expected a finite number, got {self.entropy_coeff!r}")
        if self.entropy_coeff and not self.entropy:
            raise ValueError(f"entropy_coeff: expected 0 with entropy=False, got {self.entropy_coeff}")

"""What a swapped head is told once: `EntropyConfig`."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_entropy.execution import Execution
from mcore_entropy.functional.arguments import checked_chunk_size, checked_temperature_number
from mcore_entropy.statistics import LogitTransform, Wanted


@dataclass(frozen=True)
class EntropyConfig:
    """How an `EntropyAwareOutputLayer` computes its statistics; immutable, every field has a default.

    Args:
        entropy: compute the entropy as well as the log-prob, unless a request says otherwise.
        temperature: the logits are divided by it, unless a request says otherwise; positive and finite.
        chunk_size: tokens of one reduction over the tensor-parallel group; None means 2048.
        vocab_size: columns of the vocabulary that count, so that Megatron's padding has p = 0. None counts
            the padding too, as Megatron's own loss does.
        ignore_index: a label of this value gives log-prob 0 and no gradient.
        metrics: detached extras out of ``"sum_pi_squared"``, ``"varentropy"``, ``"max_prob"``.
        transform: what the model does to its logits after the head.
        execution: how to compute it.

    Raises:
        ValueError: a field is out of its range.
    """

    entropy: bool = True
    temperature: float = 1.0
    chunk_size: int | None = None
    vocab_size: int | None = None
    ignore_index: int = -100
    metrics: tuple[str, ...] = ()
    transform: LogitTransform | None = None
    execution: Execution = field(default_factory=Execution)

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

"""One head's work on one rank, and memory as the parts that are alive at the same time.

N tokens of a micro-batch, V vocabulary, H hidden size, R ranks of the tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FP32 = 4  # bytes


@dataclass(frozen=True)
class Workload:
    """Forward and backward of log-probs, and of the entropy if asked for, over N tokens.

    Attributes:
        tokens: N, the same on all ranks of the group; with sequence_parallel each holds N / R hidden states.
        masked: share of the tokens that a mask leaves out, evenly spread.
        main_grad: the weight's gradient is added to an fp32 `main_grad` that exists already.
    """

    tokens: int
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype = torch.bfloat16
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    masked: float = 0.0
    entropy: bool = True
    main_grad: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens", "hidden_size", "vocab_size", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not 0 <= self.masked <= 1:
            raise ValueError(f"masked: expected a share between 0 and 1, got {self.masked}")
        if self.sequence_parallel and self.tokens % self.tensor_parallel:
            raise ValueError(
                f"tokens: expected a multiple of tensor_parallel_size = {self.tensor_parallel} with sequence "
                f"parallelism, got {self.tokens}"
            )
        if self.tensor_parallel > self.vocab_size:
            raise ValueError(
                f"tensor_parallel: expected at most vocab_size = {self.vocab_size}, got "
                f"{self.tensor_parallel}"
            )

    @property
    def columns(self) -> int:
        """Of this rank; where the vocabulary does not divide, the padded shard."""
        return -(-self.vocab_size // self.tensor_parallel)

    @property
    def sections(self) -> int:
        """See `TokenChunk`."""
        return self.tensor_parallel if self.sequence_parallel else 1

    @property
    def hidden_bytes(self) -> int:
        """Of hidden as this rank holds it, and of its gradient."""
        return self.tokens // self.sections * self.hidden_size * self.dtype.itemsize

    @property
    def weight_bytes(self) -> int:
        """Of this rank's rows of the weight, and of their gradient."""
        return self.columns * self.hidden_size * self.dtype.itemsize

    def live(self, tokens: int) -> int:
        """How many of so many tokens are computed where masked ones are left out."""
        return round(tokens * (1 - self.masked))

    def product_flops(self, tokens: int) -> int:
        """Of one product of so many tokens' hidden states with this rank's columns."""
        return 2 * tokens * self.hidden_size * self.columns


@dataclass(frozen=True)
class Part:
    """Bytes that are alive, and what for."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Moment:
    """What is alive at one point of forward or backward."""

    name: str
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


def moment(name: str, parts: dict[str, int]) -> Moment:
    """From the parts that are not empty."""
    return Moment(name, tuple(Part(label, size) for label, size in parts.items() if size))


@dataclass(frozen=True)
class Head:
    """One form of the head: its moments, the largest being the peak, and the operations of its products."""

    name: str
    moments: tuple[Moment, ...]
    flops: int

    @property
    def peak(self) -> Moment:
        return largest(self.moments)


def largest(moments: Sequence[Moment]) -> Moment:
    return max(moments, key=lambda one: one.bytes)

"""What is computed: the sizes, and the tensors that every head is given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100  # the target of a masked token, for heads that know no mask


class UserError(Exception):
    """What a user asked for cannot be done; the message is one sentence that says why."""


@dataclass(frozen=True)
class Problem:
    """Sizes, as given on the command line.

    Attributes:
        vocab_size: of all ranks together.
        masked: share of the tokens that do not count.
    """

    tokens: int
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    ranks: int
    masked: float

    def __post_init__(self) -> None:
        for name in ("tokens", "hidden_size", "vocab_size"):
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise UserError(f"--{option}: expected at least 1, got {getattr(self, name)}")
        if self.vocab_size % self.ranks:
            raise UserError(
                f"--vocab-size: expected a multiple of the {self.ranks} ranks, got {self.vocab_size}"
            )
        if not 0 <= self.masked < 1:
            raise UserError(f"--masked: expected a share from 0 to below 1, got {self.masked}")

    @property
    def columns(self) -> int:
        """Of a rank's shard of the vocabulary."""
        return self.vocab_size // self.ranks

    @property
    def logits_bytes(self) -> int:
        """Of a rank's logits in fp32."""
        return 4 * self.tokens * self.columns

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients of hidden and weight, which every head's step ends with."""
        return (self.tokens + self.columns) * self.hidden_size * self.dtype.itemsize

    def describe(self) -> str:
        text = f"{self.tokens} tokens, hidden size {self.hidden_size}, vocabulary {self.vocab_size}, "
        text += str(self.dtype).removeprefix("torch.")
        if self.ranks > 1:
            text += f", {self.ranks} ranks with {self.columns} columns each"
        if self.masked:
            text += f", {self.masked:.0%} of the tokens masked"
        return text


@dataclass
class Inputs:
    """One rank's tensors; weight is its shard [V/R, H], all others are the same on every rank.

    Attributes:
        mask: True where a token counts, or None when all do.
        upstream: gradients for log-prob and entropy, [N] each.
        start: the first of this rank's columns.
    """

    hidden: Tensor
    weight: Tensor
    target: Tensor
    mask: Tensor | None
    upstream: tuple[Tensor, Tensor]
    start: int

    @staticmethod
    def random(problem: Problem, rank: int) -> Inputs:
        """Drawn on the device, the same on every machine of its kind."""
        shared, own = (torch.Generator(problem.device).manual_seed(seed) for seed in (0, 1 + rank))
        n, h = problem.tokens, problem.hidden_size

        def normal(*shape: int, generator: torch.Generator = shared) -> Tensor:
            return torch.randn(shape, generator=generator, device=problem.device)

        hidden = normal(n, h).to(problem.dtype).requires_grad_()
        weight = normal(problem.columns, h, generator=own).mul_(2 * h**-0.5)  # logits of deviation 2
        target = torch.randint(problem.vocab_size, (n,), generator=shared, device=problem.device)
        upstream = (normal(n), 0.01 * normal(n))
        mask = None
        if problem.masked:
            mask = torch.rand(n, generator=shared, device=problem.device) >= problem.masked
            mask[0] = True  # a loss needs one
        start = rank * problem.columns
        return Inputs(hidden, weight.to(problem.dtype).requires_grad_(), target, mask, upstream, start)

    def free(self) -> None:
        """Forget the gradients of the step before."""
        self.hidden.grad = self.weight.grad = None

    def ignoring_target(self) -> Tensor:
        """Targets with IGNORED where a token does not count."""
        return self.target if self.mask is None else self.target.where(self.mask, IGNORED)

    def masked(self, values: Tensor) -> Tensor:
        """Zeros where a token does not count, as heads do that know no mask."""
        return values if self.mask is None else values.where(self.mask, 0.0)

    def counted(self) -> Tensor:
        """How many tokens count, and where: [N] of 1 and 0, in fp64."""
        if self.mask is None:
            return torch.ones_like(self.target, dtype=torch.float64)
        return self.mask.double()

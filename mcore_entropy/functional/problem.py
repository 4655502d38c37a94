"""One call brought together: the keywords that all public functions share, resolved into a `Problem`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_entropy.backends import select
from mcore_entropy.backends.interface import Backend
from mcore_entropy.execution import Execution
from mcore_entropy.functional.agreement import check_agreement
from mcore_entropy.functional.arguments import (
    TokenArguments,
    checked_chunk_size,
    checked_execution,
    checked_transform,
)
from mcore_entropy.parallel import TensorParallelGroup, TokenChunk, VocabShard, token_chunks
from mcore_entropy.statistics import LogitTransform, Wanted


@dataclass(frozen=True)
class Problem:
    """Everything about one call that is not a tensor.

    Attributes:
        shape: the leading shape of the results, N tokens in all.
        chunk_size: tokens of one reduction.
        sections: token ranges a chunk takes equal pieces of (see `TokenChunk`).
        partial_hidden: whether hidden's gradient stays this rank's part of the sum over the group.
    """

    group: TensorParallelGroup
    shard: VocabShard
    wanted: Wanted
    backend: Backend
    execution: Execution
    shape: torch.Size
    chunk_size: int
    sections: int = 1
    transform: LogitTransform | None = None
    partial_hidden: bool = False

    @property
    def hidden_group(self) -> TensorParallelGroup:
        """The ranks that hidden's gradient is summed over."""
        return TensorParallelGroup.single_rank() if self.partial_hidden else self.group

    def chunks(self) -> list[TokenChunk]:
        return list(token_chunks(self.shape.numel(), self.chunk_size, self.sections))

    def forward_chunks(self, masked: bool) -> list[TokenChunk]:
        """Those of the forward: one, where there is nothing to reduce and no row to leave out."""
        if self.group.size == 1 and not masked:
            return list(token_chunks(self.shape.numel(), max(self.shape.numel(), 1)))
        return self.chunks()


@dataclass(frozen=True, kw_only=True, eq=False)
class Keywords:
    """The keywords of the public functions, as the caller gave them."""

    wanted: Wanted
    target: Tensor | None = None
    mask: Tensor | None = None
    temperature: float | Tensor = 1.0
    ignore_index: int = -100
    vocab_size: int | None = None
    vocab_start_index: int | None = None
    chunk_size: int | None = None
    execution: Execution | None = None

    def resolve(
        self,
        group: TensorParallelGroup,
        *,
        columns: int,
        shape: torch.Size,
        shape_source: str,
        device: torch.device,
        dtype: torch.dtype,
        default_chunk_size: int,
        sections: int = 1,
        transform: LogitTransform | None = None,
        partial_hidden: bool = False,
    ) -> tuple[Problem, TokenArguments]:
        """The problem and its checked per-token arguments.

        Raises:
            ValueError: a keyword does not fit the logits or hidden states that the other arguments describe.
        """
        execution = checked_execution(self.execution)
        checked_transform(transform)
        if self.wanted.target and self.target is None:
            raise ValueError(
                "target: expected a tensor of labels, got None; for the entropy alone, without a "
                "log-prob, there is vocab_parallel_entropy"
            )
        problem = Problem(
            group=group,
            shard=VocabShard.resolve(columns, self.vocab_size, self.vocab_start_index, group),
            wanted=self.wanted,
            backend=select(execution, device, dtype),
            execution=execution,
            shape=shape,
            chunk_size=checked_chunk_size(self.chunk_size, default_chunk_size),
            sections=sections,
            transform=transform,
            partial_hidden=partial_hidden,
        )
        tokens = TokenArguments.checked(
            self.target,
            self.mask,
            self.temperature,
            self.ignore_index,
            shape=shape,
            shape_source=shape_source,
            device=device,
            dtype=dtype,
            vocab_size=problem.shard.vocab_size,
        )
        return problem, tokens

    def verify_agreement(
        self, call: str, problem: Problem, tokens: TokenArguments, inputs: dict[str, Any]
    ) -> None:
        """With ``MCORE_ENTROPY_CHECKS=1``: every rank was given the same, and the shards fit together."""
        temperature = tokens.temperature
        facts = {
            **inputs,
            "leading shape": tuple(problem.shape),
            "vocab_size": problem.shard.vocab_size,
            "vocab_start_index": "given" if self.vocab_start_index is not None else None,
            "chunk_size": problem.chunk_size,
            "ignore_index": tokens.ignore_index,
            "log-probs, entropy, metrics": (
                problem.wanted.target,
                problem.wanted.entropy,
                problem.wanted.metrics,
            ),
            "transform": checked_transform(problem.transform),
            "execution": problem.execution,
            "backend": problem.backend.name,
            "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "temperature": "a tensor" if isinstance(temperature, Tensor) else temperature,
        }
        per_token: dict[str, Tensor | None] = {
            "target": tokens.target,
            "mask": tokens.mask,
            "temperature (tensor)": temperature if isinstance(temperature, Tensor) else None,
        }
        check_agreement(problem.group, call, facts, per_token, problem.shard)

"""Forward and backward of the logits form on one rank, collectives included: what autograd calls, and the op.

[*] any leading shape of N tokens, V/tp columns of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mcore_entropy.backends.interface import LogitRows, RowInputs, TokenSelection
from mcore_entropy.functional.agreement import errors_on_every_rank
from mcore_entropy.functional.arguments import FLOATS, TokenArguments, check_tensor
from mcore_entropy.functional.chunked import (
    Rows,
    TokenGradients,
    TokenResults,
    check_upstream,
    forward_in_chunks,
    rows_to_compute,
)
from mcore_entropy.functional.problem import Keywords, Problem
from mcore_entropy.parallel import TensorParallelGroup
from mcore_entropy.statistics import PartialStatistics, statistics_dtype


@dataclass(frozen=True)
class LogitsForward:
    """What a forward found, and what its backward needs beside the logits."""

    problem: Problem
    tokens: TokenArguments
    results: TokenResults


def resolve_logits(
    logits: Tensor, group: TensorParallelGroup, keywords: Keywords
) -> tuple[Problem, TokenArguments]:
    """The problem that logits [*, V/tp] and keywords pose, and its per-token arguments.

    Raises:
        ValueError: an argument does not fit.
    """
    check_tensor("vocab_parallel_logits", logits, FLOATS, None)
    if logits.dim() == 0:
        raise ValueError("vocab_parallel_logits: expected shape [*, V/tp], got a number")
    shape = logits.shape[:-1]
    problem, tokens = keywords.resolve(
        group,
        columns=logits.shape[-1],
        shape=shape,
        shape_source=f"vocab_parallel_logits {tuple(logits.shape)}",
        device=logits.device,
        dtype=logits.dtype,
        default_chunk_size=max(shape.numel(), 1),
    )
    if problem.execution.logits_budget_mib:
        raise ValueError(
            "execution.logits_budget_mib: expected 0 for logits that exist already, got "
            f"{problem.execution.logits_budget_mib}; it is an option of the fused head"
        )
    return problem, tokens


def forward_logits(logits: Tensor, group: TensorParallelGroup, keywords: Keywords) -> LogitsForward:
    """Statistics of logits [*, V/tp].

    Raises:
        ValueError: an argument does not fit; before any collective.
    """
    with errors_on_every_rank(group):
        problem, tokens = resolve_logits(logits, group, keywords)
    facts = {"vocab_parallel_logits": logits.dtype}
    keywords.verify_agreement("forward of the logits form", problem, tokens, facts)
    rows_of_logits = LogitRows(logits[..., : problem.shard.counted])

    def local_statistics(rows: Rows, inputs: RowInputs) -> PartialStatistics:
        selection = TokenSelection(rows.chunk.start, rows.chunk.stop, rows.kept)
        return problem.backend.logits_statistics(
            rows_of_logits, selection, inputs, problem.wanted, problem.execution
        )

    like = logits.new_empty(0, dtype=statistics_dtype(logits.dtype))
    chunks = rows_to_compute(problem, tokens.mask, problem.forward_chunks(tokens.mask is not None))
    return LogitsForward(problem, tokens, forward_in_chunks(problem, tokens, chunks, like, local_statistics))


def backward_logits(
    logits: Tensor, forward: LogitsForward, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """The gradient for logits [*, V/tp], contiguous, from upstream ones [*], at least one of them given."""
    problem, tokens = forward.problem, forward.tokens
    counted = problem.shard.counted
    rows_of_logits = LogitRows(logits[..., :counted])
    gradient = logits.new_empty(rows_of_logits.tokens, logits.shape[-1])
    gradient[:, counted:] = 0

    check_upstream("backward of the logits form", problem, {}, grad_log_probs, grad_entropy)
    per_token = TokenGradients.of(problem, tokens, forward.results, grad_log_probs, grad_entropy)
    for rows in rows_to_compute(problem, per_token.live, problem.chunks()):
        if rows.dropped is not None:
            gradient.index_fill_(0, rows.dropped + rows.chunk.start, 0)
        inputs, gradients = per_token.rows(rows.of)
        problem.backend.logits_gradient(
            rows_of_logits,
            TokenSelection(rows.chunk.start, rows.chunk.stop, rows.kept),
            inputs,
            gradients,
            gradient[:, :counted],
            problem.execution,
        )
    result: Tensor = gradient.view(logits.shape)
    return result

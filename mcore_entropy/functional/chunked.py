"""The token axis of both Functions: chunk by chunk through a backend and a reduction, rows left out.

N tokens in all, n of one chunk. Nothing here knows whether a chunk's logits are given or computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_entropy.backends.interface import RowGradients, RowInputs
from mcore_entropy.functional.agreement import check_agreement
from mcore_entropy.functional.arguments import TokenArguments
from mcore_entropy.functional.problem import Problem
from mcore_entropy.parallel import Reduction, TokenChunk, start_reduction
from mcore_entropy.statistics import (
    Normalizer,
    PartialStatistics,
    finish,
    gradient_coefficients,
)


@dataclass(frozen=True)
class Rows:
    """The rows of one chunk to compute: `kept` lists them, [k], None for all n; `dropped` the others."""

    chunk: TokenChunk
    kept: Tensor | None = None
    dropped: Tensor | None = None

    @property
    def count(self) -> int:
        return self.chunk.tokens if self.kept is None else self.kept.shape[0]

    def of(self, per_token: Tensor) -> Tensor:
        """These rows of [N], as [k]."""
        values = self.chunk.take(per_token)
        return values if self.kept is None else values.index_select(0, self.kept)


@dataclass(frozen=True)
class TokenResults:
    """Flat results, [N] each, and the normalizer that the backward needs."""

    normalizer: Normalizer
    log_probs: Tensor | None
    entropy: Tensor | None
    metrics: dict[str, Tensor]


def forward_in_chunks(
    problem: Problem,
    tokens: TokenArguments,
    chunks: list[Rows],
    like: Tensor,
    local_statistics: Callable[[Rows, RowInputs], PartialStatistics],
) -> TokenResults:
    """Statistics of every token over the whole vocabulary.

    `local_statistics` gives a chunk's rows' statistics over this rank's columns; it is called for every
    chunk, with no row at all too, since it may hold a collective. Per chunk one MAX and one SUM all-reduce;
    they run while the next chunks' statistics are computed: the MAX during the next one, the SUM during the
    one after. `like`: any tensor with the device and dtype of the statistics.
    """
    total = PartialStatistics.empty(problem.shape.numel(), problem.wanted, like)
    inputs = tokens.row_inputs(problem.shard, problem.transform)

    def store(rows: Rows, reduced: PartialStatistics) -> None:
        values = reduced.present()
        for name, all_values in total.present().items():
            rows.chunk.put(all_values, values[name])

    under_way: list[tuple[Rows, Reduction]] = []
    for rows in chunks:
        partial = local_statistics(rows, inputs.rows(rows.of))
        if rows.kept is not None:
            partial = partial.placed(rows.kept, rows.chunk.tokens)
        if len(chunks) == 1 and problem.group.size == 1 and rows.chunk.sections == 1:
            return _results(problem, tokens, partial)
        under_way.append((rows, start_reduction(partial, problem.group, problem.execution.deterministic)))
        for _, reduction in under_way[-2:-1]:
            reduction.start_sum()
        for done, reduction in under_way[:-2]:
            store(done, reduction.result())
        under_way = under_way[-2:]
    for done, reduction in under_way:
        store(done, reduction.result())
    return _results(problem, tokens, total)


def _results(problem: Problem, tokens: TokenArguments, total: PartialStatistics) -> TokenResults:
    normalizer, log_probs, entropy, metrics = finish(total, problem.wanted, problem.shard.vocab_size)
    if log_probs is not None:
        log_probs = torch.where(tokens.invalid(problem.shard.vocab_size), torch.nan, log_probs)
        log_probs = torch.where(tokens.ignored(), 0.0, log_probs)
    if tokens.mask is not None:
        log_probs = None if log_probs is None else torch.where(tokens.mask, log_probs, 0.0)
        entropy = None if entropy is None else torch.where(tokens.mask, entropy, 0.0)
        metrics = {name: torch.where(tokens.mask, value, 0.0) for name, value in metrics.items()}
    return TokenResults(normalizer, log_probs, entropy, metrics)


def check_upstream(
    call: str,
    problem: Problem,
    facts: dict[str, Any],
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> None:
    """With ``MCORE_ENTROPY_CHECKS=1``: every rank got the same gradients, [*], for this call's backward."""
    upstream = {"gradient of log_probs": grad_log_probs, "gradient of entropy": grad_entropy}
    check_agreement(problem.group, call, facts, upstream)


@dataclass(frozen=True)
class TokenGradients:
    """What every token brings along to a backward, [N] each; `live` tells into which a gradient flows."""

    inputs: RowInputs
    gradients: RowGradients
    live: Tensor

    @staticmethod
    def of(
        problem: Problem,
        tokens: TokenArguments,
        results: TokenResults,
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> TokenGradients:
        """From upstream gradients [*], any strides, None for none; at least one of the two is given."""
        grad_log_probs = None if grad_log_probs is None else grad_log_probs.reshape(-1)
        grad_entropy = None if grad_entropy is None else grad_entropy.reshape(-1)
        live = torch.zeros_like(results.normalizer.maximum, dtype=torch.bool)
        if grad_log_probs is not None:
            nothing = tokens.ignored()
            if tokens.mask is not None:
                nothing = nothing | ~tokens.mask
            grad_log_probs = torch.where(nothing, 0.0, grad_log_probs)
            # Their log-prob is NaN: so is their gradient, rather than the softmax term alone.
            invalid = tokens.invalid(problem.shard.vocab_size) & (grad_log_probs != 0)
            grad_log_probs = torch.where(invalid, torch.nan, grad_log_probs)
            live |= grad_log_probs != 0
        if grad_entropy is not None:
            if tokens.mask is not None:
                grad_entropy = torch.where(tokens.mask, grad_entropy, 0.0)
            live |= grad_entropy != 0
        coefficients = gradient_coefficients(
            grad_log_probs, grad_entropy, results.entropy, problem.transform, tokens.temperature
        )
        inputs = tokens.row_inputs(problem.shard, problem.transform)
        only_live = None if problem.execution.compact_rows else live
        return TokenGradients(inputs, RowGradients(results.normalizer, coefficients, only_live), live)

    def rows(self, pick: Callable[[Tensor], Tensor]) -> tuple[RowInputs, RowGradients]:
        """Those of the rows that `pick` takes out of every [N] tensor."""
        return self.inputs.rows(pick), self.gradients.rows(pick)


def rows_to_compute(problem: Problem, keep: Tensor | None, chunks: list[TokenChunk]) -> list[Rows]:
    """The rows of every chunk for which `keep` [N] is True: one host sync, or none if nothing is left out."""
    if keep is None or not problem.execution.compact_rows or not chunks:
        return [Rows(chunk) for chunk in chunks]
    counts = torch.stack([chunk.take(keep).sum() for chunk in chunks]).tolist()
    found = []
    for chunk, count in zip(chunks, counts, strict=True):
        if count == chunk.tokens:
            found.append(Rows(chunk))
        else:
            # Stable: the kept rows come first and in order. (nonzero would cost a sync for each chunk.)
            order = torch.argsort(~chunk.take(keep), stable=True)
            found.append(Rows(chunk, order[:count], order[count:]))
    return found

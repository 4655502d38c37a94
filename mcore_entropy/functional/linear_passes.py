"""Forward and backward of the fused head on one rank, collectives included: what autograd calls, and the op.

[*, H] hidden states of N tokens, V global vocabulary, weight [V/tp, H].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_entropy.backends.interface import KeptLogits
from mcore_entropy.functional.agreement import errors_on_every_rank
from mcore_entropy.functional.arguments import FLOATS, TokenArguments, check_bool, check_tensor
from mcore_entropy.functional.chunked import (
    TokenGradients,
    TokenResults,
    check_upstream,
    forward_in_chunks,
    rows_to_compute,
)
from mcore_entropy.functional.head_gradients import HeadGradients, by_columns_is_smaller
from mcore_entropy.functional.local_head import LocalHead, StatisticsOfHead
from mcore_entropy.functional.main_grad import WeightGradient, main_grad_of
from mcore_entropy.functional.problem import Keywords, Problem
from mcore_entropy.parallel import GroupArgument, TensorParallelGroup
from mcore_entropy.statistics import LogitTransform, statistics_dtype


def default_chunk_size(device: torch.device) -> int:
    """Tokens of one reduction when chunk_size is None: enough rows for matrix products at full speed."""
    return 2048 if device.type == "cpu" else 8192


@dataclass(frozen=True)
class LinearOptions:
    """What the fused head takes beside the keywords that all functions share.

    Attributes:
        autocast_dtype: what both operands are cast to first, None for no cast.
        trained: whether a backward can follow, for which logits may be kept.
        partial_hidden: leave hidden's gradient as this rank's part of the sum over the group, for a caller
            whose own backward sums it; not together with sequence_parallel, which is such a sum.
    """

    transform: LogitTransform | None = None
    sequence_parallel: bool = False
    tp_group: GroupArgument = None
    accumulate_into_main_grad: bool = False
    autocast_dtype: torch.dtype | None = None
    trained: bool = False
    partial_hidden: bool = False


class HeadOperands(NamedTuple):
    """hidden [*, H], weight [V/tp, H] and bias [V/tp]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    def cast(self, dtype: torch.dtype | None) -> HeadOperands:
        """As they are multiplied; autocast leaves a bias alone, which is added to fp32 logits."""
        if dtype is None:
            return self
        return HeadOperands(self.hidden.to(dtype), self.weight.to(dtype), self.bias)

    def of(self, problem: Problem) -> LocalHead:
        return LocalHead(problem, self.hidden.reshape(-1, self.hidden.shape[-1]), self.weight, self.bias)


class Needed(NamedTuple):
    """Which gradients are asked for."""

    hidden: bool
    weight: bool
    bias: bool


class Gradients(NamedTuple):
    """What autograd gets; None for what nobody asked for, and for a weight's that went into main_grad."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class LinearForward:
    """What a forward found, and what its backward needs.

    Attributes:
        operands: as they were multiplied.
        kept: the logits that were kept, if any.
    """

    problem: Problem
    tokens: TokenArguments
    results: TokenResults
    operands: HeadOperands
    kept: KeptLogits | None = None


def resolve_linear(
    operands: HeadOperands, group: TensorParallelGroup, options: LinearOptions, keywords: Keywords
) -> tuple[Problem, TokenArguments]:
    """The problem that the head's operands and the keywords pose, and its per-token arguments.

    Raises:
        ValueError: an argument does not fit.
    """
    hidden, weight, _ = operands
    check_bool("sequence_parallel", options.sequence_parallel)
    assert not (options.partial_hidden and options.sequence_parallel)
    _check_operands(*operands, options.autocast_dtype)
    sections = group.size if options.sequence_parallel else 1
    shape = hidden.shape[:-1]
    if sections > 1:
        if len(shape) == 0:
            raise ValueError("hidden: expected [s/tp, ..., H] with sequence_parallel, got [H]")
        shape = torch.Size((shape[0] * sections, *shape[1:]))
    return keywords.resolve(
        group,
        columns=weight.shape[0],
        shape=shape,
        shape_source=(
            f"hidden {tuple(hidden.shape)} with sequence_parallel={options.sequence_parallel} over "
            f"{group.size} rank(s)"
        ),
        device=hidden.device,
        dtype=options.autocast_dtype or hidden.dtype,
        default_chunk_size=default_chunk_size(hidden.device),
        sections=sections,
        transform=options.transform,
        partial_hidden=options.partial_hidden,
    )


def forward_linear(
    operands: HeadOperands, group: TensorParallelGroup, options: LinearOptions, keywords: Keywords
) -> LinearForward:
    """Statistics of the logits that the head would give.

    Raises:
        ValueError: an argument does not fit; before any collective.
    """
    hidden, weight, bias = operands
    with errors_on_every_rank(group):
        problem, tokens = resolve_linear(operands, group, options, keywords)
        if options.accumulate_into_main_grad:
            main_grad_of(weight)
    facts = {
        "hidden": f"{tuple(hidden.shape)} {hidden.dtype}, needs a gradient: {hidden.requires_grad}",
        "sequence_parallel": options.sequence_parallel,
        "partial hidden gradient": options.partial_hidden,
        "autocast": options.autocast_dtype,
        "a backward follows": options.trained,
        "weight": f"{weight.dtype}, bias: {bias is not None}",
    }
    keywords.verify_agreement("forward of the fused head", problem, tokens, facts)

    operands = operands.cast(options.autocast_dtype)
    like = operands.hidden.new_empty(0, dtype=statistics_dtype(operands.hidden.dtype))
    chunks = rows_to_compute(problem, tokens.mask, problem.forward_chunks(tokens.mask is not None))
    kept = None
    if options.trained and problem.execution.logits_budget_mib:
        count = sum(rows.count for rows in chunks)
        kept = problem.backend.kept_logits(count, problem.shard.counted, operands.hidden, problem.execution)
    statistics = StatisticsOfHead(operands.of(problem), kept)
    results = forward_in_chunks(problem, tokens, chunks, like, statistics)
    return LinearForward(problem, tokens, results, operands, kept)


def hidden_gradient(operands: HeadOperands, dtype: torch.dtype) -> Tensor:
    """Room for the gradient of hidden, [*, H]."""
    hidden = operands.hidden
    gradient = torch.empty_like(hidden.reshape(-1, hidden.shape[-1]), dtype=dtype)
    return gradient.view(hidden.shape)


def backward_linear(
    forward: LinearForward,
    needed: Needed,
    hidden_dtype: torch.dtype,
    to_weight: WeightGradient,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Gradients:
    """Gradients from upstream ones [*], of which at least one is given: hidden's in `hidden_dtype`."""
    problem, tokens, (hidden, _, bias) = forward.problem, forward.tokens, forward.operands
    head = forward.operands.of(problem)
    dtype = statistics_dtype(hidden.dtype)

    by_columns = (
        needed.weight and to_weight.sum_costs_memory(dtype) and by_columns_is_smaller(head, needed.hidden)
    )
    # Both decide which collectives there are, and in which order.
    facts = {"hidden needs a gradient": needed.hidden, "all chunks in one pass over the columns": by_columns}
    check_upstream("backward of the fused head", problem, facts, grad_log_probs, grad_entropy)
    per_token = TokenGradients.of(problem, tokens, forward.results, grad_log_probs, grad_entropy)
    weight_sum = None
    if needed.weight:
        weight_sum = to_weight.stored(problem.shard.counted) if by_columns else to_weight.summed(dtype)
    of_hidden = hidden_gradient(forward.operands, hidden_dtype) if needed.hidden else None
    of_bias = None
    if needed.bias:
        assert bias is not None
        of_bias = torch.zeros_like(bias, dtype=dtype)
    gradients = HeadGradients(
        head,
        hidden=None if of_hidden is None else of_hidden.view(head.hidden.shape),
        weight=weight_sum,
        bias=of_bias,
        kept=forward.kept,
        mask=tokens.mask,
    )
    gradients.add(per_token, by_columns)
    return Gradients(
        of_hidden,
        None if weight_sum is None else to_weight.finished(weight_sum.gradient),
        None if of_bias is None or bias is None else of_bias.to(bias.dtype),
    )


def _check_operands(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, autocast_dtype: torch.dtype | None
) -> None:
    check_tensor("hidden", hidden, FLOATS, None)
    check_tensor("weight", weight, FLOATS, hidden.device)
    if hidden.dim() == 0:
        raise ValueError("hidden: expected shape [*, H], got a tensor without dimensions")
    if hidden.shape[-1] == 0:
        raise ValueError(f"hidden: expected [*, H] with H of at least 1, got shape {tuple(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight: expected shape [V/tp, {hidden.shape[-1]}] for hidden states {tuple(hidden.shape)}, got "
            f"{tuple(weight.shape)}; an FSDP-sharded weight is only whole inside its module's forward"
        )
    # Autocast leaves fp64 alone, so it makes no pair of fp64 and something else equal.
    cast = autocast_dtype is not None and weight.dtype != torch.float64
    if not cast and weight.dtype != hidden.dtype:
        raise ValueError(
            f"weight: expected hidden's dtype {hidden.dtype}, got {weight.dtype}; cast one, or use autocast"
        )
    if bias is not None:
        check_tensor("bias", bias, FLOATS, hidden.device)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias: expected shape ({weight.shape[0]},), got {tuple(bias.shape)}")

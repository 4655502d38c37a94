"""The fused LM head: log-probability and entropy from hidden states and the head's weight.

[*, H] hidden states of N tokens, V global vocabulary, weight [V/tp, H]. Logits exist one tile at a time:
they are computed in forward, and again in backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_entropy.backends.interface import KeptLogits
from mcore_entropy.execution import Execution
from mcore_entropy.functional.agreement import errors_on_every_rank
from mcore_entropy.functional.arguments import FLOATS, check_tensor
from mcore_entropy.functional.autograd import (
    first_derivative_only,
    named_outputs,
    outputs_of,
    restore_for_backward,
    save_for_backward,
    without_autocast,
)
from mcore_entropy.functional.chunked import TokenGradients, forward_in_chunks, rows_to_compute
from mcore_entropy.functional.head_gradients import HeadGradients, add_gradients, by_columns_is_smaller
from mcore_entropy.functional.local_head import LocalHead, StatisticsOfHead
from mcore_entropy.functional.main_grad import WeightGradient
from mcore_entropy.functional.problem import Keywords, Problem
from mcore_entropy.parallel import TensorParallelGroup
from mcore_entropy.statistics import LogitTransform, TokenStatistics, Wanted, statistics_dtype


def default_chunk_size(device: torch.device) -> int:
    """Tokens of one reduction when chunk_size is None: enough rows for matrix products at full speed."""
    return 2048 if device.type == "cpu" else 8192


@dataclass(frozen=True)
class LinearOptions:
    """What the fused head takes beside the keywords that all functions share.

    Attributes:
        autocast_dtype: what both operands are cast to first, None for no cast.
        trained: whether a backward can follow, for which logits may be kept.
    """

    transform: LogitTransform | None = None
    sequence_parallel: bool = False
    tp_group: dist.ProcessGroup | None = None
    accumulate_into_main_grad: bool = False
    autocast_dtype: torch.dtype | None = None
    trained: bool = False


class _LinearLogProbsAndEntropy(torch.autograd.Function):
    """Outputs: log_probs [*], entropy [*] or None, then the metrics, which are not differentiable.

    Saved: hidden [*, H] (under sequence parallelism this rank's shard, never the gathered one), weight and
    bias by reference (under autocast their cast form), the per-token arguments, three numbers a token.
    Gradients: hidden in its dtype, complete; weight and bias in theirs, accumulated in fp32.
    """

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: LinearOptions,
        keywords: Keywords,
    ) -> tuple[Tensor | None, ...]:
        autocast_dtype = options.autocast_dtype
        group = TensorParallelGroup.resolve(options.tp_group)
        with errors_on_every_rank(group):
            _check_operands(hidden, weight, bias, autocast_dtype)
            sections = group.size if options.sequence_parallel else 1
            shape = hidden.shape[:-1]
            if sections > 1:
                if len(shape) == 0:
                    raise ValueError("hidden: expected [s/tp, ..., H] with sequence_parallel, got [H]")
                shape = torch.Size((shape[0] * sections, *shape[1:]))
            problem, tokens = keywords.resolve(
                group,
                columns=weight.shape[0],
                shape=shape,
                shape_source=(
                    f"hidden {tuple(hidden.shape)} with sequence_parallel={options.sequence_parallel} over "
                    f"{group.size} rank(s)"
                ),
                device=hidden.device,
                dtype=autocast_dtype or hidden.dtype,
                default_chunk_size=default_chunk_size(hidden.device),
                sections=sections,
                transform=options.transform,
            )
            ctx.weight_gradient = WeightGradient(weight, options.accumulate_into_main_grad)
        facts = {
            "hidden": f"{tuple(hidden.shape)} {hidden.dtype}, needs a gradient: {hidden.requires_grad}",
            "sequence_parallel": options.sequence_parallel,
            "autocast": autocast_dtype,
            "weight": f"{weight.dtype}, bias: {bias is not None}",
        }
        keywords.verify_agreement(problem, tokens, facts)

        ctx.hidden_dtype = hidden.dtype
        if autocast_dtype is not None:
            hidden, weight = hidden.to(autocast_dtype), weight.to(autocast_dtype)
        head = LocalHead(problem, hidden.reshape(-1, hidden.shape[-1]), weight, bias)
        like = hidden.new_empty(0, dtype=statistics_dtype(hidden.dtype))
        chunks = rows_to_compute(problem, tokens.mask, problem.forward_chunks(tokens.mask is not None))
        kept = None
        if options.trained and problem.execution.logits_budget_mib:
            count = sum(rows.count for rows in chunks)
            kept = problem.backend.kept_logits(count, problem.shard.counted, hidden, problem.execution)
        results = forward_in_chunks(problem, tokens, chunks, like, StatisticsOfHead(head, kept))
        logits_kept = (None, None) if kept is None else (kept.exponents, kept.maxima)
        save_for_backward(ctx, (hidden, weight, bias, *logits_kept), problem, tokens, results)
        return outputs_of(ctx, problem, results)

    @staticmethod
    @without_autocast
    @first_derivative_only
    def backward(
        ctx: Any,
        saved: tuple[Any, ...],
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
        *_: Tensor | None,
    ) -> tuple[Any, ...]:
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None, None
        (hidden, weight, bias, exponents, maxima), tokens, results = restore_for_backward(ctx, saved)
        needs_hidden, needs_weight, needs_bias, *_rest = ctx.needs_input_grad
        problem: Problem = ctx.problem
        head = LocalHead(problem, hidden.reshape(-1, hidden.shape[-1]), weight, bias)
        dtype = statistics_dtype(hidden.dtype)

        per_token = TokenGradients.of(problem, tokens, results, grad_log_probs, grad_entropy)
        to_weight: WeightGradient = ctx.weight_gradient
        by_columns = (
            needs_weight and to_weight.sum_costs_memory(dtype) and by_columns_is_smaller(head, needs_hidden)
        )
        weight_sum = None
        if needs_weight:
            weight_sum = to_weight.stored(problem.shard.counted) if by_columns else to_weight.summed(dtype)
        gradients = HeadGradients(
            head,
            hidden=torch.empty_like(head.hidden, dtype=ctx.hidden_dtype) if needs_hidden else None,
            weight=weight_sum,
            bias=torch.zeros_like(bias, dtype=dtype) if needs_bias else None,
            kept=None if exponents is None else KeptLogits(exponents, maxima),
            mask=tokens.mask,
        )
        add_gradients(gradients, per_token, by_columns)
        return (
            None if gradients.hidden is None else gradients.hidden.view(hidden.shape),
            None if weight_sum is None else to_weight.result(weight_sum.gradient),
            None if gradients.bias is None else gradients.bias.to(bias.dtype),
            None,
            None,
        )


def linear_log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    transform: LogitTransform | None = None,
    sequence_parallel: bool = False,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    vocab_start_index: int | None = None,
    chunk_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    entropy: bool = True,
    metrics: tuple[str, ...] = (),
    execution: Execution | None = None,
) -> TokenStatistics:
    """Log-probability of each token's target, and entropy, of the logits hidden @ weight^T + bias.

    No [tokens, vocab] tensor exists, in forward or in backward: logits are computed tile by tile with fp32
    accumulation, never rounded to half precision, and computed again in backward.

    Args:
        hidden: hidden states [*, H], bf16, fp16, fp32 or fp64; the same on every rank of the group. With
            sequence_parallel, dimension 0 is this rank's shard of the sequence: [s/tp, ..., H].
        weight: this rank's rows of the head's weight, [V/tp, H], in hidden's dtype (under autocast both are
            cast once, as `torch.nn.functional.linear` would).
        target: global vocabulary index of each token's target, [*], an integer dtype; full length with
            sequence_parallel, [s, ...], as are mask, a tensor temperature and the results.
        bias: [V/tp], any float dtype, added to the fp32 logits.
        transform: what the model does to its logits after the head (soft-capping, a scale).
        sequence_parallel: hidden is sharded along dimension 0 over the group, as Megatron's is.
        mask, temperature, ignore_index, vocab_size, vocab_start_index, tp_group, entropy, metrics,
            execution: as in `vocab_parallel_log_probs_and_entropy`.
        chunk_size: tokens of one reduction over the group; None means 2048 on the CPU and 8192 elsewhere.

    Returns:
        TokenStatistics of shape [*] ([s, ...] with sequence_parallel), fp32 (fp64 for fp64 input), the same
        on every rank of the group.

    Raises:
        ValueError: an argument does not fit; before any collective.

    Gradients: hidden gets the complete one, summed over the group (with sequence_parallel this rank's
    shard of it); weight and bias get those of this rank's rows. All are accumulated in fp32; one
    that needs no gradient costs nothing. Saved for backward: hidden as given, weight, bias, target and
    mask by reference where they are contiguous, a tensor temperature, and three numbers a token.

    Collectives, for each chunk of n tokens: in forward one MAX all-reduce of n and one SUM all-reduce of 3 n
    numbers (2 n without entropy, more with metrics); in backward one fp32 all-reduce of [n, H] if hidden
    needs a gradient. With sequence_parallel also an all-gather of [n, H] in forward and again in backward,
    and a reduce-scatter instead of the all-reduce.
    """
    with errors_on_every_rank(TensorParallelGroup.resolve(tp_group)):
        wanted = Wanted.checked(entropy, metrics)
    keywords = Keywords(
        target=target,
        mask=mask,
        temperature=temperature,
        ignore_index=ignore_index,
        vocab_size=vocab_size,
        vocab_start_index=vocab_start_index,
        chunk_size=chunk_size,
        execution=execution,
        wanted=wanted,
    )
    return fused_head(hidden, weight, bias, LinearOptions(transform, sequence_parallel, tp_group), keywords)


def fused_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, options: LinearOptions, keywords: Keywords
) -> TokenStatistics:
    """`linear_log_probs_and_entropy` for callers inside the package, which may ask for main_grad as well."""
    operands = (hidden, weight, bias)
    options = replace(
        options,
        autocast_dtype=_autocast_dtype(hidden),
        trained=torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in operands),
    )
    outputs = _LinearLogProbsAndEntropy.apply(*operands, options, keywords)
    return named_outputs(keywords.wanted.metrics, outputs)


def _autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """What autocast, where it is on, would have `torch.nn.functional.linear` cast its operands to."""
    if not isinstance(hidden, Tensor) or hidden.dtype == torch.float64:
        return None
    device_type = hidden.device.type
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


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

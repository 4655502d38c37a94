"""The fused LM head: log-probability and entropy from hidden states and the head's weight.

[*, H] hidden states of N tokens, V global vocabulary, weight [V/tp, H]. Logits exist one tile at a time:
they are computed in forward, and again in backward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_entropy.backends.interface import KeptLogits
from mcore_entropy.execution import Execution
from mcore_entropy.functional.agreement import errors_on_every_rank
from mcore_entropy.functional.autograd import (
    first_derivative_only,
    named_outputs,
    outputs_of,
    restore_for_backward,
    save_for_backward,
    without_autocast,
)
from mcore_entropy.functional.linear_passes import (
    HeadOperands,
    LinearForward,
    LinearOptions,
    Needed,
    backward_linear,
    forward_linear,
)
from mcore_entropy.functional.main_grad import WeightGradient, main_grad_of, placeholder_gradient
from mcore_entropy.functional.ops.linear import linear_statistics_op
from mcore_entropy.functional.problem import Keywords
from mcore_entropy.parallel import TensorParallelGroup
from mcore_entropy.statistics import LogitTransform, TokenStatistics, Wanted


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
        group = TensorParallelGroup.resolve(options.tp_group)
        forward = forward_linear(HeadOperands(hidden, weight, bias), group, options, keywords)
        kept = forward.kept
        logits_kept = (None, None) if kept is None else (kept.exponents, kept.maxima)
        save_for_backward(
            ctx, (*forward.operands, *logits_kept), forward.problem, forward.tokens, forward.results
        )
        ctx.hidden_dtype = hidden.dtype
        ctx.weight = weight  # as given: its own dtype, and what Megatron hangs on the parameter
        ctx.accumulate_into_main_grad = options.accumulate_into_main_grad
        return outputs_of(ctx, forward.problem, forward.results)

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
        forward = LinearForward(
            ctx.problem,
            tokens,
            results,
            HeadOperands(hidden, weight, bias),
            None if exponents is None else KeptLogits(exponents, maxima),
        )
        needed = Needed(*ctx.needs_input_grad[:3])
        main_grad = main_grad_of(ctx.weight) if ctx.accumulate_into_main_grad else None
        gradients = backward_linear(
            forward,
            needed,
            ctx.hidden_dtype,
            WeightGradient(ctx.weight, main_grad),
            grad_log_probs,
            grad_entropy,
        )
        if needed.weight and main_grad is not None:
            gradients = gradients._replace(weight=placeholder_gradient(ctx.weight))
        return *gradients, None, None


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
        mask, temperature, ignore_index, entropy, metrics: as in `vocab_parallel_log_probs_and_entropy`, and
            so are vocab_size, vocab_start_index, tp_group and execution.
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
    numbers (2 n without entropy, more with metrics), or, with execution.deterministic or torch's own
    deterministic algorithms and more than two ranks, one all-gather of 4 n; in backward one fp32 all-reduce
    of [n, H] if hidden needs a gradient. With sequence_parallel also an all-gather of [n, H] in forward and
    again in backward, and a reduce-scatter instead of the all-reduce. They run beside the products of the
    chunks that follow.

    Example:
        >>> hidden, weight = torch.ones(2, 8, requires_grad=True), torch.zeros(4, 8)
        >>> found = linear_log_probs_and_entropy(hidden, weight, torch.tensor([0, 3]))
        >>> found.log_probs.exp()
        tensor([0.2500, 0.2500], grad_fn=<ExpBackward0>)
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
    if torch.compiler.is_compiling():
        return linear_statistics_op(HeadOperands(hidden, weight, bias), options, keywords)
    outputs = _LinearLogProbsAndEntropy.apply(*operands, options, keywords)
    return named_outputs(keywords.wanted.metrics, outputs)


def _autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """What autocast, where it is on, would have `torch.nn.functional.linear` cast its operands to."""
    if not isinstance(hidden, Tensor) or hidden.dtype == torch.float64:
        return None
    device_type = hidden.device.type
    # Before torch 2.13, torch.compile cannot trace the first question. What it compiles for has autocast.
    if not torch.compiler.is_compiling() and not torch.amp.is_autocast_available(device_type):
        return None
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)

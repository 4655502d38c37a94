"""Entropy and log-probability from vocabulary-parallel logits that already exist.

[*] any leading shape of N tokens, V global vocabulary, V/tp columns of this rank. One pass over the logits
in forward, one in backward; temporary buffers are bounded by the backend's workspace.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_entropy.execution import Execution
from mcore_entropy.functional.agreement import errors_on_every_rank
from mcore_entropy.functional.autograd import (
    first_derivative_only,
    named_outputs,
    outputs_of,
    own_output,
    restore_for_backward,
    save_for_backward,
    without_autocast,
)
from mcore_entropy.functional.chunked import TokenResults
from mcore_entropy.functional.logits_passes import LogitsForward, backward_logits, forward_logits
from mcore_entropy.functional.ops.logits import logits_entropy_op, logits_statistics_op
from mcore_entropy.functional.problem import Keywords
from mcore_entropy.parallel import GroupArgument, TensorParallelGroup
from mcore_entropy.statistics import TokenStatistics, Wanted


class VocabParallelEntropy(torch.autograd.Function):
    """Entropy in nats of the distribution over a sharded vocabulary.

    Input: logits [*, V/tp], the same tokens on every rank of the group; the other arguments are those of
    `vocab_parallel_entropy_with_chunking`, all with defaults. Output: entropy [*], fp32 (fp64 for fp64).

    Gradient: -p (ln p + entropy) / temperature for the logits, in their dtype; nothing else gets one.
    Saved: the logits by reference, the mask, a tensor temperature, and three numbers a token (maximum,
    ln S, entropy); never the softmax. Collectives: one MAX and one SUM all-reduce of n and 2 n numbers for
    each chunk of n tokens in forward, none in backward, none on a single rank.

    Example:
        >>> logits = torch.zeros(2, 4, requires_grad=True)
        >>> VocabParallelEntropy.apply(logits).sum().backward()  # a maximum: no slope
        >>> logits.grad.abs().max() < 1e-6
        tensor(True)
    """

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        mask: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        vocab_size: int | None = None,
        vocab_start_index: int | None = None,
        tp_group: GroupArgument = None,
        chunk_size: int | None = None,
        execution: Execution | None = None,
    ) -> Tensor:
        keywords = _entropy_keywords(mask, temperature, vocab_size, vocab_start_index, chunk_size, execution)
        results = _forward(ctx, vocab_parallel_logits, tp_group, keywords)
        entropy = own_output(ctx.problem, results.entropy)
        assert entropy is not None
        return entropy

    @staticmethod
    @without_autocast
    @first_derivative_only
    def backward(ctx: Any, saved: tuple[Any, ...], grad_entropy: Tensor | None) -> tuple[Any, ...]:
        return _backward(ctx, saved, None, grad_entropy), None, None, None, None, None, None, None


class _VocabParallelLogProbsAndEntropy(torch.autograd.Function):
    """Log-prob and entropy; as `VocabParallelEntropy`, with onehot - p as the log-prob's gradient.

    Outputs: log_probs [*], entropy [*] or None, then the metrics, which are not differentiable.
    """

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, vocab_parallel_logits: Tensor, tp_group: GroupArgument, keywords: Keywords
    ) -> tuple[Tensor | None, ...]:
        results = _forward(ctx, vocab_parallel_logits, tp_group, keywords)
        return outputs_of(ctx, ctx.problem, results)

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
        return _backward(ctx, saved, grad_log_probs, grad_entropy), None, None


def vocab_parallel_entropy(
    vocab_parallel_logits: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    vocab_start_index: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    execution: Execution | None = None,
) -> Tensor:
    """Entropy of every token's next-token distribution, exact in value and gradient.

    Args:
        vocab_parallel_logits: this rank's columns of the raw logits, [*, V/tp], bf16, fp16, fp32 or fp64, any
            strides; never changed.
        mask: bool [*]; tokens where it is False give 0 and get no gradient, whatever their logits hold.
        temperature: the logits are divided by it: a positive number, or one per token [*] (a token whose
            temperature is not above 0 gives NaN).
        vocab_size: number of columns of the whole vocabulary that count; columns at or beyond it have
            p = 0. None counts every column, padding too, as Megatron does.
        vocab_start_index: global index of this rank's first column, for uneven shards (which need
            vocab_size too); None means equal shards.
        tp_group: the group the vocabulary is sharded over. None means Megatron's tensor-parallel group where
            `megatron.core.parallel_state` is initialised, otherwise an unsharded vocabulary.
        execution: how to compute it; None for the defaults.

    Returns:
        Entropy in nats, [*], fp32 (fp64 for fp64 logits), the same on every rank of the group.

    Raises:
        ValueError: an argument does not fit; before any collective.

    Collectives and what is saved for backward: see `VocabParallelEntropy`, with all tokens as one chunk.

    Example:
        >>> vocab_parallel_entropy(torch.zeros(2, 4)).exp().round()  # as uncertain as 4 equal choices
        tensor([4., 4.])
    """
    return entropy_of_logits(
        vocab_parallel_logits, mask, temperature, vocab_size, vocab_start_index, tp_group, None, execution
    )


def vocab_parallel_entropy_with_chunking(
    vocab_parallel_logits: Tensor,
    chunk_size: int = 2048,
    *,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    vocab_start_index: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    execution: Execution | None = None,
) -> Tensor:
    """`vocab_parallel_entropy` with at most chunk_size tokens in one reduction over the group.

    The token axis is cut whatever the layout, inside one autograd Function, so that nothing is kept per chunk
    in training either. The other arguments, the result and the errors (ValueError)
    are those of `vocab_parallel_entropy`; collectives and what is saved for backward: `VocabParallelEntropy`.

    Example:
        >>> mask = torch.tensor([True, True, False])
        >>> vocab_parallel_entropy_with_chunking(torch.zeros(3, 4), 2, mask=mask).exp().round()
        tensor([4., 4., 1.])
    """
    return entropy_of_logits(
        vocab_parallel_logits,
        mask,
        temperature,
        vocab_size,
        vocab_start_index,
        tp_group,
        chunk_size,
        execution,
    )


def vocab_parallel_log_probs_and_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
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
    """Log-probability of each token's target, and entropy, in one pass over vocabulary-parallel logits.

    Args:
        vocab_parallel_logits: as in `vocab_parallel_entropy`.
        target: global vocabulary index of each token's target, [*], an integer dtype. A target outside the
            vocabulary is a ValueError on the CPU; on an accelerator, where looking would cost a host sync
            (``MCORE_ENTROPY_CHECKS=1`` does look), its log-prob and gradient are NaN.
        mask: as in `vocab_parallel_entropy`; it rules over target, whose value under a False does not matter.
        temperature: as in `vocab_parallel_entropy`.
        ignore_index: a target of this value gives log-prob 0 and no gradient; the entropy is computed.
        vocab_size, vocab_start_index: as in `vocab_parallel_entropy`.
        chunk_size: tokens of one reduction over the group; None takes all at once.
        tp_group: as in `vocab_parallel_entropy`.
        entropy: False leaves the entropy out: it costs nothing and the result's is None.
        metrics: detached extras out of ``"sum_pi_squared"``, ``"varentropy"``, ``"max_prob"``.
        execution: as in `vocab_parallel_entropy`.

    Returns:
        TokenStatistics of shape [*], fp32 (fp64 for fp64 logits), the same on every rank of the group.

    Raises:
        ValueError: an argument does not fit; before any collective.

    Collectives: for each chunk of n tokens one MAX all-reduce of n and one SUM all-reduce of 3 n numbers
    (2 n without entropy, more with metrics) in forward, none in backward. Saved for backward: the logits,
    target and mask by reference where they are contiguous, a tensor temperature, and three numbers a token.

    Example:
        >>> target = torch.tensor([0, -100])
        >>> found = vocab_parallel_log_probs_and_entropy(torch.zeros(2, 4), target, metrics=("max_prob",))
        >>> found.log_probs.exp(), found.metrics["max_prob"]
        (tensor([0.2500, 1.0000]), tensor([0.2500, 0.2500]))
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
    return statistics_of_logits(vocab_parallel_logits, tp_group, keywords)


def statistics_of_logits(
    vocab_parallel_logits: Tensor, tp_group: GroupArgument, keywords: Keywords
) -> TokenStatistics:
    """`vocab_parallel_log_probs_and_entropy` for callers inside the package, which may name a single rank."""
    if torch.compiler.is_compiling():
        return logits_statistics_op(vocab_parallel_logits, tp_group, keywords)
    outputs = _VocabParallelLogProbsAndEntropy.apply(vocab_parallel_logits, tp_group, keywords)
    return named_outputs(keywords.wanted.metrics, outputs)


def entropy_of_logits(
    vocab_parallel_logits: Tensor,
    mask: Tensor | None,
    temperature: float | Tensor,
    vocab_size: int | None,
    vocab_start_index: int | None,
    tp_group: GroupArgument,
    chunk_size: int | None,
    execution: Execution | None,
) -> Tensor:
    """`vocab_parallel_entropy`, in one chunk for None, for callers inside the package, as above."""
    if torch.compiler.is_compiling():
        keywords = _entropy_keywords(mask, temperature, vocab_size, vocab_start_index, chunk_size, execution)
        return logits_entropy_op(vocab_parallel_logits, tp_group, keywords)
    entropy: Tensor = VocabParallelEntropy.apply(
        vocab_parallel_logits,
        mask,
        temperature,
        vocab_size,
        vocab_start_index,
        tp_group,
        chunk_size,
        execution,
    )
    return entropy


def _entropy_keywords(
    mask: Tensor | None,
    temperature: float | Tensor,
    vocab_size: int | None,
    vocab_start_index: int | None,
    chunk_size: int | None,
    execution: Execution | None,
) -> Keywords:
    return Keywords(
        mask=mask,
        temperature=temperature,
        vocab_size=vocab_size,
        vocab_start_index=vocab_start_index,
        chunk_size=chunk_size,
        execution=execution,
        wanted=Wanted(target=False),
    )


def _forward(ctx: Any, logits: Tensor, tp_group: GroupArgument, keywords: Keywords) -> TokenResults:
    forward = forward_logits(logits, TensorParallelGroup.resolve(tp_group), keywords)
    save_for_backward(ctx, (logits,), forward.problem, forward.tokens, forward.results)
    return forward.results


def _backward(
    ctx: Any, saved: tuple[Any, ...], grad_log_probs: Tensor | None, grad_entropy: Tensor | None
) -> Tensor | None:
    if grad_log_probs is None and grad_entropy is None:
        return None
    (logits,), tokens, results = restore_for_backward(ctx, saved)
    forward = LogitsForward(ctx.problem, tokens, results)
    return backward_logits(logits, forward, grad_log_probs, grad_entropy)

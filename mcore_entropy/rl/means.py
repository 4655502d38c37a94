"""Means over the tokens or the sequences of all ranks, where ranks hold different numbers of them.

The usual fault is a mean of every rank's own mean: it weighs a token by how few others its rank has.

b sequences of s positions, or T packed positions of n sequences. With context parallelism s and T are
what this rank holds of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_entropy.functional.arguments import check_tensor
from mcore_entropy.rl.arguments import (
    check_count,
    check_cu_seqlens,
    check_groups,
    check_positive,
    counted,
)
from mcore_entropy.rl.reductions import all_reduced, global_mean


def token_mean(
    values: Tensor,
    mask: Tensor,
    *,
    count: Tensor | int | None = None,
    groups: Sequence[dist.ProcessGroup] = (),
    ranks_averaged: int = 1,
) -> Tensor:
    """The mean over the True tokens of all ranks of the groups.

    Its value is the same on every rank. Its gradient is that of the global mean with respect to this rank's
    values, times `ranks_averaged`: other ranks' values are constants here.

    Args:
        values: [*], bf16, fp16, fp32 or fp64; summed in fp32 (fp64 for fp64). Any shape, none of whose
            dimensions has to be the same on all ranks; a rank may have no token at all.
        mask: bool [*]. Where it is False the value may be anything, NaN too, and gets a gradient of 0.
        count: what to divide by instead of the number of True tokens in this call. With gradient
            accumulation it is `token_count` of the whole step: the results of the micro-batches then add up
            to the step's mean.
        groups: the ranks whose tokens count, as groups that have this rank in common and no other: a
            data-parallel and a context-parallel one, or one group of both. Empty: this rank alone.
        ranks_averaged: the number of ranks over which the framework averages gradients, as DDP, FSDP and
            Megatron's DDP (without calculate_per_token_loss) do over all ranks that share the parameters;
            1 where it adds them up.

    Returns:
        Scalar, fp32 (fp64 for fp64 values); 0 with a gradient of 0 where no token is True.

    Raises:
        ValueError: an argument does not fit.

    Collectives: one all-reduce of two numbers a group in forward, none in backward. Saved for backward: the
    mask and the number of tokens.

    Example:
        >>> token_mean(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False]))
        tensor(1.5000)
    """
    check_positive("ranks_averaged", ranks_averaged)
    check_count(count)
    check_groups(groups)
    part = counted(values, mask).sum()
    # fp32 counts to 2^24; beyond, its rounding is that of the sum beside it.
    total, tokens = all_reduced(torch.stack([part.detach(), mask.sum().to(part.dtype)]), groups)
    return global_mean(part, total, tokens, tokens if count is None else count, ranks_averaged)


def token_count(mask: Tensor, *, groups: Sequence[dist.ProcessGroup] = ()) -> Tensor:
    """The number of True tokens on all ranks of the groups, scalar int64.

    For `token_mean` with gradient accumulation: masks of all micro-batches, concatenated.

    Raises:
        ValueError: an argument does not fit.

    Collectives: one all-reduce of one number a group.

    Example:
        >>> token_count(torch.tensor([[True, True], [False, True]]))
        tensor(3)
    """
    check_tensor("mask", mask, (torch.bool,), None, "; a mask of 0 and 1 becomes one by mask.bool()")
    check_groups(groups)
    return all_reduced(mask.sum(), groups)


def sequence_mean(
    values: Tensor,
    mask: Tensor,
    *,
    count: Tensor | int | None = None,
    cp_group: dist.ProcessGroup | None = None,
    groups: Sequence[dist.ProcessGroup] = (),
    ranks_averaged: int = 1,
) -> Tensor:
    """The mean over sequences of each sequence's mean over its True tokens, as GRPO first had it.

    A sequence without a True token does not count. For the rest see `token_mean`.

    Args:
        values: [b, s], bf16, fp16, fp32 or fp64; one sequence a row.
        mask: bool [b, s].
        count: what to divide by instead of the number of sequences in this call: with gradient
            accumulation, the number of the whole step.
        cp_group: the ranks that hold other tokens of the same b sequences, in the same order (context
            parallelism), whatever the layout; s may differ. None: sequences are whole.
        groups: ranks that hold other sequences; each has this rank, and no other, in common with the others
            and with cp_group. b may differ.
        ranks_averaged: see `token_mean`; the ranks of cp_group are among them where gradients are averaged
            over those too.

    Returns:
        Scalar, fp32 (fp64 for fp64 values); 0 with a gradient of 0 where no token is True.

    Raises:
        ValueError: an argument does not fit.

    Collectives: in forward one all-reduce of 2 b numbers over cp_group, then one of two numbers a group; none
    in backward. Saved for backward: the mask and the sequences' numbers of tokens.

    Example:
        >>> values, mask = torch.tensor([[1.0, 3.0], [6.0, 9.0]]), torch.tensor([[True, True], [True, False]])
        >>> sequence_mean(values, mask)  # of 2 and 6
        tensor(4.)
    """
    kept = counted(values, mask)
    if values.dim() != 2:
        raise ValueError(
            f"values: expected [b, s], got shape {tuple(values.shape)}; packed sequences go to "
            "packed_sequence_mean"
        )
    return _mean_of_sequences(kept.sum(1), mask.sum(1), count, cp_group, groups, ranks_averaged)


def packed_sequence_mean(
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    count: Tensor | int | None = None,
    cp_group: dist.ProcessGroup | None = None,
    groups: Sequence[dist.ProcessGroup] = (),
    ranks_averaged: int = 1,
) -> Tensor:
    """`sequence_mean` of packed sequences.

    Args:
        values: [T] or [1, T].
        mask: bool of that shape.
        cu_seqlens: int32 or int64 [n + 1], where each sequence begins in *these* T, and T. With context
            parallelism, the bounds within this rank's shard (`cu_seqlens_of_shard`): n is the same on
            all ranks of cp_group, and a sequence of which a rank holds nothing is empty there.
        count, cp_group, groups, ranks_averaged: see `sequence_mean`.

    Returns, raises, collectives: as `sequence_mean`, n in place of b.

    Example:
        >>> values, bounds = torch.tensor([1.0, 3.0, 6.0]), torch.tensor([0, 2, 3])
        >>> packed_sequence_mean(values, torch.tensor([True, True, True]), bounds)  # of 2 and 6
        tensor(4.)
    """
    kept = counted(values, mask)
    if values.dim() == 0 or values.dim() > 2 or values.numel() != values.shape[-1]:
        raise ValueError(
            f"values: expected [T] or [1, T], got shape {tuple(values.shape)}; padded sequences go to "
            "sequence_mean"
        )
    check_cu_seqlens(cu_seqlens, values.numel(), values.device)

    def by_sequence(per_token: Tensor) -> Tensor:
        # Not index_add: its atomics on a GPU add in another order every time. unsafe: no host sync.
        return torch.segment_reduce(per_token.reshape(-1), "sum", offsets=cu_seqlens, initial=0, unsafe=True)

    sums, counts = by_sequence(kept), by_sequence(mask.to(kept.dtype))
    return _mean_of_sequences(sums, counts, count, cp_group, groups, ranks_averaged)


def _mean_of_sequences(
    sums: Tensor,
    counts: Tensor,
    count: Tensor | int | None,
    cp_group: dist.ProcessGroup | None,
    groups: Sequence[dist.ProcessGroup],
    ranks_averaged: int,
) -> Tensor:
    """From this rank's part of every sequence's sum and number of True tokens."""
    check_positive("ranks_averaged", ranks_averaged)
    check_count(count)
    check_groups(groups, cp_group)
    over_cp = () if cp_group is None else (cp_group,)
    whole_sums, tokens = all_reduced(torch.stack([sums.detach(), counts.to(sums.dtype)]), over_cp)
    tokens_or_one = tokens.clamp(min=1)  # a sequence without a True token has a sum of 0
    total = torch.stack([(whole_sums / tokens_or_one).sum(), (tokens > 0).sum().to(sums.dtype)])
    value, sequences = all_reduced(total, groups)
    part = (sums / tokens_or_one).sum()
    return global_mean(part, value, sequences, sequences if count is None else count, ranks_averaged)

"""The arguments of mcore_entropy.rl, checked before any collective."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_entropy.functional.arguments import FLOATS, check_tensor
from mcore_entropy.parallel import checks_enabled
from mcore_entropy.statistics import statistics_dtype


def check_mask(mask: Tensor, like: Tensor, name: str) -> None:
    """Raise ValueError unless the mask is bool, of the shape of `like`, the argument called `name`."""
    hint = "; a mask of 0 and 1 becomes one by mask.bool()"
    check_tensor("mask", mask, (torch.bool,), like.device, hint)
    if mask.shape != like.shape:
        # Not broadcast: a mask that fits by chance counts other tokens than the ones meant.
        raise ValueError(f"mask: expected the shape of {name}, {tuple(like.shape)}, got {tuple(mask.shape)}")


def counted(values: Tensor, mask: Tensor, name: str = "values") -> Tensor:
    """The values where the mask is True, 0 elsewhere, in the dtype that they are summed in.

    Raises:
        ValueError: no floating-point values, or a mask that does not fit them.
    """
    check_tensor(name, values, FLOATS, None)
    check_mask(mask, values, name)
    # Not a product: 0 * NaN is NaN, in the gradient too.
    return torch.where(mask, values.to(statistics_dtype(values.dtype)), 0.0)


def check_groups(groups: Sequence[dist.ProcessGroup], cp_group: dist.ProcessGroup | None = None) -> None:
    """Raise ValueError unless these are process groups that have this rank in common, and no other.

    Two that share more ranks than this one would count those ranks' tokens twice.

    Args:
        cp_group: one more group, summed over before the others; None is none.
    """
    if isinstance(groups, dist.ProcessGroup) or not isinstance(groups, Sequence):
        raise ValueError(f"groups: expected a tuple of process groups, got {groups!r}; one group is (group,)")
    for group in groups:
        check_group("groups", group)
    if cp_group is not None:
        check_group("cp_group", cp_group)
    every = (*groups,) if cp_group is None else (*groups, cp_group)
    ranks = [dist.get_process_group_ranks(group) for group in every]
    for one, other in itertools.combinations(ranks, 2):
        if len(set(one) & set(other)) > 1:
            raise ValueError(
                f"groups: expected groups that share this rank alone, cp_group included, got ranks {one} and "
                f"{other}, which would be counted twice; of Megatron's data-parallel groups it is the one "
                "without context-parallel ranks that goes beside a context-parallel one"
            )


def check_group(name: str, group: object) -> None:
    """Raise ValueError unless this is a process group that this rank is in."""
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"{name}: expected a torch.distributed.ProcessGroup that this rank is in, got {group!r}; "
            "dist.new_group gives ranks outside the group a placeholder, not a group"
        )


def check_positive(name: str, value: object) -> None:
    """Raise ValueError unless this is an int of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: expected a positive int, got {value!r}")


def check_count(count: object) -> None:
    """Raise ValueError unless this is a number to divide by, or None."""
    if isinstance(count, Tensor):
        if count.dim() != 0 or count.dtype == torch.bool:
            raise ValueError(
                f"count: expected one number, got shape {tuple(count.shape)} of {count.dtype}; a mask's sum?"
            )
        if count.device.type == "cpu" and count < 0:
            raise ValueError(f"count: expected a number of tokens or sequences, got {count.item()}")
    elif count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
        raise ValueError(f"count: expected a number of tokens or sequences, or None, got {count!r}")


def check_rank(rank: object, size: int) -> None:
    """Raise ValueError unless this is the number of one of `size` ranks."""
    if not isinstance(rank, int) or isinstance(rank, bool) or rank not in range(size):
        raise ValueError(f"rank: expected one of {size} ranks, from 0, got {rank!r}")


def check_cu_seqlens(
    cu_seqlens: Tensor, tokens: int | None, device: torch.device | None, multiple: int = 1
) -> None:
    """Raise ValueError unless these are the bounds of sequences that fill `tokens` tokens.

    On an accelerator the values are read with ``MCORE_ENTROPY_CHECKS=1`` alone: it costs a host sync.

    Args:
        tokens, device: the tokens' number and device; None is any.
        multiple: what every sequence's length is a multiple of.
    """
    check_tensor("cu_seqlens", cu_seqlens, (torch.int64, torch.int32), device)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1:
        raise ValueError(
            f"cu_seqlens: expected shape [sequences + 1], got {tuple(cu_seqlens.shape)}; a batch dimension "
            "of 1 goes by cu_seqlens[0]"
        )
    if cu_seqlens.device.type != "cpu" and not checks_enabled():
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds != sorted(bounds) or tokens not in (None, bounds[-1]):
        raise ValueError(
            f"cu_seqlens: expected bounds that rise from 0 to {'' if tokens is None else f'{tokens}, '}the "
            f"number of tokens, got {bounds}; "
            "padding behind the last sequence is a sequence of its own, with a mask that is False"
        )
    for first, last in itertools.pairwise(bounds):
        if (last - first) % multiple:
            raise ValueError(
                f"cu_seqlens: expected lengths that are multiples of {multiple}, got {last - first}; these "
                "are the bounds of the padded sequences (cu_seqlens_padded), which cut into equal chunks"
            )

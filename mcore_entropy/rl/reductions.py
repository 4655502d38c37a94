"""Sums over several groups, and a mean whose value is global while its gradient is this rank's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduced(sums: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """The sums over the ranks of all groups, one after the other, detached: one all-reduce a group."""
    total = sums.detach().clone()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total


class _GlobalValue(torch.autograd.Function):
    """The value of a global number with the gradient of this rank's part of it.

    forward(part, total, ranks_averaged): total. The gradient of `part` is the upstream gradient times
    ranks_averaged; there is none to `total`. Nothing is saved, and there is no collective. (Adding
    ``part - part.detach()`` instead would turn an infinite part into NaN.)
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, total: Tensor, ranks_averaged: int) -> Tensor:
        ctx.ranks_averaged = ranks_averaged
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return grad_outputs[0] * ctx.ranks_averaged, None, None


def global_mean(
    part: Tensor, total: Tensor, summands: Tensor, number: Tensor | int, ranks_averaged: int
) -> Tensor:
    """total / number, 0 where nothing was summed, with the gradient of part / number times ranks_averaged.

    Args:
        part: this rank's part of the sum, scalar, with its graph.
        total: the sum over all ranks, scalar.
        summands: how many there are on all ranks, scalar.
        number: what to divide by. 0 with summands is a caller's mistake, and comes out infinite or NaN.
    """
    value: Tensor = _GlobalValue.apply(part, total, ranks_averaged)
    # Without summands the sum is 0, and stays it whatever it is divided by.
    return value / (number + (summands == 0).to(value.dtype))

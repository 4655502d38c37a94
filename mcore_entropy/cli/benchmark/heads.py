"""The heads that are compared: what people write today, torch.compile of it, and ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

import mcore_entropy as me
from mcore_entropy.cli.benchmark.problem import Inputs
from mcore_entropy.cli.benchmark.ranks import Group

Results = tuple[Tensor, ...]
BOTH = ("log_probs", "entropy")
EAGER, COMPILED, OURS = "eager", "torch.compile", "mcore-entropy"


@dataclass(frozen=True)
class Head:
    """One way from hidden states and weight to statistics.

    Attributes:
        run: the forward, results with a graph.
        gives: what its results are, of "log_probs", "entropy" ([N], 0 where masked) and "loss" (the mean of
            -log_prob over the tokens that count).
        tensors_of_logits: how many fp32 tensors of all logits exist at its peak, about; 0 for none.
    """

    name: str
    run: Callable[[Inputs, Group], Results]
    gives: tuple[str, ...] = BOTH
    tensors_of_logits: float = 0.0


def own_heads() -> list[Head]:
    """Those that need nothing but torch and this package."""
    return [
        Head(EAGER, eager, tensors_of_logits=4),
        Head(COMPILED, compiled, tensors_of_logits=2),
        Head(OURS, ours),
    ]


def ours(inputs: Inputs, group: Group) -> Results:
    found = me.linear_log_probs_and_entropy(
        inputs.hidden, inputs.weight, inputs.target, mask=inputs.mask, tp_group=group
    )
    assert found.entropy is not None
    return found.log_probs, found.entropy


def eager(inputs: Inputs, group: Group) -> Results:
    log_probs, entropy = _dense(inputs.hidden, inputs.weight, inputs.target, inputs.start, group)
    return inputs.masked(log_probs), inputs.masked(entropy)


def compiled(inputs: Inputs, group: Group) -> Results:
    log_probs, entropy = _compiled_dense(inputs.hidden, inputs.weight, inputs.target, inputs.start, group)
    return inputs.masked(log_probs), inputs.masked(entropy)


def _dense(hidden: Tensor, weight: Tensor, target: Tensor, start: int, group: Group) -> tuple[Tensor, Tensor]:
    if group is not None:
        return _dense_shard(hidden, weight, target, start, group)
    log_p = linear(hidden, weight).float().log_softmax(-1)
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def _dense_shard(
    hidden: Tensor, weight: Tensor, target: Tensor, start: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """The same by three reductions over the ranks, as Megatron's loss does it."""
    logits = linear(_Copied.apply(hidden, group), weight).float()
    largest = logits.detach().amax(1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    z = logits - largest[:, None]
    weights = z.exp()
    index = (target - start).clamp(0, weight.shape[0] - 1)[:, None]
    here = (target >= start) & (target < start + weight.shape[0])
    parts = torch.stack(
        (weights.sum(1), (weights * z).sum(1), torch.where(here, z.gather(1, index)[:, 0], 0.0))
    )
    total, weighted, z_target = _Summed.apply(parts, group).unbind()
    return z_target - total.log(), total.log() - weighted / total


_compiled_dense = torch.compile(_dense, dynamic=False)


class _Copied(torch.autograd.Function):
    """The hidden states as they are; their gradient, of which a rank has a part, is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Summed(torch.autograd.Function):
    """The sum over the ranks; all of them hold the same gradient of it, which is each part's."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        part = part.clone()
        dist.all_reduce(part, group=group)
        return part

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None

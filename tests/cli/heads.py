"""The three heads that `mcore-entropy estimate` compares, as they are measured: N tokens, V / tp columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import mcore_entropy as me
from mcore_entropy.cli.estimate.logits_heads import CHUNK_OF_LOGITS
from mcore_entropy.functional.linear import fused_head
from mcore_entropy.functional.linear_passes import LinearOptions
from mcore_entropy.functional.problem import Keywords
from mcore_entropy.parallel import TensorParallelGroup
from mcore_entropy.statistics import Wanted

Group = dist.ProcessGroup | None
Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class Inputs:
    """hidden [N, H], under sequence parallelism [N / tp, H]; weight [V / tp, H]; target and mask [N]."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    mask: Tensor | None
    group: Group
    sequence_parallel: bool
    entropy: bool
    chunk_size: int | None = None
    execution: me.Execution | None = None
    main_grad: bool = False


class _Copied(torch.autograd.Function):
    """The same on every rank; its gradient is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Gathered(torch.autograd.Function):
    """All ranks' rows; its gradient is reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        out = gradient.new_empty(gradient.shape[0] // ctx.group.size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(out, gradient.contiguous(), group=ctx.group)
        return out, None


class _Summed(torch.autograd.Function):
    """The sum over the ranks; every rank has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def _logits(of: Inputs) -> Tensor:
    hidden = of.hidden
    if of.group is not None:
        hidden = (_Gathered if of.sequence_parallel else _Copied).apply(hidden, of.group)
    return linear(hidden, of.weight)


def _statistics(logits: Tensor, target: Tensor, group: Group, entropy: bool) -> Results:
    if group is not None:
        return _statistics_of_shard(logits, target, group, entropy)
    log_p = logits.float().log_softmax(-1)
    log_probs = log_p.gather(1, target[:, None])[:, 0]
    return (log_probs, -(log_p.exp() * log_p).sum(1)) if entropy else (log_probs,)


def _statistics_of_shard(logits: Tensor, target: Tensor, group: dist.ProcessGroup, entropy: bool) -> Results:
    logits = logits.float()
    largest = logits.detach().amax(1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    z = logits - largest[:, None]
    weights = z.exp()
    columns = logits.shape[1]
    start = columns * group.rank()
    here = (target >= start) & (target < start + columns)
    index = (target - start).clamp(0, columns - 1)[:, None]
    parts = [weights.sum(1), torch.where(here, z.gather(1, index)[:, 0], 0.0)]
    if entropy:
        parts.append((weights * z).sum(1))
    total, z_target, *weighted = _Summed.apply(torch.stack(parts), group).unbind()
    log_probs = z_target - total.log()
    return (log_probs, total.log() - weighted[0] / total) if entropy else (log_probs,)


def eager(of: Inputs) -> Results:
    return _statistics(_logits(of), of.target, of.group, of.entropy)


def chunked(of: Inputs) -> Results:
    logits = _logits(of)
    chunks = [
        checkpoint(_statistics, rows, target, of.group, of.entropy, use_reentrant=False)
        for rows, target in zip(logits.split(CHUNK_OF_LOGITS), of.target.split(CHUNK_OF_LOGITS), strict=True)
    ]
    return tuple(torch.cat(parts) for parts in zip(*chunks, strict=True))


def fused(of: Inputs) -> Results:
    group = TensorParallelGroup.single_rank() if of.group is None else TensorParallelGroup.resolve(of.group)
    result = fused_head(
        of.hidden,
        of.weight,
        None,
        LinearOptions(
            sequence_parallel=of.sequence_parallel, tp_group=group, accumulate_into_main_grad=of.main_grad
        ),
        Keywords(
            target=of.target,
            mask=of.mask,
            wanted=Wanted(entropy=of.entropy),
            chunk_size=of.chunk_size,
            execution=of.execution,
        ),
    )
    return (result.log_probs,) if result.entropy is None else (result.log_probs, result.entropy)


HEADS: dict[str, Callable[[Inputs], Results]] = {"eager": eager, "chunked": chunked, "fused": fused}

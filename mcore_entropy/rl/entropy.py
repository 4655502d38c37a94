"""What a training step reports about its entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_entropy.rl.arguments import check_groups, counted
from mcore_entropy.rl.reductions import all_reduced


@dataclass(frozen=True, eq=False)
class EntropyStatistics:
    """Of the True tokens on all ranks: detached scalars, the same on every rank, all 0 without a token.

    Attributes:
        mean: mean entropy in nats.
        share_above: share of the tokens whose entropy is above the threshold, 0 to 1.
        tokens: how many tokens these are, in the dtype of the others.

    Example:
        >>> EntropyStatistics(torch.tensor(0.5), torch.tensor(0.2), torch.tensor(10.0)).mean
        tensor(0.5000)
    """

    mean: Tensor
    share_above: Tensor
    tokens: Tensor


def entropy_statistics(
    entropy: Tensor,
    mask: Tensor,
    *,
    threshold: float | Tensor,
    groups: Sequence[dist.ProcessGroup] = (),
) -> EntropyStatistics:
    """Mean entropy, and the share of high-entropy tokens, over the True tokens of all ranks.

    Args:
        entropy: [*] in nats, bf16, fp16, fp32 or fp64, any shape.
        mask: bool [*]. Where it is False the entropy may be anything.
        threshold: nats above which a token counts as one of high entropy: a number, or a tensor of no
            dimension, which stays on its device.
        groups: as in `token_mean`.

    Returns:
        `EntropyStatistics` in fp32 (fp64 for fp64), without a host sync. A NaN among the True tokens makes
        the mean NaN.

    Raises:
        ValueError: an argument does not fit.

    Collectives: one all-reduce of three numbers a group.

    Example:
        >>> mask = torch.tensor([True, True, False])
        >>> found = entropy_statistics(torch.tensor([0.5, 1.5, 9.0]), mask, threshold=1.0)
        >>> found.mean, found.share_above
        (tensor(1.), tensor(0.5000))
    """
    check_groups(groups)
    _check_threshold(threshold)
    kept = counted(entropy.detach() if isinstance(entropy, Tensor) else entropy, mask, "entropy")
    above = (kept > threshold) & mask
    sums = torch.stack([kept.sum(), above.sum().to(kept.dtype), mask.sum().to(kept.dtype)])
    total, high, tokens = all_reduced(sums, groups)
    return EntropyStatistics(total / tokens.clamp(min=1), high / tokens.clamp(min=1), tokens)


def _check_threshold(threshold: object) -> None:
    if isinstance(threshold, Tensor):
        if threshold.dim() != 0 or threshold.dtype == torch.bool:
            shape = tuple(threshold.shape)
            raise ValueError(
                f"threshold: expected one number of nats, got shape {shape} of {threshold.dtype}"
            )
    elif isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or math.isnan(threshold):
        raise ValueError(f"threshold: expected a number of nats, got {threshold!r}")

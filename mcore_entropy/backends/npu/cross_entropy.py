"""Statistics of a tile of logits from Ascend's fused operator ``npu_cross_entropy_loss``.

n tokens, v columns of a tile. For a label y the operator gives the loss lse - z[y] and the log-softmax of the
row. With the row's largest logit as the label, the loss is ln S itself: nothing cancels, and the label is in
[0, v) whatever the target is, as the hardware demands. The log-softmax gives the other sums, since
z - m = log_p + ln S::

    S = e^loss        T = S (sum p log_p + ln S)        Q = S sum p (log_p + ln S)^2        R = S^2 sum p^2

Neither output is differentiated: the gradient is the torch backend's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mcore_entropy.backends.pytorch.arithmetic import target_logit_of
from mcore_entropy.statistics import LOWEST_DIFFERENCE, PartialStatistics, Wanted

# What the operator's documentation allows in one call.
MOST_ROWS = 200_000


def why_not_fused() -> str | None:
    """What keeps the operator from being called; None when nothing does."""
    if not hasattr(torch.ops.npu, "npu_cross_entropy_loss"):
        return "torch has no operator npu::npu_cross_entropy_loss; torch-npu brings it, once it is imported"
    return None


def fused_tile_statistics(z: Tensor, target: Tensor | None, wanted: Wanted) -> PartialStatistics:
    """`tile_statistics_` of scaled logits [n, v], fp32, with the operator; the tile stays what it is."""
    tokens, columns = z.shape
    if tokens == 0 or columns == 0:
        return PartialStatistics.empty(tokens, wanted, like=z)
    maximum, largest = z.max(1)
    log_sum, log_p = _operator(z, largest)
    # A tile that is -inf everywhere has no softmax; its sums are 0, and merging takes its maximum.
    empty = maximum == -math.inf
    log_sum = torch.where(empty, 0.0, log_sum)
    log_p = torch.where(empty.unsqueeze(1), LOWEST_DIFFERENCE, log_p).clamp_(min=LOWEST_DIFFERENCE)
    sum_exp = torch.where(empty, 0.0, log_sum.exp())
    centred = centred_squared = exp_squared = None
    if wanted.centred or wanted.exp_squared:  # a log-prob alone needs none of the tile's p
        p = log_p.exp()
        difference = log_p.add_(log_sum.unsqueeze(1))
        if wanted.exp_squared:
            exp_squared = sum_exp * sum_exp * torch.linalg.vecdot(p, p)
        if wanted.centred:
            centred = sum_exp * torch.linalg.vecdot(p, difference)
        if wanted.centred_squared:
            centred_squared = sum_exp * torch.linalg.vecdot(p, difference.square_())
    return PartialStatistics(
        maximum=maximum,
        sum_exp=sum_exp,
        target_logit=target_logit_of(z, target) if wanted.target else None,
        centred=centred,
        exp_squared=exp_squared,
        centred_squared=centred_squared,
    )


def _operator(z: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """(loss [n], log_prob [n, v]) of fp32 logits, at most `MOST_ROWS` rows a call."""
    assert z.dtype == torch.float32  # its outputs are rounded to the input's dtype
    losses, log_probs = [], []
    for rows, labels in zip(z.split(MOST_ROWS), label.split(MOST_ROWS), strict=True):
        loss, log_prob, _, _ = torch.ops.npu.npu_cross_entropy_loss(
            rows.contiguous(), labels, reduction="none"
        )
        losses.append(loss)
        log_probs.append(log_prob)
    if len(losses) == 1:
        return losses[0], log_probs[0]
    return torch.cat(losses), torch.cat(log_probs)

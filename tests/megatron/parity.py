"""How near a step of a tiny GPT is to the truth, and what its loss is, for tests that compare heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_entropy import EntropyConfig, TokenStatistics
from tests.megatron.tiny_gpt import Batch, Step

# How much further from the truth than the stock head: both are sums of a few thousand rounded terms.
MULTIPLE = 2.0
# Rounding of the largest entry, in ulp: where the stock head happens to be exact.
FLOOR_ULP = 16


def swap(core: Any, config: EntropyConfig) -> Any:
    from mcore_entropy import swap_output_layer

    return swap_output_layer(core, config)


def statistics_loss(coefficient: float, output: TokenStatistics, batch: Batch) -> tuple[Tensor, Any]:
    """Masked mean of -log_prob - coefficient * entropy."""
    assert isinstance(output, TokenStatistics)
    assert output.entropy is not None
    mask, count = batch.loss_mask, batch.loss_mask.sum()
    loss = ((-output.log_probs - coefficient * output.entropy) * mask).sum() / count
    entropy = (output.entropy * mask).sum() / count
    return loss, {"loss": loss.detach().clone(), "entropy": entropy.detach().clone()}


def dense_loss(coefficient: float, logits: Tensor, batch: Batch) -> tuple[Tensor, Any]:
    """The same from logits [b, s, V]."""
    log_p = torch.log_softmax(logits.double(), -1)
    log_probs = log_p.gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1)
    return statistics_loss(coefficient, TokenStatistics(log_probs, -(log_p.exp() * log_p).sum(-1)), batch)


def forward_without_labels(module: Any, batch: Batch) -> Any:
    return module(batch.tokens, batch.position_ids, batch.attention_mask)


def errors(step: Step, expected: Step) -> dict[str, float]:
    """The largest error of each loss and gradient, relative to its largest entry."""
    assert step.gradients.keys() == expected.gradients.keys()
    pairs = {name: (gradient, expected.gradients[name]) for name, gradient in step.gradients.items()}
    for name in step.losses[0]:
        values = [
            torch.stack([report[name] for report in losses]) for losses in (step.losses, expected.losses)
        ]
        pairs[name] = values[0], values[1]
    return {
        name: ((ours.double() - right.double()).abs().max() / right.abs().max()).item()
        for name, (ours, right) in pairs.items()
    }


def assert_as_near_as(
    yardstick: dict[str, float],
    ours: dict[str, float],
    floor: float = FLOOR_ULP * torch.finfo(torch.float32).eps,
) -> None:
    """Our `errors` are within MULTIPLE of those of the stock head, or of eager fp32; a NaN is not."""
    too_far = {
        name: (error, yardstick.get(name, 0.0))
        for name, error in ours.items()
        if not error <= MULTIPLE * yardstick.get(name, 0.0) + floor
    }
    assert not too_far, f"(error, the yardstick's) of {too_far}"

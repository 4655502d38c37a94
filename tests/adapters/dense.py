"""What swapped Hugging Face models are compared with: a batch, their own logits, and gradients by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.adapters.tiny_models import VOCABULARY

COEFFICIENT = 0.3


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :3] = -100
    return ids, labels


def dense(model: Any, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, log-probs and entropy from the model's own logits, in fp64."""
    output = model(input_ids=ids)
    log_p = output.logits.double().log_softmax(-1)
    target = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    counted = target != -100
    log_probs = log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1) * counted
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss = -(log_probs.sum() + COEFFICIENT * (entropy * counted).sum()) / counted.sum()
    if getattr(output, "aux_loss", None) is not None:
        loss = loss + model.router_aux_loss_coef * output.aux_loss
    return loss, log_probs, entropy


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Those of `loss` alone, of the parameters that get one."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative to the largest entry of all; infinite for a NaN. Both have the same names."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    errors = [(found[name] - value).abs().max().nan_to_num(nan=torch.inf) for name, value in expected.items()]
    return max(map(float, errors)) / largest

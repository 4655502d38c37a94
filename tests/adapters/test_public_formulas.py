"""One step of policy optimisation, with the formulas that TRL and verl publish and with a swapped head.

Where they are right, in fp32 and on whole logits, both have to give the same loss and gradients. (In bf16
they take the entropy of rounded logits, and some of their functions drop its gradient.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'mcore-entropy[hf]'")

import mcore_entropy as me
from mcore_entropy.adapters.huggingface import swap_lm_head
from tests.adapters.dense import batch, gradients, largest_error
from tests.adapters.tiny_models import tiny_model

IDS, _ = batch()
RESPONSE = (torch.arange(9) >= 3).expand(2, -1)  # in the places of the tokens
ADVANTAGE = torch.tensor([[0.7], [-1.2]])
TEMPERATURE, COEFFICIENT = 0.8, 0.05
# The policy that sampled, a little off the one that is trained.
OLD_LOG_PROBS = -4.5 + 0.3 * torch.randn(2, 8, generator=torch.Generator().manual_seed(4))


def policy_loss(log_probs: Tensor, entropy: Tensor) -> Tensor:
    """Clipped ratio and entropy bonus, means over the response's tokens; everything [b, s - 1]."""
    mask = RESPONSE[:, 1:]
    ratio = (log_probs - OLD_LOG_PROBS).exp()
    gain = torch.minimum(ratio * ADVANTAGE, ratio.clamp(0.8, 1.2) * ADVANTAGE)
    return -((gain + COEFFICIENT * entropy) * mask).sum() / mask.sum()


def trl(model: Any) -> tuple[Tensor, Tensor]:
    """Log-softmax and pick; minus the sum of p times ln p."""
    logits = model(input_ids=IDS).logits[:, :-1] / TEMPERATURE
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, IDS[:, 1:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def verl(model: Any) -> tuple[Tensor, Tensor]:
    """The picked logit and the mean logit, each beside the log-sum-exp."""
    logits = model(input_ids=IDS).logits[:, :-1] / TEMPERATURE
    lse = logits.logsumexp(-1)
    picked = logits.gather(-1, IDS[:, 1:, None]).squeeze(-1)
    return picked - lse, lse - (logits.softmax(-1) * logits).sum(-1)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
@pytest.mark.parametrize("formulas", [trl, verl])
def test_a_step(architecture: str, formulas: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
    stock, model = tiny_model(architecture), tiny_model(architecture)
    handle = swap_lm_head(model, me.EntropyConfig(temperature=TEMPERATURE))
    with handle.request(mask=RESPONSE):
        output = model(input_ids=IDS, labels=IDS)
    ours = policy_loss(output.log_probs[:, :-1], output.entropy[:, :-1])
    theirs = policy_loss(*formulas(stock))
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)
    assert largest_error(gradients(model, ours), gradients(stock, theirs)) <= 2e-6

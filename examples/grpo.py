"""GRPO's parts: answers sampled in groups, their advantages, and the gradients of the clipped loss.

b answers on this data-parallel rank, s tokens of prompt and answer. What belongs to a token's prediction
(log-prob, entropy, the mask of the answer) lies where it is made, one place before the token.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, NamedTuple

import sums
import torch
from gpt import ModelInputs, causal_mask
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor

from mcore_entropy import TokenStatistics
from mcore_entropy.rl import entropy_statistics, next_token_targets, sequence_mean, token_mean
from mcore_entropy.swap_handle import SwapHandle

# Standard deviations of rewards are at least 0.3 in a group that is not all right or all wrong.
ADVANTAGE_EPSILON = 1e-4
HIGH_ENTROPY = 1.0  # nats


def model_inputs(tokens: Tensor) -> ModelInputs:
    """Prompts with answers [b, s]; only the answers' tokens count."""
    length = tokens.size(1)
    return ModelInputs(
        tokens=tokens,
        labels=next_token_targets(tokens),  # none at the last place
        loss_mask=next_token_targets(sums.answer_mask(tokens), ignore_index=False),
        position_ids=torch.arange(length, device=tokens.device).expand_as(tokens),
        attention_mask=causal_mask(length, tokens.device),
    )


@dataclass(frozen=True)
class Policy:
    """A GPT, wrapped or not, whose head was swapped."""

    model: Any
    handle: SwapHandle
    temperature: float

    def statistics(self, inputs: ModelInputs, *, entropy: bool) -> TokenStatistics:
        """Of the answers' tokens, [b, s]; the others are 0 and cost the head nothing."""
        with self.handle.request(mask=inputs.loss_mask, temperature=self.temperature, entropy=entropy):
            return self.model(inputs.tokens, inputs.position_ids, inputs.attention_mask, labels=inputs.labels)

    @torch.no_grad()
    def log_probs(self, inputs: ModelInputs) -> Tensor:
        """[b, s], without a graph and without the entropy."""
        return self.statistics(inputs, entropy=False).log_probs

    @torch.no_grad()
    def logits(self, tokens: Tensor, places: slice = slice(None)) -> Tensor:
        """[b, places, V], gathered on every rank: without labels the swapped model is the stock one."""
        length = tokens.size(1)
        positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        shard = self.model(tokens, positions, causal_mask(length, tokens.device))[:, places]
        return gather_from_tensor_model_parallel_region(shard.float()) / self.temperature

    def sample(self, prompts: Tensor, noise: Tensor) -> Tensor:
        """Answers to the prompts, [b, s], by running the model anew for every token.

        All tensor-parallel ranks have the same logits, bit for bit, and the same noise: they write the same.

        Args:
            prompts: [b, prompt length].
            noise: exponentially distributed, [b, answer length, V].
        """
        tokens, done = prompts, torch.zeros_like(prompts[:, 0], dtype=torch.bool)
        for step in noise.unbind(1):
            # The largest of p / noise is a sample of p.
            chosen = (self.logits(tokens, slice(-1, None))[:, 0] - step.log()).argmax(-1)
            tokens = torch.cat([tokens, chosen.masked_fill(done, sums.PADDING)[:, None]], 1)
            done = done | (chosen == sums.END)
        return tokens


@dataclass(frozen=True)
class Rollout:
    """Answers and what the updates need to know of them. Rows of a group follow each other."""

    tokens: Tensor  # [b, s]
    rewards: Tensor  # [b]
    advantages: Tensor  # [b]
    old_log_probs: Tensor  # [b, s], of the policy that wrote the answers
    reference_log_probs: Tensor  # [b, s]

    def parts(self, number: int) -> list[Rollout]:
        """Equal parts, one for each update."""
        columns = [getattr(self, name).chunk(number) for name in self.__dataclass_fields__]
        return [Rollout(*part) for part in zip(*columns, strict=True)]


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Each reward less its group's mean, in units of the group's standard deviation; [b] to [b].

    In a group with equal rewards they are exactly 0, and so are the gradients of its tokens.
    """
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True, correction=0) + ADVANTAGE_EPSILON)).view(-1)


def collect(policy: Policy, reference: Policy, prompts: Tensor, noise: Tensor, group_size: int) -> Rollout:
    """Answers of the policy to the prompts, which lie in groups of equal ones."""
    tokens = policy.sample(prompts, noise)
    rewards = sums.rewards(tokens).to(tokens.device)
    inputs = model_inputs(tokens)
    return Rollout(
        tokens=tokens,
        rewards=rewards,
        advantages=group_advantages(rewards, group_size),
        old_log_probs=policy.log_probs(inputs),
        reference_log_probs=reference.log_probs(inputs),
    )


class Means(NamedTuple):
    """Over the answers' tokens on all ranks; detached scalars."""

    loss: Tensor
    entropy: Tensor  # nats
    high_entropy: Tensor  # tokens with an entropy above HIGH_ENTROPY
    kl: Tensor  # nats, estimated, to the reference
    clip_fraction: Tensor  # tokens whose ratio the clip cut off
    zero_gradient: Tensor  # tokens that cost the head nothing in backward


def compute_gradients(policy: Policy, part: Rollout, args: argparse.Namespace, entropy_coeff: float) -> Means:
    """Leaves in main_grad the gradients of the loss over the parts of all ranks.

    Loss of a token: -min(ratio A, clip(ratio) A) + kl_coeff KL - entropy_coeff entropy. The config has
    calculate_per_token_loss, so that Megatron's DDP adds up the gradients of ranks, and does not average.
    """
    assert isinstance(policy.model, DistributedDataParallel)
    policy.model.zero_grad_buffer()
    inputs = model_inputs(part.tokens)
    statistics = policy.statistics(inputs, entropy=True)
    log_probs, entropy = statistics.log_probs, statistics.entropy
    log_probs.retain_grad()
    entropy.retain_grad()

    ratio = (log_probs - part.old_log_probs).exp()
    advantages = part.advantages[:, None]
    low, high = 1 - args.clip_ratio[0], 1 + args.clip_ratio[-1]
    losses = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    ahead = part.reference_log_probs - log_probs
    kl = ahead.exp() - 1 - ahead  # never negative, and right in the mean over samples
    if args.kl_coeff:
        losses = losses + args.kl_coeff * kl
    if entropy_coeff:
        losses = losses - entropy_coeff * entropy

    groups = (parallel_state.get_data_parallel_group(),)
    mean = sequence_mean if args.loss == "sequence-mean" else token_mean
    loss = mean(losses, inputs.loss_mask, groups=groups)
    loss.backward()
    finalize_model_grads([policy.model])

    clipped = torch.where(advantages > 0, ratio > high, (ratio < low) & (advantages < 0))
    without = torch.ones_like(clipped)
    for gradient in (log_probs.grad, entropy.grad):
        without = without if gradient is None else without & (gradient == 0)
    with torch.no_grad():
        kl, clipped, without = (
            token_mean(values.float(), inputs.loss_mask, groups=groups) for values in (kl, clipped, without)
        )
        measured = entropy_statistics(entropy, inputs.loss_mask, threshold=HIGH_ENTROPY, groups=groups)
    return Means(loss.detach(), measured.mean, measured.share_above, kl, clipped, without)


@dataclass
class EntropyBonus:
    """The entropy coefficient: fixed, or with a target adapted after every iteration.

    Below the target it grows by `step`, above it shrinks by as much, and it is never negative.
    """

    coefficient: float
    target: float | None
    step: float

    def observe(self, entropy: float) -> None:
        if self.target is not None:
            change = self.step if entropy < self.target else -self.step
            self.coefficient = max(0.0, self.coefficient + change)

"""GRPO's parts: the reward, the advantages, sampling, and gradients against a loss written anew in fp64."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("megatron.core")

from tests.examples.running import ROOT
from tests.ranks import run_ranks

sys.path.insert(0, str(ROOT / "examples"))

import sums

TEMPERATURE = 0.7
CLIP = (0.2, 0.28)
ROWS = 8


@pytest.mark.parametrize(
    ("prompt", "answer", "earned"),
    [
        (b"12=", b"3+9\n", 1),
        (b"12=", b"9+3\n", 1),
        (b"07=", b"1+1+1+4\n", 1),
        (b"12=", b"3+8\n", 0),
        (b"12=", b"3+9", 0),  # without its end
        (b"09=", b"9\n", 0),  # no sum
        (b"12=", b"0+3+9\n", 0),
        (b"12=", b"12+0\n", 0),
        (b"05=", b"1+1+1+1+1\n", 0),  # five digits
        (b"12=", b"+3+9\n", 0),
        (b"12=", b"3+9\n\n", 0),
        (b"12=", b"", 0),
    ],
)
def test_reward(prompt: bytes, answer: bytes, earned: int) -> None:
    assert sums.reward(prompt, answer) == earned


def test_solved_problems_are_rewarded_and_their_mask_covers_the_answer() -> None:
    rows = sums.examples(50, torch.Generator().manual_seed(0))
    assert rows.shape == (50, sums.LENGTH)
    assert sums.rewards(rows).tolist() == [1.0] * 50
    for row, mask in zip(rows.tolist(), sums.answer_mask(rows).tolist(), strict=True):
        written = bytes(token for token, counts in zip(row, mask, strict=True) if counts)
        assert bytes(row).rstrip(b"\0") == bytes(row[:3]) + written
    endless = torch.full((1, sums.LENGTH), ord("1"))
    assert sums.answer_mask(endless).tolist() == [[False] * 3 + [True] * 8]
    assert sums.rewards(torch.cat([rows[:1, :3], endless[:, 3:]], 1)).tolist() == [0.0]


def test_every_number_has_many_right_answers() -> None:
    written = ("+".join(digits) for terms in (2, 3, 4) for digits in product("123456789", repeat=terms))
    answers = [f"{text}\n".encode() for text in written]
    right = [sum(sums.reward(b"%02d=" % number, answer) for answer in answers) for number in sums.NUMBERS]
    assert (min(right), max(right)) == (14, 525)


def test_advantages_are_within_the_group() -> None:
    import grpo

    rewards = torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1])
    advantages = grpo.group_advantages(rewards, 4)
    assert advantages[4:8].tolist() == [0, 0, 0, 0]
    for start in (0, 8):
        group = rewards[start : start + 4].tolist()
        mean, deviation = statistics.fmean(group), statistics.pstdev(group)
        expected = [(value - mean) / (deviation + 1e-4) for value in group]
        assert advantages[start : start + 4].tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("target", "expected"), [(None, [0.01] * 4), (0.6, [0.0, 0.02, 0.04, 0.02])])
def test_the_coefficient_is_fixed_or_follows_its_target(target: float | None, expected: list[float]) -> None:
    import grpo

    bonus = grpo.EntropyBonus(0.01, target, step=0.02)
    seen = []
    for entropy in (0.9, 0.5, 0.5, 0.7):  # above the target, where 0 is the least, below, below, above
        bonus.observe(entropy)
        seen.append(bonus.coefficient)
    assert seen == pytest.approx(expected)


# --- on ranks -------------------------------------------------------------------------------------


class Case(NamedTuple):
    """What to compute, and on how many tensor-parallel ranks; the others are data-parallel."""

    loss: str
    kl_coeff: float
    entropy_coeff: float
    tensor_parallel: int = 1

    def arguments(self) -> argparse.Namespace:
        model = dict(num_layers=2, hidden_size=32, num_attention_heads=4, seed=5, bf16=False)
        model |= dict(vocab_size=sums.VOCABULARY, seq_length=sums.LENGTH, sequence_parallel=False)
        return argparse.Namespace(
            **model,
            untie_embeddings_and_output_weights=False,
            tensor_model_parallel_size=self.tensor_parallel,
            loss=self.loss,
            clip_ratio=list(CLIP),
            kl_coeff=self.kl_coeff,
        )


@contextmanager
def megatron(tensor_parallel: int) -> Iterator[Any]:
    import launch

    world = launch.World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    with launch.megatron(world, tensor_parallel, seed=5):
        yield world


def rollout_columns() -> list[Tensor]:
    """Tokens, rewards, advantages, and old and reference log-probs like those of an untrained model."""
    generator = torch.Generator().manual_seed(3)
    tokens = sums.examples(ROWS, generator)
    tokens[2, 3:] = ord("7")  # an answer without an end
    advantages = torch.randn(ROWS, generator=generator)
    advantages[1] = 0
    shape = (ROWS, sums.LENGTH)
    old, reference = (torch.rand(shape, generator=generator) - 6.0 for _ in range(2))
    return [tokens, torch.zeros(ROWS), advantages, old, reference]


def noise() -> Tensor:
    return torch.empty(ROWS, sums.ANSWER_LENGTH, sums.VOCABULARY).exponential_(
        generator=torch.Generator().manual_seed(8)
    )


def policy_of(case: Case, world: Any) -> Any:
    import gpt
    import grpo

    from mcore_entropy import EntropyConfig, swap_output_layer

    args = case.arguments()
    config = gpt.transformer_config(args)
    model = gpt.build_model(args, config, world)
    handle = swap_output_layer(model, EntropyConfig())
    return grpo.Policy(gpt.wrap_for_training(model, config), handle, TEMPERATURE)


def whole(shard: Tensor, parameter: Any) -> Tensor:
    """A parameter's values or gradient, of which the tensor-parallel ranks have shards."""
    from megatron.core import parallel_state

    if not getattr(parameter, "tensor_model_parallel", False):
        return shard.clone()
    group = parallel_state.get_tensor_model_parallel_group()
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return torch.cat(shards, parameter.partition_dim)


def gradients(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
    """By the example: weights, gradients and means."""
    import grpo
    from megatron.core import parallel_state

    with megatron(case.tensor_parallel) as world:
        policy = policy_of(case, world)
        parts = world.size // case.tensor_parallel
        mine = [c.chunk(parts)[parallel_state.get_data_parallel_rank()] for c in rollout_columns()]
        means = grpo.compute_gradients(policy, grpo.Rollout(*mine), case.arguments(), case.entropy_coeff)
        parameters = dict(policy.model.module.named_parameters())
        weights = {name: whole(p.detach(), p) for name, p in parameters.items()}
        found = {name: whole(p.main_grad, p) for name, p in parameters.items()}
    return weights, found, {name: float(value) for name, value in means._asdict().items()}


def dense_gradients(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
    """By the stock model's logits on one rank, and GRPO's loss token by token in fp64."""
    import gpt

    with megatron(1) as world:
        args = case.arguments()
        model = gpt.build_model(args, gpt.transformer_config(args), world)
        tokens, _, advantages, old, reference = rollout_columns()
        positions = torch.arange(sums.LENGTH).expand_as(tokens)
        forbidden = ~torch.ones(1, 1, sums.LENGTH, sums.LENGTH).tril().bool()
        log_p = (model(tokens, positions, forbidden).double() / TEMPERATURE).log_softmax(-1)

        rows: list[list[Tensor]] = []
        clipped, idle, kls, entropies = [], [], [], []
        for b, row in enumerate(tokens.tolist()):
            end = row.index(10) if 10 in row else len(row) - 1
            rows.append([])
            for t in range(3, end + 1):  # the token that is predicted one place before
                log_prob, entropy = log_p[b, t - 1, row[t]], torch.special.entr(log_p[b, t - 1].exp()).sum()
                ratio, advantage = (log_prob - old[b, t - 1]).exp(), advantages[b].item()
                limited = min(max(ratio.item(), 1 - CLIP[0]), 1 + CLIP[1])
                cut = limited * advantage < ratio.item() * advantage
                term = -(limited if cut else ratio) * advantage
                kl = (reference[b, t - 1] - log_prob).exp() - (reference[b, t - 1] - log_prob) - 1
                rows[-1].append(term + case.kl_coeff * kl - case.entropy_coeff * entropy + 0 * log_prob)
                clipped.append(cut)
                idle.append((cut or advantage == 0) and not case.kl_coeff and not case.entropy_coeff)
                kls.append(kl.item())
                entropies.append(entropy.item())
        if case.loss == "token-mean":
            loss = sum(sum(row) for row in rows) / sum(map(len, rows))
        else:
            loss = sum(sum(row) / len(row) for row in rows) / len(rows)
        loss.backward()
        means = {
            "loss": loss.item(),
            "entropy": statistics.fmean(entropies),
            "high_entropy": statistics.fmean(entropy > 1 for entropy in entropies),
            "kl": statistics.fmean(kls),
            "clip_fraction": statistics.fmean(clipped),
            "zero_gradient": statistics.fmean(idle),
        }
        parameters = dict(model.named_parameters())
        weights = {name: p.detach().clone() for name, p in parameters.items()}
        return weights, {name: p.grad.clone() for name, p in parameters.items()}, means


@pytest.mark.parametrize("tensor_parallel", [2, 1])
@pytest.mark.parametrize(
    "case",
    [Case("token-mean", 0.3, 0.1), Case("sequence-mean", 0.3, 0.1), Case("token-mean", 0.0, 0.0)],
    ids=str,
)
def test_gradients_are_those_of_one_dense_process(case: Case, tensor_parallel: int) -> None:
    """On two ranks, tensor- or data-parallel."""
    [(weights, expected, expected_means)] = run_ranks(1, dense_gradients, case)
    assert 0.1 < expected_means["clip_fraction"] < 0.9  # the clip is put to the test
    for found_weights, found, means in run_ranks(
        2, gradients, case._replace(tensor_parallel=tensor_parallel)
    ):
        assert means == pytest.approx(expected_means, rel=1e-5)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.equal(found_weights[name], weights[name]), name
            # Sums of fp32 in other orders, as a share of the largest entry; seen: 4e-7.
            worst = ((found[name] - gradient).abs().max() / gradient.abs().max()).item()
            assert worst < 5e-6, f"{name}: off by {worst:.1e} of its largest entry"


def sampled(case: Case) -> Tensor:
    with megatron(case.tensor_parallel) as world:
        return policy_of(case, world).sample(rollout_columns()[0][:, :3], noise())


def sampled_densely(case: Case) -> Tensor:
    """Row by row, by the whole distribution of the stock model; p / noise is largest at a sample of p."""
    import gpt

    with megatron(1) as world, torch.no_grad():
        args = case.arguments()
        model = gpt.build_model(args, gpt.transformer_config(args), world)
        rows = []
        for prompt, of_row in zip(rollout_columns()[0][:, :3].tolist(), noise(), strict=True):
            row = list(prompt)
            while len(row) < sums.LENGTH and row[-1] != 10:
                length = len(row)
                forbidden = ~torch.ones(1, 1, length, length).tril().bool()
                logits = model(torch.tensor([row]), torch.arange(length)[None], forbidden)[0, -1]
                p = (logits.double() / TEMPERATURE).softmax(-1)
                row.append(int((p / of_row[length - 3]).argmax()))
            rows.append(row + [0] * (sums.LENGTH - len(row)))
        return torch.tensor(rows)


def test_every_tensor_parallel_rank_samples_what_one_process_samples() -> None:
    case = Case("token-mean", 0.0, 0.0)
    [expected] = run_ranks(1, sampled_densely, case)
    for tokens in run_ranks(2, sampled, case._replace(tensor_parallel=2)):
        assert torch.equal(tokens, expected)

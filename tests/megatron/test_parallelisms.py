"""Layouts beside tensor and pipeline parallelism: different data a rank, virtual stages, experts.

The truth is that of test_head_parity: one rank, the stock head's logits, and from them the loss in fp64. A
swapped model must be as near to it as the stock head in the same layout is to a truth without entropy.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_entropy import EntropyConfig
from mcore_entropy.megatron.loss import EntropyLoss, masked_token_sum
from tests.megatron.parity import (
    assert_as_near_as,
    dense_loss,
    errors,
    forward_without_labels,
    statistics_loss,
    swap,
)
from tests.megatron.tiny_gpt import (
    Batch,
    Step,
    TinyGPT,
    build,
    build_chunks,
    gather,
    make_batch,
    model_parallel,
    needs_megatron,
    train,
)
from tests.ranks import run_ranks

pytestmark = needs_megatron

COEFFICIENT = 0.3


# --- data parallelism: other micro-batches on the other rank --------------------------------------


def batch_of_this_rank(options: TinyGPT, index: int) -> Batch:
    from megatron.core import parallel_state

    ranks = parallel_state.get_data_parallel_world_size()
    return make_batch(options, ranks * index + parallel_state.get_data_parallel_rank())


def added_up(reports: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Each [sum, count] over micro-batches and ranks, as Megatron's training step adds them."""
    total = {name: torch.stack([report[name] for report in reports]).sum(0) for name in reports[0]}
    for pair in total.values():
        dist.all_reduce(pair)
    return total


# The mean over all tokens of the step: Megatron divides gradients by the tokens of all ranks.
PER_TOKEN = TinyGPT(transformer={"calculate_per_token_loss": True})


def data_parallel_step(options: TinyGPT, head: str) -> Step:
    config = EntropyConfig(entropy_coeff=COEFFICIENT, head=head, chunk_size=6)  # type: ignore[arg-type]
    loss = EntropyLoss(config)
    with model_parallel(options):
        model = build(options, prepare=functools.partial(swap, config=config))
        step = train(
            model,
            loss_function=lambda output, batch: loss(batch.loss_mask, output),
            batch_of=batch_of_this_rank,
        )
        return gather(model, Step([added_up(step.losses)], step.gradients))


def dense_sum(coefficient: float, logits: Tensor, batch: Batch) -> tuple[Any, ...]:
    """The sum over the tokens that count, their number, and [sum, count] of each."""
    log_p = torch.log_softmax(logits.double(), -1)
    lm_loss = -log_p.gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    mask = batch.loss_mask
    tokens = mask.sum()

    def pair(per_token: Tensor) -> Tensor:
        return torch.stack([(per_token.detach() * mask).sum(), tokens])

    loss = ((lm_loss - coefficient * entropy) * mask).sum()
    return loss, tokens.int(), {"lm loss": pair(lm_loss), "entropy": pair(entropy)}


def dense_data_parallel_truth(options: TinyGPT, coefficient: float) -> Step:
    """One rank, all four micro-batches."""
    with model_parallel(options):
        model = build(options)
        step = train(
            model,
            forward=forward_without_labels,
            loss_function=functools.partial(dense_sum, coefficient),
            num_microbatches=4,
        )
        return gather(model, Step([added_up(step.losses)], step.gradients))


def stock_data_parallel_step(options: TinyGPT) -> Step:
    with model_parallel(options):
        model = build(options)
        step = train(
            model,
            loss_function=lambda output, batch: masked_token_sum(batch.loss_mask, output),
            batch_of=batch_of_this_rank,
        )
        return gather(model, Step([added_up(step.losses)], step.gradients))


@pytest.mark.parametrize("head", ["fused", "logits"])
def test_data_parallel_ranks_with_different_data(head: str) -> None:
    right, plain = (run_ranks(1, dense_data_parallel_truth, PER_TOKEN, c)[0] for c in (COEFFICIENT, 0.0))
    ours = run_ranks(2, data_parallel_step, PER_TOKEN, head)[0]
    for name in ("lm loss", "entropy"):
        assert ours.losses[0][name][1] == right.losses[0][name][1]  # tokens of both ranks
    stock = run_ranks(2, stock_data_parallel_step, PER_TOKEN)[0]
    assert_as_near_as(errors(ours, right), errors(stock, plain))


# --- virtual stages and experts -------------------------------------------------------------------


def stock_step(options: TinyGPT) -> Step:
    with model_parallel(options):
        model = build_chunks(options, lambda cores: None)
        return gather(model, train(model))


def truth_step(options: TinyGPT, coefficient: float) -> Step:
    with model_parallel(options):
        model = build(options)
        loss = functools.partial(dense_loss, coefficient)
        return gather(model, train(model, forward=forward_without_labels, loss_function=loss))


def swapped_step(options: TinyGPT) -> Step:
    config = EntropyConfig(chunk_size=6)
    with model_parallel(options):
        model = build_chunks(options, functools.partial(swap, config=config))
        heads = [type(getattr(chunk.core, "output_layer", None)).__name__ for chunk in model]
        assert heads.count("EntropyAwareOutputLayer") == sum(chunk.core.post_process for chunk in model)
        return gather(model, train(model, loss_function=functools.partial(statistics_loss, COEFFICIENT)))


FOUR_LAYERS = TinyGPT(layers=4)
EXPERTS = TinyGPT(experts=4)
LAYOUTS = {
    "vpp": (2, FOUR_LAYERS, dict(pipeline_parallel=2, virtual_stages=2)),
    "vpp-tied": (2, replace(FOUR_LAYERS, tied=True), dict(pipeline_parallel=2, virtual_stages=2)),
    "ep2": (2, EXPERTS, dict(expert_parallel=2)),
    "tp2-ep2-sp": (4, EXPERTS, dict(tensor_parallel=2, expert_parallel=2, sequence_parallel=True)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_entropy_and_gradients(layout: str) -> None:
    ranks, whole, parallel = LAYOUTS[layout]
    right, plain = (run_ranks(1, truth_step, whole, c)[0] for c in (COEFFICIENT, 0.0))
    ours, stock = (run_ranks(ranks, s, replace(whole, **parallel))[0] for s in (swapped_step, stock_step))
    assert_as_near_as(errors(ours, right), errors(stock, plain))

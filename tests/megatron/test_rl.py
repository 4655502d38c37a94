"""Megatron-RL's log-probs and entropy from the swapped head, against stock logits in fp64 autograd."""

from __future__ import annotations

import argparse
import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_entropy.megatron.arguments import add_entropy_args
from tests.megatron.parity import assert_as_near_as, errors, forward_without_labels
from tests.megatron.tiny_gpt import Batch, Step, TinyGPT, build, gather, model_parallel, needs_megatron, train
from tests.ranks import run_ranks

pytestmark = needs_megatron


@pytest.fixture(scope="module", autouse=True)
def _needs_output_processor() -> None:
    from megatron.core.models.gpt.gpt_model import GPTModel

    if "output_processor" not in inspect.signature(GPTModel.forward).parameters:
        pytest.skip("GPTModel has no output_processor before megatron-core 0.18")


def arguments(*given: str, weight: float = 0.0) -> argparse.Namespace:
    """Megatron's, as far as the functions for RL read them."""
    parsed = add_entropy_args(argparse.ArgumentParser()).parse_args(["--entropy-aware-output-layer", *given])
    parsed.grpo_entropy_term_weight = weight
    return parsed


def loss_of(
    log_probs: Tensor, entropy: Tensor, weight: float, batch: Batch
) -> tuple[Tensor, dict[str, Tensor]]:
    """A policy gradient with an entropy bonus, over the tokens that the mask counts."""
    mask = batch.loss_mask[:, 1:]
    advantages = torch.tensor([[1.0], [-0.5]], dtype=log_probs.dtype)
    loss = (-(advantages * log_probs + weight * entropy) * mask).sum() / mask.sum()
    mean = (entropy.detach() * mask).sum() / mask.sum()
    return loss, {"loss": loss.detach().clone(), "entropy": mean}


def dense_loss(weight: float, logits: Tensor, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Any]:
    """Of logits [b, s, V] or this rank's columns of them."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    log_p = gather_from_tensor_model_parallel_region(logits).to(dtype)[:, :-1].log_softmax(-1)
    log_probs = log_p.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    return loss_of(log_probs, -(log_p.exp() * log_p).sum(-1), weight, batch)


def dense_step(options: TinyGPT, weight: float, dtype: torch.dtype) -> Step:
    with model_parallel(options):
        model = build(options)
        loss = functools.partial(dense_loss, weight, dtype=dtype)
        return gather(model, train(model, forward=forward_without_labels, loss_function=loss))


def our_step(options: TinyGPT, weight: float) -> Step:
    from mcore_entropy.megatron.rl import entropy_of, swap_for_rl, token_log_probs

    args = arguments(weight=weight)

    def forward(module: Any, batch: Batch) -> Tensor:
        return token_log_probs(
            module, batch.tokens, batch.position_ids, packed_seq_params=None, no_grad=False, args=args
        )

    def loss(log_probs: Tensor, batch: Batch) -> tuple[Tensor, Any]:
        assert log_probs.dtype == torch.float32
        entropy = entropy_of(log_probs, torch.full_like(log_probs, torch.nan))
        assert entropy.requires_grad == bool(weight), "a weight of 0 must keep no graph"
        return loss_of(log_probs, entropy, weight, batch)

    with model_parallel(options):
        model = build(options, prepare=lambda core: swap_for_rl([core], args))
        return gather(model, train(model, forward=forward, loss_function=loss))


LAYOUTS = {
    "tp2": TinyGPT(tensor_parallel=2),
    "tp2-sp-tied": TinyGPT(tensor_parallel=2, sequence_parallel=True, tied=True),
    "pp2": TinyGPT(pipeline_parallel=2),
    "tp2-mtp": TinyGPT(tensor_parallel=2, mtp_layers=1),
}


@pytest.mark.parametrize("weight", [0.0, 0.2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_entropy_and_gradients(layout: str, weight: float) -> None:
    options = LAYOUTS[layout]
    ranks = options.tensor_parallel * options.pipeline_parallel
    alone = TinyGPT(tied=options.tied, mtp_layers=options.mtp_layers)
    truth = run_ranks(1, dense_step, alone, weight, torch.float64)[0]
    stock = errors(run_ranks(ranks, dense_step, options, weight, torch.float32)[0], truth)
    ours = errors(run_ranks(ranks, our_step, options, weight)[0], truth)
    assert_as_near_as(stock, ours)


def reference_forward(options: TinyGPT) -> tuple[bool, bool, Tensor]:
    """Of a reference model, at temperature 0.5: a graph? an entropy? and the error of the log-probs."""
    from mcore_entropy.megatron.rl import entropy_of, swap_for_rl, token_log_probs
    from tests.megatron.tiny_gpt import make_batch

    batch, args = make_batch(options), arguments("--entropy-temperature", "0.5")
    with model_parallel(options):
        stock = build(options).core
        logits = stock(batch.tokens, batch.position_ids, batch.attention_mask, runtime_gather_output=True)
        model = build(options, prepare=lambda core: swap_for_rl([core], args))
        log_probs = token_log_probs(
            model.core, batch.tokens, batch.position_ids, packed_seq_params=None, no_grad=True, args=args
        )
    right = (2 * logits.double()[:, :-1]).log_softmax(-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    otherwise = torch.zeros(())
    return log_probs.requires_grad, entropy_of(log_probs, otherwise) is not otherwise, log_probs - right


def test_reference_model_keeps_no_graph_and_computes_no_entropy() -> None:
    for graph, entropy, error in run_ranks(2, reference_forward, TinyGPT(tensor_parallel=2)):
        assert not graph and not entropy
        assert error.abs().max() < 1e-5


@pytest.mark.parametrize(
    "given", ["--entropy-coeff 0.1", "--entropy-metrics max_prob", "--entropy-log-interval 2"]
)
def test_arguments_of_the_pretraining_loss_are_refused(given: str) -> None:
    from mcore_entropy.megatron.rl import swap_for_rl

    with pytest.raises(ValueError, match="in RL"):
        swap_for_rl([], arguments(*given.split()))


def test_a_model_without_an_output_processor_is_refused_when_it_is_swapped() -> None:
    from mcore_entropy.megatron.rl import swap_for_rl

    with pytest.raises(ValueError, match="model: expected a GPTModel, got one without _postprocess"):
        swap_for_rl([torch.nn.Linear(2, 2)], arguments())


def test_without_the_arguments_everything_stays() -> None:
    from mcore_entropy.megatron.rl import entropy_head_wanted, entropy_of, log_probs_dtype

    none = argparse.Namespace()
    assert not entropy_head_wanted(none)
    assert log_probs_dtype(none, torch.bfloat16) == torch.bfloat16
    assert log_probs_dtype(arguments(), torch.bfloat16) == torch.float32
    term = torch.ones(1)
    assert entropy_of(torch.zeros(1), term) is term

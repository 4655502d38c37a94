"""A GPTModel with the swapped head against an unsharded one whose loss is written out on dense logits.

The truth knows nothing of this package: the stock head's logits, and in fp64 their log_softmax, entropy
and loss by autograd. (All of Megatron's body cannot run in fp64: attention and norms insist on fp32.) A
model with the swapped head, sharded or not, must be as near to it as the same model with the stock head,
in loss, entropy and the gradient of every parameter.
"""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
from torch import Tensor

from mcore_entropy import EntropyConfig
from tests.megatron.parity import (
    assert_as_near_as,
    dense_loss,
    errors,
    forward_without_labels,
    statistics_loss,
    swap,
)
from tests.megatron.tiny_gpt import (
    Step,
    TinyGPT,
    build,
    forward_with_labels,
    gather,
    make_batch,
    model_parallel,
    needs_megatron,
    train,
)
from tests.ranks import run_ranks

pytestmark = needs_megatron


def truth_step(options: TinyGPT, coefficient: float) -> Step:
    with model_parallel(options):
        model = build(options)
        return gather(
            model,
            train(
                model,
                forward=forward_without_labels,
                loss_function=functools.partial(dense_loss, coefficient),
            ),
        )


def stock_step(options: TinyGPT) -> Step:
    with model_parallel(options):
        model = build(options)
        return gather(model, train(model))


def swapped_step(options: TinyGPT, coefficient: float, config: EntropyConfig) -> Step:
    with model_parallel(options):
        model = build(options, prepare=functools.partial(swap, config=config))
        return gather(model, train(model, loss_function=functools.partial(statistics_loss, coefficient)))


@functools.cache
def truth(tied: bool, coefficient: float) -> Step:
    return run_ranks(1, truth_step, TinyGPT(tied=tied), coefficient)[0]


LAYOUTS = {
    "one-rank": TinyGPT(),
    "one-rank-tied": TinyGPT(tied=True),
    "tp2": TinyGPT(tensor_parallel=2),
    "tp2-tied": TinyGPT(tensor_parallel=2, tied=True),
    "tp2-sp": TinyGPT(tensor_parallel=2, sequence_parallel=True),
    "tp2-sp-tied": TinyGPT(tensor_parallel=2, sequence_parallel=True, tied=True),
    "pp2": TinyGPT(pipeline_parallel=2),
    "pp2-tied": TinyGPT(pipeline_parallel=2, tied=True),
    "tp2-pp2-sp-tied": TinyGPT(tensor_parallel=2, pipeline_parallel=2, sequence_parallel=True, tied=True),
    "tp4": TinyGPT(tensor_parallel=4),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_entropy_and_gradients(layout: str) -> None:
    options = LAYOUTS[layout]
    ranks = options.tensor_parallel * options.pipeline_parallel
    stock = errors(run_ranks(ranks, stock_step, options)[0], truth(options.tied, 0.0))
    for coefficient in (0.0, 0.3):
        # An odd chunk size: chunks do not end where sequences or shards do.
        step = run_ranks(ranks, swapped_step, options, coefficient, EntropyConfig(chunk_size=6))[0]
        ours = errors(step, truth(options.tied, coefficient))
        assert_as_near_as(stock, ours)


def bf16_steps(options: TinyGPT) -> tuple[Step, Step]:
    config = EntropyConfig()
    return stock_step(options), swapped_step(options, 0.0, config)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_float16module_bf16(sequence_parallel: bool) -> None:
    options = TinyGPT(tensor_parallel=2, sequence_parallel=sequence_parallel, dtype=torch.bfloat16)
    right = truth(False, 0.0)
    stock, swapped = (errors(step, right) for step in run_ranks(2, bf16_steps, options)[0])
    assert swapped.pop("entropy") < 2**-8  # one bf16 ulp of weights, relative
    assert_as_near_as(stock, swapped, floor=2**-9)


class KeptTracker(dict):  # type: ignore[type-arg]
    """MTP's loss tracker, which `model_parallel` clears when it ends: keeps the losses of the step."""

    losses: Tensor

    def clear(self) -> None:
        name = "values" if "values" in self else "loss_values"  # from megatron-core 0.19 on
        self.losses = self[name].clone()
        super().clear()


def mtp_steps(options: TinyGPT) -> list[tuple[Step, Tensor]]:
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    results = []
    for step in (stock_step, functools.partial(swapped_step, coefficient=0.0, config=EntropyConfig())):
        with mock.patch.object(MTPLossLoggingHelper, "tracker", KeptTracker()) as tracker:
            results.append((step(options), tracker.losses))
    return results


MTP_LAYOUTS = {
    "one-rank": TinyGPT(mtp_layers=2),
    "tp2-sp-tied": TinyGPT(tensor_parallel=2, sequence_parallel=True, mtp_layers=2, tied=True),
}


@pytest.mark.parametrize("layout", MTP_LAYOUTS)
def test_mtp_loss_stays_what_it_was(layout: str) -> None:
    options = MTP_LAYOUTS[layout]
    (stock, stock_losses), (swapped, swapped_losses) = run_ranks(options.tensor_parallel, mtp_steps, options)[
        0
    ]
    assert stock_losses.abs().min() > 0
    torch.testing.assert_close(swapped_losses, stock_losses, rtol=1e-6, atol=0)
    assert any(name.startswith("mtp.") and g.abs().max() > 0 for name, g in stock.gradients.items())
    for name, gradient in stock.gradients.items():
        difference = (swapped.gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert difference < 2e-6, f"{name}: {difference}"


def padded_vocabulary_step(options: TinyGPT) -> list[Tensor]:
    """Log-probs and entropy of the head, without and with the true vocabulary size, and dense ones."""
    batch = make_batch(options)
    results = []
    with model_parallel(options):
        logits = forward_without_labels(build(options).core, batch).detach()
        for vocab_size in (None, options.vocab_size):
            config = EntropyConfig(vocab_size=vocab_size)
            model = build(options, prepare=functools.partial(swap, config=config))
            output = forward_with_labels(model.core, batch)
            results += [output.log_probs.detach(), output.entropy.detach()]
        if options.tensor_parallel > 1:
            from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

            logits = gather_from_tensor_model_parallel_region(logits)
    for columns in (options.padded_vocab_size, options.vocab_size):
        log_p = torch.log_softmax(logits[..., :columns].double(), -1)
        results += [log_p.gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)]
    return results


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_padding_counts_as_megatron_does_unless_vocab_size_is_given(tensor_parallel: int) -> None:
    results = run_ranks(tensor_parallel, padded_vocabulary_step, TinyGPT(tensor_parallel=tensor_parallel))
    for values in results:
        ours, dense = values[:4], values[4:]
        for mine, right in zip(ours, dense, strict=True):
            torch.testing.assert_close(mine.double(), right, rtol=2e-6, atol=2e-6)
        assert (dense[0] - dense[2]).abs().max() > 1e-3  # else the comparison says nothing

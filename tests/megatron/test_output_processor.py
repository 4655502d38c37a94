"""The layer's `target=` from an output_processor of the caller's (megatron-core 0.18 and newer).

The truth is an unsharded model with the stock head whose output_processor takes a log_softmax of the logits
in fp64; what error is allowed is that of the same in fp32, on gathered logits in the layout under test.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_entropy import EntropyConfig, TokenStatistics
from tests.megatron.parity import assert_as_near_as, errors, statistics_loss, swap
from tests.megatron.tiny_gpt import (
    Batch,
    Step,
    TinyGPT,
    build,
    gather,
    make_batch,
    model_parallel,
    needs_megatron,
    train,
)
from tests.ranks import run_ranks

try:
    from megatron.core.models.gpt import GPTModel
except ImportError:
    GPTModel = None

pytestmark = [
    needs_megatron,
    pytest.mark.skipif(
        GPTModel is not None and "output_processor" not in inspect.signature(GPTModel.forward).parameters,
        reason="this megatron-core has no output_processor; 0.18 and newer do",
    ),
]

COEFFICIENT = 0.3


def temperature_of(labels: Tensor) -> Tensor:
    return 0.5 + (labels % 7) / 7


def fused(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Any, labels: Tensor, context: Tensor, **_: Any
) -> TokenStatistics:
    statistics, bias = output_layer(
        hidden_states, weight=output_weight, target=labels.t(), temperature=context.t()
    )
    assert bias is None
    assert statistics.log_probs.shape == labels.t().shape
    return TokenStatistics(statistics.log_probs.t(), statistics.entropy.t())


def dense(
    dtype: torch.dtype,
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Any,
    labels: Tensor,
    context: Tensor,
    **_: Any,
) -> TokenStatistics:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    logits, _bias = output_layer(hidden_states, weight=output_weight)
    logits = gather_from_tensor_model_parallel_region(logits).transpose(0, 1).to(dtype)
    log_p = torch.log_softmax(logits / context.unsqueeze(-1), -1)
    log_probs = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return TokenStatistics(log_probs, -(log_p.exp() * log_p).sum(-1))


def forward_with_processor(processor: Any, module: Any, batch: Batch) -> Any:
    return module(
        batch.tokens,
        batch.position_ids,
        batch.attention_mask,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        output_processor=processor,
        output_processor_context=temperature_of(batch.labels),
    )


def step(options: TinyGPT, processor: Any, config: EntropyConfig | None = None) -> Step:
    """Of the stock head where there is no config."""
    with model_parallel(options):
        model = build(options, prepare=lambda core: None if config is None else swap(core, config))
        return gather(
            model,
            train(
                model,
                forward=functools.partial(forward_with_processor, processor),
                loss_function=functools.partial(statistics_loss, COEFFICIENT),
            ),
        )


@functools.cache
def truth(tied: bool, mtp_layers: int) -> Step:
    options = TinyGPT(tied=tied, mtp_layers=mtp_layers)
    return run_ranks(1, step, options, functools.partial(dense, torch.float64))[0]


LAYOUTS = {
    "one-rank": TinyGPT(),
    "one-rank-mtp": TinyGPT(mtp_layers=2),
    "tp2-sp": TinyGPT(tensor_parallel=2, sequence_parallel=True),
    "tp2-sp-tied-mtp": TinyGPT(tensor_parallel=2, sequence_parallel=True, tied=True, mtp_layers=2),
    "pp2-tied": TinyGPT(pipeline_parallel=2, tied=True),  # the first stage has no head
    "tp2-pp2-sp": TinyGPT(tensor_parallel=2, pipeline_parallel=2, sequence_parallel=True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_entropy_and_gradients(layout: str) -> None:
    options = LAYOUTS[layout]
    ranks = options.tensor_parallel * options.pipeline_parallel
    right = truth(options.tied, options.mtp_layers)
    eager = errors(run_ranks(ranks, step, options, functools.partial(dense, torch.float32))[0], right)
    ours = errors(run_ranks(ranks, step, options, fused, EntropyConfig(chunk_size=6))[0], right)
    assert_as_near_as(eager, ours)


def request_around_a_processor(options: TinyGPT) -> None:
    with model_parallel(options):
        core = build(options).core
        handle = swap(core, EntropyConfig())
        with handle.request(temperature=2.0):
            forward_with_processor(fused, core, make_batch(options))


def test_a_request_around_a_processor_is_an_error_because_it_would_be_ignored() -> None:
    with pytest.raises(RuntimeError, match="request: expected the model to be called with labels"):
        run_ranks(1, request_around_a_processor, TinyGPT())

"""Training steps by Megatron's optimizers: the swapped model's weights and gradients beside the stock's.

Stock and swapped models see the same micro-batches, others on each data-parallel rank.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_entropy import EntropyConfig
from tests.megatron.parity import assert_as_near_as, errors, statistics_loss, swap
from tests.megatron.test_head_parity import truth
from tests.megatron.test_parallelisms import batch_of_this_rank
from tests.megatron.tiny_gpt import (
    Step,
    TinyGPT,
    TinyModel,
    build,
    gather,
    masked_mean,
    model_parallel,
    needs_megatron,
    parameters,
    train,
)
from tests.ranks import run_ranks

pytestmark = needs_megatron

LOSS_SCALE = 256.0


def model_and_optimizer(options: TinyGPT, swapped: bool) -> tuple[TinyModel, Any]:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    prepare = functools.partial(swap, config=EntropyConfig(chunk_size=6)) if swapped else lambda core: None
    model = build(options, prepare=prepare)
    # The optimizer is told of it from megatron-core 0.14 on; DistributedDataParallel always was.
    gathers = {"overlap_param_gather"} & {field.name for field in dataclasses.fields(OptimizerConfig)}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.1,
            # Large: Adam would follow the sign, and so the last bits, of gradients near zero.
            adam_eps=0.1,
            weight_decay=0.0,
            clip_grad=1.0,
            fp16=options.dtype == torch.float16,
            loss_scale=LOSS_SCALE if options.dtype == torch.float16 else None,
            params_dtype=options.dtype,
            use_distributed_optimizer=options.data_parallel.get("use_distributed_optimizer", False),
            **{name: options.data_parallel.get(name, False) for name in gathers},
        ),
        [model.wrapped],
    )
    model.core.config.grad_scale_func = optimizer.scale_loss
    model.core.config.no_sync_func = model.wrapped.no_sync  # gradients are reduced in the last micro-batch
    return model, optimizer


def step(model: TinyModel, optimizer: Any, swapped: bool) -> Step:
    """One step of training: reports, and the unscaled gradients of this rank."""
    result = train(
        model,
        loss_function=functools.partial(statistics_loss, 0.0) if swapped else masked_mean,
        batch_of=batch_of_this_rank,
    )
    scale = optimizer.get_loss_scale()
    gradients = {name: gradient / scale for name, gradient in result.gradients.items()}
    updated, _, _ = optimizer.step()
    assert updated
    return Step(result.losses, gradients)


def losses_and_weights(options: TinyGPT, swapped: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """This rank's losses of three steps, and the weights after them."""
    with model_parallel(options):
        model, optimizer = model_and_optimizer(options, swapped)
        losses = [report["loss"] for _ in range(3) for report in step(model, optimizer, swapped).losses]
        if options.data_parallel.get("overlap_param_gather"):
            model.wrapped.start_param_sync(force_sync=True)  # the next forward would have gathered them
        weights = {name: parameter.detach().float() for name, parameter in parameters(model).items()}
        return torch.stack(losses), gather(model, Step([{}], weights)).gradients


OVERLAP = TinyGPT(
    data_parallel={
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_size": 4096,  # elements: some ten buckets
    }
)


def test_distributed_optimizer_with_overlapped_reduce_and_gather() -> None:
    stock, ours, plain = (
        run_ranks(2, losses_and_weights, options, swapped)
        for options, swapped in ((OVERLAP, False), (OVERLAP, True), (TinyGPT(), True))
    )
    for rank in (0, 1):
        for losses, weights in (stock[rank], plain[rank]):
            torch.testing.assert_close(ours[rank][0], losses, rtol=2e-6, atol=0)
            torch.testing.assert_close(ours[rank][1], weights, rtol=0, atol=2e-6)
    assert (ours[0][0] - ours[1][0]).abs().min() > 1e-3  # the ranks had other data


def fp16_step(options: TinyGPT, swapped: bool) -> Step:
    """Whole unscaled gradients, and an optimizer step that found them finite."""
    with model_parallel(options):
        model, optimizer = model_and_optimizer(options, swapped)
        return gather(model, step(model, optimizer, swapped))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_float16module_fp16_with_a_loss_scale(sequence_parallel: bool) -> None:
    options = TinyGPT(tensor_parallel=2, sequence_parallel=sequence_parallel, dtype=torch.float16)
    right = truth(False, 0.0)
    stock, swapped = (errors(run_ranks(2, fp16_step, options, s)[0], right) for s in (False, True))
    assert swapped.pop("entropy") < 2**-11  # one fp16 ulp of weights, relative
    assert_as_near_as(stock, swapped, floor=2**-12)

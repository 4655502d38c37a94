"""A swapped GPTModel in Megatron's deterministic_mode: twenty steps of the same bits, on one rank and more.

Megatron-LM's --deterministic-mode also switches torch's deterministic algorithms on; the option of a
config alone, which is all that Megatron-core has, must do.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from mcore_entropy import EntropyConfig, parallel
from tests.determinism.calls import assert_same_results
from tests.deterministic import deterministic_algorithms
from tests.megatron.parity import dense_loss, errors, forward_without_labels, statistics_loss, swap
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

RUNS = 20
ON = {"deterministic_mode": True}
SETTINGS = {
    # Ranks that tensor parallelism leaves over are data-parallel.
    "one rank": (TinyGPT(transformer=ON), EntropyConfig()),
    "two ranks": (TinyGPT(tensor_parallel=2, sequence_parallel=True, transformer=ON), EntropyConfig()),
    "four ranks": (
        TinyGPT(tensor_parallel=4, sequence_parallel=True, transformer=ON),
        EntropyConfig(chunk_size=8, metrics=("varentropy",)),
    ),
    "four ranks, given logits": (TinyGPT(tensor_parallel=4, transformer=ON), EntropyConfig(head="logits")),
}


def refuse(*_: object) -> object:
    raise AssertionError("statistics of four ranks were all-reduced: the network decides in which order")


def bits(step: Step) -> dict[str, Tensor]:
    reports = {f"{name} {i}": value for i, report in enumerate(step.losses) for name, value in report.items()}
    return {**reports, **step.gradients}


def steps(options: TinyGPT, config: EntropyConfig, with_torch: bool) -> tuple[list[dict[str, Tensor]], Step]:
    """On every rank: the bits of all runs, and the first one gathered."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(model_parallel(options))
        stack.enter_context(deterministic_algorithms(with_torch))
        if options.tensor_parallel > 2:
            stack.enter_context(mock.patch.object(parallel, "StatisticsReduction", refuse))
        model = build(options, prepare=partial(swap, config=config))
        loss = partial(statistics_loss, 0.1)
        first, *others = (train(model, loss_function=loss, num_microbatches=1) for _ in range(RUNS))
        return [bits(step) for step in (first, *others)], gather(model, first)


def dense_step(options: TinyGPT) -> Step:
    """The stock model with the loss of its logits in fp64."""
    with model_parallel(options):
        model = build(options)
        loss = partial(dense_loss, 0.1)
        step = train(model, forward=forward_without_labels, loss_function=loss, num_microbatches=1)
        return gather(model, step)


@pytest.mark.parametrize(
    ("name", "with_torch"),
    [*((name, False) for name in SETTINGS), ("one rank", True), ("four ranks", True)],
    ids=lambda value: {False: "config alone", True: "torch's algorithms too"}.get(value, value),
)
def test_twenty_steps(name: str, with_torch: bool) -> None:
    options, config = SETTINGS[name]
    by_rank = run_ranks(4, steps, options, config, with_torch)
    for rank, ((first, *others), _) in enumerate(by_rank):
        for number, other in enumerate(others, 1):
            assert_same_results(other, first, f"step {number}, rank {rank}")
    expected = run_ranks(4, dense_step, TinyGPT())[0]
    wrong = {n: error for n, error in errors(by_rank[0][1], expected).items() if error > 1e-5}
    assert not wrong, f"relative to fp64: {wrong}"


def mode_of_rank_one(options: TinyGPT) -> str:
    with model_parallel(options), mock.patch.dict(os.environ, MCORE_ENTROPY_CHECKS="1"):
        core: Any = build(options, prepare=partial(swap, config=EntropyConfig())).core
        core.config.deterministic_mode = dist.get_rank() == 1
        try:
            forward_with_labels(core, make_batch(options))
        except ValueError as error:
            return str(error)
        return "fine"


def test_checks_name_the_mode_of_one_rank() -> None:
    for message in run_ranks(4, mode_of_rank_one, TinyGPT(tensor_parallel=4), timeout=60.0):
        assert message.startswith("execution: expected the same on every rank"), message

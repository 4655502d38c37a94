"""The output layer under `torch.compile(fullgraph=True)` in a model that Megatron trains: eager's bits."""

from __future__ import annotations

import functools

import pytest
import torch

from mcore_entropy import EntropyConfig
from tests.comparison import assert_same_bits
from tests.conftest import build_tables_of_dynamo
from tests.megatron.parity import statistics_loss, swap
from tests.megatron.tiny_gpt import Step, TinyGPT, build, model_parallel, needs_megatron, train
from tests.ranks import run_ranks

pytestmark = needs_megatron


def step(options: TinyGPT, fusion: bool, backend: str | None) -> Step:
    build_tables_of_dynamo()  # before Megatron on the CPU replaces some of torch.cuda's functions
    with model_parallel(options):
        model = build(options, prepare=functools.partial(swap, config=EntropyConfig(chunk_size=16)))
        layer = model.core.output_layer
        layer.gradient_accumulation_fusion = fusion
        if backend is not None:
            torch._dynamo.reset()
            layer.forward = torch.compile(layer.forward, fullgraph=True, backend=backend)
        return train(model, loss_function=functools.partial(statistics_loss, 0.1))


def compare(options: TinyGPT) -> None:
    for fusion in (False, True):
        eager, ours = (step(options, fusion, backend) for backend in (None, "aot_eager"))
        for one, two in zip(ours.losses, eager.losses, strict=True):
            for name in two:
                assert_same_bits(one[name], two[name], name)
        for name, gradient in eager.gradients.items():
            assert_same_bits(ours.gradients[name], gradient, f"gradient of {name}, fusion {fusion}")


@pytest.mark.parametrize(("sequence_parallel", "tied"), [(False, False), (True, True)])
def test_compiled_output_layer(sequence_parallel: bool, tied: bool) -> None:
    options = TinyGPT(tensor_parallel=2, sequence_parallel=sequence_parallel, tied=tied, dtype=torch.bfloat16)
    run_ranks(2, compare, options)

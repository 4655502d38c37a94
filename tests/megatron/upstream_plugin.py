"""A pytest plugin: Megatron-LM's own unit tests, with this package's head and loss in Megatron's places.

    PYTHONPATH=<Megatron-LM>:<here>:<here>/tests/megatron \
        torchrun --nproc-per-node 1 -m pytest -p upstream_plugin tests/unit_tests/models/test_gpt_model.py

- Every GPTModel has its output layer swapped as soon as it is built; called with labels it gives minus the
  log-prob, where Megatron's tests expect the loss.
- Test modules find `EntropyAwareOutputLayer` under the name ColumnParallelLinear, and minus this package's
  log-prob under vocab_parallel_cross_entropy.

The summary says how often each was used, and why a model kept its stock head.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

from mcore_entropy import (
    EntropyConfig,
    TokenStatistics,
    swap_output_layer,
    vocab_parallel_log_probs_and_entropy,
)

COUNTS: collections.Counter[str] = collections.Counter()


def pytest_configure() -> None:
    from megatron.core.models.gpt.gpt_model import GPTModel

    GPTModel.__init__ = _then_swap(GPTModel.__init__)
    GPTModel.forward = _as_loss(GPTModel.forward)


def _then_swap(initialise: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(initialise)
    def build(model: Any, *args: Any, **keywords: Any) -> None:
        initialise(model, *args, **keywords)
        try:
            swap_output_layer(model, EntropyConfig())
        except ValueError as refusal:
            COUNTS[f"GPTModel left alone: {refusal}"] += 1
        else:
            COUNTS["GPTModel swapped"] += 1

    return build


def _as_loss(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def losses(*args: Any, **keywords: Any) -> Any:
        output = forward(*args, **keywords)
        if isinstance(output, TokenStatistics):
            COUNTS["forward with labels through our head"] += 1
            return -output.log_probs
        return output

    return losses


def _cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None
) -> Tensor:
    if label_smoothing:
        raise ValueError(f"label_smoothing: expected 0, which is all this package has, got {label_smoothing}")
    COUNTS["vocab_parallel_cross_entropy"] += 1
    return -vocab_parallel_log_probs_and_entropy(
        vocab_parallel_logits, target, entropy=False, tp_group=tp_group
    ).log_probs


@pytest.hookimpl
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    from mcore_entropy import EntropyAwareOutputLayer

    class Counted(EntropyAwareOutputLayer):  # type: ignore[misc, unused-ignore]
        def forward(self, *args: Any, **keywords: Any) -> Any:
            COUNTS["ColumnParallelLinear"] += 1
            return super().forward(*args, **keywords)

    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        if getattr(module, "ColumnParallelLinear", None) is ColumnParallelLinear:
            module.ColumnParallelLinear = Counted
            COUNTS[f"ColumnParallelLinear replaced in {module.__name__}"] += 1
        if hasattr(module, "vocab_parallel_cross_entropy"):
            module.vocab_parallel_cross_entropy = _cross_entropy


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.section("this package in Megatron's tests")
    for what, count in sorted(COUNTS.items()):
        terminalreporter.write_line(f"{count:5d}  {what}")

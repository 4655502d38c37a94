"""What a swap and its requests refuse, and that the model works after every refusal."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_entropy import EntropyConfig, TokenStatistics
from tests.megatron.test_swap import TP2, logits_of, swap
from tests.megatron.tiny_gpt import (
    TinyGPT,
    build,
    forward_with_labels,
    make_batch,
    model_parallel,
    needs_megatron,
)
from tests.ranks import run_ranks

pytestmark = needs_megatron


def misuse(options: TinyGPT) -> dict[str, str]:
    """What is said to each misuse; the model has to work after every one of them."""
    messages = {}
    batch = make_batch(options)

    def attempt(name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except (ValueError, RuntimeError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
        assert isinstance(forward_with_labels(core, batch), TokenStatistics)
        assert isinstance(logits_of(core, options), Tensor)

    with model_parallel(options):
        core = build(options).core
        handle = swap(core)
        hidden = torch.zeros(8, 2, 32)

        def request(inside: Callable[[], Any] | None = None, **keywords: Any) -> None:
            with handle.request(**keywords):
                inside() if inside else forward_with_labels(core, batch)

        attempt("[s, b] mask", lambda: request(mask=torch.ones(batch.labels.t().shape, dtype=torch.bool)))
        attempt("float mask", lambda: request(mask=batch.loss_mask))
        attempt("temperature", lambda: request(temperature=-1.0))
        attempt("no labels", lambda: request(lambda: logits_of(core, options), temperature=2.0))
        attempt("label", lambda: forward_with_labels(core, _with_label(batch, options.padded_vocab_size)))
        attempt("other config", lambda: swap(core, EntropyConfig(temperature=2.0)))
        attempt("mask without target", lambda: core.output_layer(hidden, mask=batch.loss_mask))
        attempt("entropy", lambda: request(entropy="no"))
        attempt("tied weight", lambda: core.output_layer(hidden, torch.zeros(3, 32), target=batch.labels.t()))
        core.output_layer.disable_grad_reduce = True
        with pytest.raises(ValueError, match="disable_grad_reduce"):
            forward_with_labels(core, batch)
        core.output_layer.disable_grad_reduce = False

        ours, core._postprocess = core._postprocess, lambda **arguments: ours(**arguments)
        attempt("restore under a wrapper", handle.restore)
        core._postprocess = ours
        layer = core.output_layer
        core.output_layer = torch.nn.Sequential(layer)  # wrapped, as LoRA does
        for call in (handle.restore, lambda: forward_with_labels(core, batch)):
            with pytest.raises(
                RuntimeError, match="output_layer: expected the one that was swapped, got torch"
            ):
                call()
        core.output_layer = layer
        layer.forward = layer.forward
        with pytest.raises(RuntimeError, match="restore: expected the output layer's own forward"):
            handle.restore()
        del layer.forward
        again = swap(core)
        again.restore()
        assert isinstance(forward_with_labels(core, batch), Tensor)
        with pytest.raises(RuntimeError, match="stock head was restored"), handle.request(temperature=2.0):
            pass
    return messages


def _with_label(batch: Any, label: int) -> Any:
    return SimpleNamespace(**{**vars(batch), "labels": torch.full_like(batch.labels, label)})


@pytest.mark.parametrize("options", [TinyGPT(), TP2], ids=["one-rank", "tp2"])
def test_misuse_is_named_on_every_rank_and_leaves_the_model_usable(options: TinyGPT) -> None:
    for messages in run_ranks(options.tensor_parallel, misuse, options):
        assert messages["[s, b] mask"].startswith("ValueError: mask: expected shape [b, s] = (2, 8)")
        assert messages["float mask"].startswith("ValueError: mask: expected dtype bool, got torch.float32")
        assert messages["temperature"].startswith("ValueError: temperature: expected a positive")
        assert messages["no labels"].startswith("RuntimeError: request: expected the model to be called")
        assert messages["label"].startswith("ValueError: target: expected values in [0, 64)")
        assert messages["other config"].startswith("ValueError: config: expected the one this model was")
        assert messages["mask without target"].startswith("ValueError: target: expected one together with")
        assert messages["entropy"].startswith("ValueError: entropy: expected True, False or None, got 'no'")
        assert messages["tied weight"].startswith("ValueError: weight: expected shape")
        assert messages["restore under a wrapper"].startswith("RuntimeError: restore: expected the model's")


def refusals(options: TinyGPT) -> dict[str, str]:
    messages = {}
    with model_parallel(options):
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear

        class LoRAColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
            pass

        def refused(name: str, change: Callable[[Any], Any]) -> None:
            core = build(options).core
            core = change(core) or core
            try:
                swap(core)
            except ValueError as error:
                messages[name] = str(error)
            if hasattr(core, "output_layer"):
                assert type(core.output_layer).__name__ != "EntropyAwareOutputLayer", name

        def wrap_head(core: Any) -> None:
            core.output_layer.__class__ = LoRAColumnParallelLinear

        refused("subclass", wrap_head)
        refused("wrapper", lambda core: setattr(core, "output_layer", torch.nn.Sequential(core.output_layer)))
        refused("deferred", lambda core: setattr(core.config, "defer_embedding_wgrad_compute", True))
        refused("1f1b", lambda core: setattr(core.config, "overlap_moe_expert_parallel_comm", True))
        refused("no head", lambda core: delattr(core, "output_layer"))
        refused("patched", lambda core: setattr(core, "compute_language_model_loss", lambda *_: None))
        refused("no model", lambda core: torch.nn.Linear(2, 2))
    return messages


def test_heads_that_would_be_bypassed_are_refused_by_name() -> None:
    messages = run_ranks(1, refusals, TinyGPT())[0]
    assert "LoRAColumnParallelLinear" in messages["subclass"]
    assert "torch.nn.modules.container.Sequential" in messages["wrapper"]
    assert "defer_embedding_wgrad_compute" in messages["deferred"]
    assert "compute_language_model_loss" in messages["patched"]
    assert "overlap_moe_expert_parallel_comm" in messages["1f1b"]
    assert "expected Megatron's ColumnParallelLinear, got builtins.NoneType" in messages["no head"]
    assert "Linear" in messages["no model"]


def transposed_mask_on_rank_one(options: TinyGPT) -> str:
    batch = make_batch(options)
    mask = batch.loss_mask.bool()
    with model_parallel(options), mock.patch.dict(os.environ, {"MCORE_ENTROPY_CHECKS": "1"}):
        core = build(options).core
        handle = swap(core)
        mask = mask.t().contiguous() if dist.get_rank() == 1 else mask
        with pytest.raises(ValueError, match="mask: expected shape") as error, handle.request(mask=mask):
            forward_with_labels(core, batch)
        return str(error.value)


def test_checks_name_a_request_that_one_rank_gets_wrong() -> None:
    first, second = run_ranks(2, transposed_mask_on_rank_one, TP2, timeout=60)
    assert "rank 1: mask" in first
    assert second.startswith("mask")


def test_the_config_is_checked() -> None:
    bad_values = {"temperature": 0.0, "chunk_size": 0, "vocab_size": True, "metrics": ("entropy",)}
    bad_values |= {"transform": "softcap", "execution": "torch", "ignore_index": None, "entropy": 1}
    for name, bad in bad_values.items():
        with pytest.raises(ValueError, match=name):
            EntropyConfig(**{name: bad})

"""HybridModel (megatron-core 0.18 and newer; MambaModel before) with the swapped head.

Its own layer specs are Transformer Engine's, so it is built here out of attention ("*") and MLP ("-") layers
of local modules, on the CPU. The truth is an unsharded one with the stock head, whose loss takes a
log_softmax of the logits in fp64; what error is allowed is that of the same in fp32, on gathered logits in
the layout under test.
"""

from __future__ import annotations

import functools
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
    forward_with_labels,
    gather,
    make_batch,
    model_parallel,
    needs_megatron,
    train,
)
from tests.ranks import run_ranks

try:
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
except ImportError:
    HybridModel = None

pytestmark = needs_megatron

COEFFICIENT = 0.3


def hybrid_model(config: Any, options: TinyGPT, _virtual_stage: int = 0) -> Any:
    """Two attention and two MLP layers, and as many more for each MTP layer."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    gpt = get_gpt_layer_local_spec()
    parts = gpt.submodules
    layers: dict[str, Any] = {
        "attention_layer": ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=parts.input_layernorm,
                self_attention=parts.self_attention,
                self_attn_bda=parts.self_attn_bda,
            ),
        ),
        "mlp_layer": ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=parts.pre_mlp_layernorm, mlp=parts.mlp, mlp_bda=parts.mlp_bda
            ),
        ),
    }
    if HybridModel is None:
        from megatron.core.models.mamba.mamba_model import MambaModel
        from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules

        kind, stack, submodules = MambaModel, MambaStack, MambaStackSubmodules
        pattern = {"hybrid_override_pattern": "*-*-"}
    else:
        kind, stack, submodules = HybridModel, HybridStack, HybridStackSubmodules
        halves = "|" if options.pipeline_parallel == 2 else ""
        pattern = {"hybrid_layer_pattern": f"*-{halves}*-" + "/*-" * options.mtp_layers}
        if options.mtp_layers:
            layers["mtp_block_spec"] = get_gpt_mtp_block_spec(config, gpt, use_transformer_engine=False)
    return kind(
        config,
        # The stack's own last norm is Transformer Engine's.
        ModuleSpec(module=stack, params={"post_layer_norm": False}, submodules=submodules(**layers)),
        vocab_size=options.padded_vocab_size,
        max_sequence_length=options.sequence_length,
        # The forward of 0.13's MambaModel calls its rotary embedding with too few arguments.
        position_embedding_type="none" if HybridModel is None else "rope",
        share_embeddings_and_output_weights=options.tied,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **pattern,
    )


class DenseLoss:
    """Dense statistics in the place of a stock model's loss. MTP layers, whose labels differ, keep it."""

    def __init__(self, dtype: torch.dtype, core: Any) -> None:
        self.dtype, self.stock = dtype, core.compute_language_model_loss
        self.labels: Tensor | None = None
        core.compute_language_model_loss = self

    def __call__(self, labels: Tensor, logits: Tensor) -> Any:
        if labels is not self.labels:
            return self.stock(labels, logits)
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        logits = gather_from_tensor_model_parallel_region(logits).transpose(0, 1)
        log_p = torch.log_softmax(logits.to(self.dtype), -1)
        log_probs = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return TokenStatistics(log_probs, -(log_p.exp() * log_p).sum(-1))

    def forward(self, module: Any, batch: Batch) -> Any:
        self.labels = batch.labels
        return forward(module, batch)


def forward(module: Any, batch: Batch) -> Any:
    if HybridModel is not None:
        return forward_with_labels(module, batch)
    # MambaModel takes no loss_mask, which is for MTP layers.
    return module(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels)


def dense_step(options: TinyGPT, dtype: torch.dtype) -> Step:
    with model_parallel(options):
        model = build(options, functools.partial(DenseLoss, dtype), hybrid_model)
        loss = functools.partial(statistics_loss, COEFFICIENT)
        return gather(model, train(model, forward=model.prepared.forward, loss_function=loss))


def swapped_step(options: TinyGPT) -> Step:
    with model_parallel(options):
        config = EntropyConfig(chunk_size=6)
        model = build(options, functools.partial(swap, config=config), hybrid_model)
        loss = functools.partial(statistics_loss, COEFFICIENT)
        return gather(model, train(model, forward=forward, loss_function=loss))


@functools.cache
def truth(tied: bool, mtp_layers: int) -> Step:
    options = TinyGPT(layers=4, tied=tied, mtp_layers=mtp_layers)
    return run_ranks(1, dense_step, options, torch.float64)[0]


LAYOUTS = {
    "one-rank": TinyGPT(layers=4),
    "one-rank-mtp": TinyGPT(layers=4, mtp_layers=2),
    # The pattern of layers decides, not the config.
    "one-rank-mtp-only-in-config": TinyGPT(layers=4, transformer={"mtp_num_layers": 2}),
    "tp2": TinyGPT(layers=4, tensor_parallel=2),
    "tp2-sp-tied": TinyGPT(layers=4, tensor_parallel=2, sequence_parallel=True, tied=True),
    "tp2-sp-mtp": TinyGPT(layers=4, tensor_parallel=2, sequence_parallel=True, mtp_layers=2),
    "pp2-tied": TinyGPT(layers=4, pipeline_parallel=2, tied=True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_entropy_and_gradients(layout: str) -> None:
    options = LAYOUTS[layout]
    if options.mtp_layers and HybridModel is None:
        pytest.skip("MambaModel of megatron-core before 0.18 has no MTP layers")
    ranks = options.tensor_parallel * options.pipeline_parallel
    right = truth(options.tied, options.mtp_layers)
    eager = errors(run_ranks(ranks, dense_step, options, torch.float32)[0], right)
    ours = errors(run_ranks(ranks, swapped_step, options)[0], right)
    assert_as_near_as(eager, ours)


def stock_swapped_and_restored(options: TinyGPT) -> None:
    batch = make_batch(options)
    arguments = batch.tokens, batch.position_ids, batch.attention_mask
    with model_parallel(options):
        core = build(options, construct=hybrid_model).core
        attributes = list(vars(core))
        logits, losses = core(*arguments), core(*arguments, labels=batch.labels)
        handle = swap(core, EntropyConfig())
        assert torch.equal(core(*arguments), logits)
        by_keyword = core(*arguments, labels=batch.labels)
        by_position = core(*arguments, None, batch.labels)  # decoder_input comes before labels
        assert torch.equal(by_keyword.log_probs, by_position.log_probs)
        torch.testing.assert_close(-by_keyword.log_probs, losses, rtol=2e-6, atol=2e-6)
        with handle.request(temperature=2.0):
            assert (core(*arguments, labels=batch.labels).entropy > by_keyword.entropy).all()
        handle.restore()
        assert list(vars(core)) == attributes
        assert torch.equal(core(*arguments, labels=batch.labels), losses)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_labels_by_position_no_labels_and_back(tensor_parallel: int) -> None:
    run_ranks(tensor_parallel, stock_swapped_and_restored, TinyGPT(layers=4, tensor_parallel=tensor_parallel))


def refusals(options: TinyGPT) -> dict[str, str]:
    messages = {}
    with model_parallel(options):
        patched = build(options, construct=hybrid_model).core
        patched.forward = functools.partial(type(patched).forward, patched)
        unknown = torch.nn.Linear(2, 2)
        unknown.post_process = True
        for name, core in (("patched", patched), ("unknown", unknown)):
            try:
                swap(core, EntropyConfig())
            except ValueError as error:
                messages[name] = str(error)
    return messages


def test_what_is_not_the_models_own_is_refused() -> None:
    messages = run_ranks(1, refusals, TinyGPT(layers=4))[0]
    assert "own forward, got one that something else has put in its place" in messages["patched"]
    assert "a HybridModel or a MambaModel, got a Linear without _postprocess" in messages["unknown"]

"""Every known Hugging Face architecture: swapped, it gives what its own logits give, in fp64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'mcore-entropy[hf]'")

import transformers

import mcore_entropy as me
from mcore_entropy.adapters import architectures
from mcore_entropy.adapters.huggingface import known_architectures, register_architecture, swap_lm_head
from tests.adapters.dense import COEFFICIENT, batch, dense, gradients, largest_error
from tests.adapters.tiny_models import VOCABULARY, tiny_model


@pytest.mark.parametrize("architecture", known_architectures())
def test_values_and_gradients(architecture: str) -> None:
    stock = tiny_model(architecture).double()
    swapped = copy.deepcopy(stock)
    swap_lm_head(swapped, me.EntropyConfig(entropy_coeff=COEFFICIENT))
    ids, labels = batch()
    loss, log_probs, entropy = dense(stock, ids, labels)
    output = swapped(input_ids=ids, labels=labels)
    assert output.logits is None
    torch.testing.assert_close(output.log_probs, log_probs, rtol=0, atol=1e-12)
    torch.testing.assert_close(output.entropy, entropy, rtol=0, atol=1e-12)
    torch.testing.assert_close(output.loss, loss, rtol=1e-12, atol=0)
    assert largest_error(gradients(swapped, output.loss), gradients(stock, loss)) <= 1e-11


@pytest.mark.parametrize(
    "architecture",
    [
        "Gemma3ForCausalLM",
        "CohereForCausalLM",
        "GraniteForCausalLM",
        "FalconH1ForCausalLM",
        "HyperCLOVAXForCausalLM",
    ],
)
def test_a_wrong_transform_is_found(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the logits of fresh weights are too small to tell a softcap."""
    model = tiny_model(architecture)
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(std=1e-3)
    monkeypatch.setitem(architectures._TRANSFORMS, architecture, lambda _: me.LogitTransform())
    with pytest.raises(ValueError, match=f"expected {architecture} to do .* as registered"):
        swap_lm_head(model, me.EntropyConfig())
    assert model.lm_head(torch.zeros(1, 32)).shape == (1, VOCABULARY)


def test_a_transform_that_its_config_switches_off() -> None:
    """Gemma 3 has none by default."""
    model = tiny_model("Gemma3ForCausalLM", final_logit_softcapping=None)
    ids, labels = batch()
    loss, *_ = dense(model.double(), ids, labels)
    swap_lm_head(model, me.EntropyConfig(entropy_coeff=COEFFICIENT))
    torch.testing.assert_close(model(input_ids=ids, labels=labels).loss, loss, rtol=1e-12, atol=0)


def test_an_unknown_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = type(tiny_model("LlamaForCausalLM"))

    class FairyForCausalLM(llama):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 0.25
            return output

    stock = FairyForCausalLM(tiny_model("LlamaForCausalLM").config).double().eval()
    model = copy.deepcopy(stock)
    monkeypatch.setattr(architectures, "_TRANSFORMS", dict(architectures._TRANSFORMS))
    with pytest.raises(ValueError, match='register_architecture\\("FairyForCausalLM", lambda config'):
        swap_lm_head(model, me.EntropyConfig())
    register_architecture("FairyForCausalLM", lambda _: me.LogitTransform())
    with pytest.raises(ValueError, match="expected FairyForCausalLM to do LogitTransform"):
        swap_lm_head(model, me.EntropyConfig())
    register_architecture("FairyForCausalLM", lambda _: me.LogitTransform(scale=0.25))
    swap_lm_head(model, me.EntropyConfig(entropy_coeff=COEFFICIENT))
    ids, labels = batch()
    torch.testing.assert_close(
        model(input_ids=ids, labels=labels).loss, dense(stock, ids, labels)[0], rtol=1e-12, atol=0
    )


def test_logits_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = type(tiny_model("LlamaForCausalLM"))

    class InPlaceForCausalLM(llama):  # type: ignore[misc, valid-type]
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
            logits = self.lm_head(hidden)
            logits /= 4.0
            return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits)

    stock = InPlaceForCausalLM(tiny_model("LlamaForCausalLM").config).double().eval()
    model = copy.deepcopy(stock)
    monkeypatch.setitem(
        architectures._TRANSFORMS, "InPlaceForCausalLM", lambda _: me.LogitTransform(scale=0.25)
    )
    swap_lm_head(model, me.EntropyConfig(entropy_coeff=COEFFICIENT))
    ids, labels = batch()
    expected = dense(stock, ids, labels)[0]
    torch.testing.assert_close(model(input_ids=ids, labels=labels).loss, expected, rtol=1e-12, atol=0)


def test_the_check_needs_no_weights() -> None:
    """On the meta device, as FSDP users make models, and inside autocast."""
    config = tiny_model("Gemma2ForCausalLM").config
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        model = transformers.Gemma2ForCausalLM(config)
        swap_lm_head(model, me.EntropyConfig())
    model.to_empty(device="cpu")
    model.load_state_dict(tiny_model("Gemma2ForCausalLM").state_dict())
    model.model.rotary_emb = tiny_model("Gemma2ForCausalLM").model.rotary_emb  # its buffers are in no state
    model.model.embed_tokens.embed_scale = tiny_model("Gemma2ForCausalLM").model.embed_tokens.embed_scale
    ids, labels = batch()
    stock = tiny_model("Gemma2ForCausalLM")(input_ids=ids, labels=labels)
    torch.testing.assert_close(model(input_ids=ids, labels=labels).loss, stock.loss)

"""A head with adapters of PEFT: its statistics are those of the whole head, or it is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'mcore-entropy[hf]'")
peft = pytest.importorskip("peft", reason="needs peft")

import mcore_entropy as me
from mcore_entropy.adapters.huggingface import swap_lm_head
from tests.adapters.dense import COEFFICIENT, batch, dense, gradients
from tests.adapters.tiny_models import tiny_model

IDS, LABELS = batch()


def with_lora(architecture: str = "LlamaForCausalLM", **lora: Any) -> Any:
    """An fp64 model with adapters that are not 0, as fresh ones are."""
    options = {"r": 4, "lora_alpha": 6, "target_modules": ["lm_head", "q_proj"], **lora}
    model = peft.get_peft_model(tiny_model(architecture), peft.LoraConfig(**options)).double().eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model


def assert_values(model: Any, stock: Any) -> tuple[Tensor, Tensor]:
    """Returns both losses."""
    loss, log_probs, entropy = dense(stock, IDS, LABELS)
    output = model(input_ids=IDS, labels=LABELS)
    torch.testing.assert_close(output.log_probs, log_probs, rtol=0, atol=1e-12)
    torch.testing.assert_close(output.entropy, entropy, rtol=0, atol=1e-12)
    torch.testing.assert_close(output.loss, loss, rtol=1e-12, atol=0)
    return output.loss, loss


def assert_as_dense(model: Any, stock: Any) -> None:
    ours, theirs = assert_values(model, stock)
    found, expected = gradients(model, ours), gradients(stock, theirs)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "lora",
    [{}, {"use_rslora": True}, {"lora_bias": True}, {"bias": "all"}],
    ids=["plain", "rank-stabilised", "lora_bias", "bias"],
)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "CohereForCausalLM"])
@pytest.mark.filterwarnings("ignore:.*(lora_bias|tie|tied):")
def test_lora_on_the_head(architecture: str, lora: dict[str, Any]) -> None:
    stock = with_lora(architecture, **lora)
    assert "lora_A" in dict(stock.get_base_model().lm_head.named_children())
    model = copy.deepcopy(stock)
    handle = swap_lm_head(model, me.EntropyConfig(entropy_coeff=COEFFICIENT))
    assert_as_dense(model, stock)
    assert_as_dense(copy.deepcopy(model), stock)
    with model.disable_adapter(), stock.disable_adapter():
        assert_values(model, stock)
    handle.restore()
    assert type(model.get_base_model().lm_head) is type(stock.get_base_model().lm_head)


def test_two_adapters_and_none() -> None:
    stock = with_lora()
    stock.add_adapter("other", peft.LoraConfig(r=2, target_modules=["lm_head"]))
    stock.double()
    model = copy.deepcopy(stock)
    swap_lm_head(model, me.EntropyConfig(entropy_coeff=COEFFICIENT))
    for active in (["default"], ["other"], ["default", "other"]):
        for m in (stock, model):
            m.base_model.set_adapter(active)
        assert_as_dense(model, stock)
    for m in (stock, model):
        m.merge_adapter()
    assert_values(model, stock)


def test_dropout() -> None:
    """The adapter's hidden states alone lose some, the same ones in forward and backward."""
    stock = with_lora(lora_dropout=0.5)
    model = copy.deepcopy(stock)
    swap_lm_head(model, me.EntropyConfig())
    losses = []
    for m in (stock, model):
        m.train()
        torch.manual_seed(5)
        losses.append(m(input_ids=IDS, labels=LABELS).loss.float())
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    assert abs(float(losses[1]) - float(model.eval()(input_ids=IDS, labels=LABELS).loss)) > 1e-3


def test_adapters_in_fp32_around_a_bf16_head() -> None:
    """PEFT's default; B is cast, as under autocast, and its gradient comes back in fp32."""
    model = tiny_model("LlamaForCausalLM").bfloat16()
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["lm_head"]))
    head = model.get_base_model().lm_head
    with torch.no_grad():
        head.lora_B["default"].weight.normal_(std=0.3)
    truth = copy.deepcopy(model).double()(input_ids=IDS, labels=LABELS).loss
    with_logits = model(input_ids=IDS, labels=LABELS).loss
    swap_lm_head(model, me.EntropyConfig())
    output = model(input_ids=IDS, labels=LABELS)
    assert abs(float(output.loss) - float(truth)) <= 2 * abs(float(with_logits) - float(truth)) + 1e-3
    output.loss.backward()
    assert head.lora_B["default"].weight.grad.dtype == torch.float32
    assert head.base_layer.weight.grad is None


def test_a_whole_head_of_the_adapter() -> None:
    """modules_to_save copies the head that was swapped."""
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    stock = peft.get_peft_model(tiny_model("LlamaForCausalLM"), lora).double()
    model = tiny_model("LlamaForCausalLM")
    swap_lm_head(model, me.EntropyConfig(entropy_coeff=COEFFICIENT))
    model = peft.get_peft_model(model, lora).double()
    model.load_state_dict(stock.state_dict())
    with torch.no_grad():
        for m in (stock, model):
            m.get_base_model().lm_head.modules_to_save["default"].weight.mul_(2.0)
    assert_as_dense(model, stock)


def test_refused() -> None:
    model = tiny_model("LlamaForCausalLM")
    swap_lm_head(model, me.EntropyConfig())
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(RuntimeError, match=r"expected the head that was swapped, got peft.*after the swap"):
        wrapped(input_ids=IDS, labels=LABELS)
    dora = with_lora(use_dora=True)
    swap_lm_head(dora, me.EntropyConfig())
    with pytest.raises(ValueError, match="expected plain LoRA, got the adapter 'default' with Dora"):
        dora(input_ids=IDS, labels=LABELS)
    lora = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    first = peft.get_peft_model(tiny_model("LlamaForCausalLM"), lora)
    with pytest.raises(ValueError, match=r"head: expected exactly a torch.nn.Linear.*ModulesToSaveWrapper"):
        swap_lm_head(first, me.EntropyConfig())

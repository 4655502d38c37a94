"""What the wrapping functions make units of, in models of every kind, and that gradients are one process's.

Causal LMs with their own head and with ours, critics, an encoder, an encoder-decoder, a value head around a
causal LM: the loss is the one each model gives, or one made of its logits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

pytest.importorskip("transformers", reason="needs transformers: pip install 'mcore-entropy[hf]'")

import transformers

import mcore_entropy as me
from mcore_entropy.adapters.fsdp import set_prefetch, wrap_fsdp1, wrap_fsdp2
from mcore_entropy.adapters.fsdp_units import Units
from mcore_entropy.adapters.huggingface import swap_lm_head
from tests.adapters.dense import largest_error
from tests.adapters.tiny_models import VOCABULARY, tiny_model
from tests.distributed.test_fsdp import full_gradients, without_sync
from tests.ranks import run_ranks

RANKS, MICRO_BATCHES, LAYERS = 2, 2, 2
IDS = torch.randint(3, VOCABULARY, (MICRO_BATCHES, RANKS, 2, 9), generator=torch.Generator().manual_seed(1))
WRAP: dict[str, Callable[..., Any]] = {"fsdp2": wrap_fsdp2, "fsdp1": wrap_fsdp1}
every_kind = pytest.mark.parametrize("kind", WRAP)


class WithValueHead(nn.Module):
    """A wrapper around a causal LM, as RL libraries have them; it says nothing of the parts inside."""

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__()
        self.pretrained_model = causal_lm
        self.v_head = nn.Linear(32, 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        output = self.pretrained_model(
            input_ids=input_ids, labels=labels, output_hidden_states=True, use_cache=False
        )
        output.loss = output.loss + self.v_head(output.hidden_states[-1]).square().mean()
        return output


class StatisticsHead(nn.Linear):
    """Stands for a head of ours in a model that is not Hugging Face's."""

    gives_statistics: ClassVar[bool] = True


class HeadFirst(nn.Module):
    """Registers its parts in another order than it runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = StatisticsHead(16, VOCABULARY)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(LAYERS))
        self.embed = nn.Embedding(VOCABULARY, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def small(model_class: Any, config_class: Any, **config: Any) -> Any:
    torch.manual_seed(0)
    return model_class(config_class(vocab_size=VOCABULARY, **config)).eval()


SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4)
T5 = dict(d_model=32, d_kv=8, d_ff=48, num_layers=LAYERS, num_heads=4, decoder_start_token_id=0)


def make(name: str) -> Any:
    if name == "llama":
        return tiny_model("LlamaForCausalLM")
    if name == "tied qwen2":
        return tiny_model("Qwen2ForCausalLM", tie_word_embeddings=True)
    if name.endswith("value head"):
        return WithValueHead(
            tiny_model("LlamaForCausalLM", tie_word_embeddings=name.startswith("tied"))
        ).eval()
    if name == "critic":
        return small(transformers.LlamaForTokenClassification, transformers.LlamaConfig, **SIZES)
    if name == "bert critic":
        return small(transformers.BertForTokenClassification, transformers.BertConfig, **SIZES)
    if name == "bert":
        return small(transformers.BertLMHeadModel, transformers.BertConfig, is_decoder=True, **SIZES)
    assert name == "t5"
    return small(transformers.T5ForConditionalGeneration, transformers.T5Config, **T5)


def swapped(model: Any) -> Any:
    swap_lm_head(getattr(model, "pretrained_model", model), me.EntropyConfig())
    return model


PREPARE: dict[str, Callable[[Any], Any]] = {"stock": lambda model: model, "swapped": swapped}


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """The cross entropy, of critics too: their labels are made of the ids."""
    classes = getattr(getattr(model, "config", None), "num_labels", 0)
    is_critic = "TokenClassification" in type(getattr(model, "module", model)).__name__
    return model(input_ids=ids, labels=ids % classes if is_critic else ids).loss


def gradient_error(kind: str, name: str, prepare: str) -> float:
    """Accumulated over micro-batches, against one process's with the model's own head."""
    model = make(name)
    reference = copy.deepcopy(model)
    for ids in IDS.flatten(0, 1):
        (loss_of(reference, ids) / (MICRO_BATCHES * RANKS)).backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    wrapped = WRAP[kind](PREPARE[prepare](model))
    for micro_batch in range(MICRO_BATCHES - 1):
        with without_sync(wrapped):
            (loss_of(wrapped, IDS[micro_batch, dist.get_rank()]) / MICRO_BATCHES).backward()
    (loss_of(wrapped, IDS[-1, dist.get_rank()]) / MICRO_BATCHES).backward()
    return largest_error(full_gradients(wrapped), expected)


@every_kind
@pytest.mark.parametrize(
    ("name", "prepare"),
    [
        ("llama", "stock"),
        ("tied qwen2", "stock"),
        ("tied qwen2", "swapped"),
        ("value head", "swapped"),
        ("tied value head", "stock"),
        ("tied value head", "swapped"),
        ("critic", "stock"),
        ("bert critic", "stock"),
        ("bert", "stock"),
        ("t5", "stock"),
    ],
)
def test_gradients(kind: str, name: str, prepare: str) -> None:
    assert max(run_ranks(RANKS, gradient_error, kind, name, prepare)) <= 1e-6


def names_of(model: nn.Module, units: Units) -> tuple[Any, list[str], Any, bool]:
    names = {module: name for name, module in model.named_modules()}
    embedding, head = (names.get(end) for end in (units.embedding, units.head))
    assert [names[unit] for unit in units.in_order] == [
        x for x in (embedding, *(names[layer] for layer in units.layers), head) if x is not None
    ]
    return embedding, [names[layer] for layer in units.layers], head, units.tied


@pytest.mark.parametrize(
    ("name", "embedding", "layers", "head", "tied"),
    [
        ("llama", "model.embed_tokens", "model.layers", "lm_head", False),
        ("tied qwen2", "model.embed_tokens", "model.layers", "lm_head", True),
        (
            "tied value head", "pretrained_model.model.embed_tokens", "pretrained_model.model.layers",
            "pretrained_model.lm_head", True,
        ),
        ("critic", "model.embed_tokens", "model.layers", None, False),
        # BertEmbeddings is among the classes that the model names; the embedding inside is the unit.
        ("bert critic", "bert.embeddings.word_embeddings", "bert.encoder.layer", None, False),
    ],
)  # fmt: skip
def test_units(name: str, embedding: str, layers: str, head: str | None, tied: bool) -> None:
    model = make(name)
    expected = (embedding, [f"{layers}.{i}" for i in range(LAYERS)], head, tied)
    assert names_of(model, Units.of(model)) == expected
    if name == "llama":
        assert names_of(swapped(model), Units.of(model)) == expected


def test_a_weight_of_three_modules_is_the_roots() -> None:
    """T5's encoder and decoder have modules of their own around the one embedding."""
    model = make("t5")
    units = Units.of(model)
    assert units.embedding is units.head is None
    assert len(units.layers) == 2 * LAYERS


def test_a_model_that_is_not_hugging_faces() -> None:
    model = HeadFirst()
    found = names_of(model, Units.of(model, layer_classes=iter([nn.Sequential])))
    assert found == (None, ["layers.0", "layers.1"], "head", False)
    with pytest.raises(ValueError, match="layer_classes: expected the classes of HeadFirst's decoder layers"):
        Units.of(model)
    with pytest.raises(ValueError, match="layer_classes: expected the classes of HeadFirst's decoder layers"):
        Units.of(model, [nn.TransformerEncoderLayer])


def head_first(kind: str) -> bool:
    """Whether the head is a unit; the classes may be given as anything to iterate over once."""
    model = WRAP[kind](HeadFirst(), layer_classes=iter([nn.Sequential]))
    if kind == "fsdp2":
        set_prefetch(model, forward=2, backward=1, layer_classes=iter([nn.Sequential]))
    units = [m for m in model.modules() if isinstance(m, FSDPModule | FullyShardedDataParallel)]
    model(IDS[0, 0]).sum().backward()
    return len(units) == LAYERS + 2


@every_kind
def test_wrapping_it(kind: str) -> None:
    assert run_ranks(RANKS, head_first, kind) == [True] * RANKS


def wrap_to_half(part: str) -> None:
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16)
    model = swapped(make("value head"))
    if part == "not Hugging Face's":
        wrap_fsdp2(HeadFirst(), mp_policy=half, layer_classes=[nn.Sequential])
    elif part == "inside a wrapper":
        wrap_fsdp2(model, mp_policy=half)
    else:
        for layer in model.pretrained_model.model.layers:
            fully_shard(layer)
        fully_shard(model, mp_policy=half)
        loss_of(model, IDS[0, 0])


def half_outputs(part: str) -> str:
    """What the ValueError says. Raised on a rank of the test's, it would end that process."""
    with pytest.raises(ValueError, match="output_dtype") as refused:
        wrap_to_half(part)
    return str(refused.value)


@pytest.mark.parametrize("part", ["not Hugging Face's", "inside a wrapper", "of the wrapper"])
def test_half_outputs_are_refused_wherever_the_head_is(part: str) -> None:
    (message,) = run_ranks(1, half_outputs, part)
    assert message.startswith("output_dtype: expected None or torch.float32"), message


def layers_may_give_half() -> torch.dtype:
    """A policy is a unit's own: what layers give is theirs."""
    model = swapped(make("llama"))
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float32))
    return model(input_ids=IDS[0, 0], labels=IDS[0, 0]).log_probs.dtype


def test_layers_may_give_half() -> None:
    assert run_ranks(1, layers_may_give_half) == [torch.float32]

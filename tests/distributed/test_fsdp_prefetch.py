"""Prefetching under FSDP1 and FSDP2: what is gathered when, and that it changes no number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

pytest.importorskip("transformers", reason="needs transformers: pip install 'mcore-entropy[hf]'")

import transformers

import mcore_entropy as me
from mcore_entropy.adapters.fsdp import set_prefetch, wrap_fsdp1, wrap_fsdp2
from mcore_entropy.adapters.huggingface import swap_lm_head
from tests.adapters.tiny_models import VOCABULARY, tiny_model
from tests.ranks import run_ranks

IDS = torch.randint(3, VOCABULARY, (2, 2, 9), generator=torch.Generator().manual_seed(1))
LAYERS = 3
WRAP = {"fsdp2": wrap_fsdp2, "fsdp1": wrap_fsdp1}


def swapped(tied: bool) -> Any:
    model = tiny_model("LlamaForCausalLM", num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    swap_lm_head(model, me.EntropyConfig(entropy_coeff=0.1))
    return model


def short(name: str) -> str:
    """embed, 0, 1, 2 or head: the unit of a parameter or module."""
    for piece in name.split("."):
        if piece in ("embed_tokens", "lm_head") or piece.isdigit():
            return {"embed_tokens": "embed", "lm_head": "head"}.get(piece, piece)
    return "root"


@contextlib.contextmanager
def recorded(model: Any) -> Iterator[list[str]]:
    """The gathers that begin, by unit; "|" is where a layer's forward has ended, or its backward begins."""
    events: list[str] = []
    names = {module: short(name) for name, module in model.named_modules()}
    gather, unshard = _fsdp_param_group.foreach_all_gather, FlatParamHandle.unshard

    def of_fsdp2(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        events.append(short(parameters[0]._param_fqn))
        return gather(parameters, *args, **kwargs)

    def of_fsdp1(handle: Any) -> Any:
        if handle.needs_unshard():
            events.append(names[handle._fully_sharded_module])
        return unshard(handle)

    def mark(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        events.append("|")
        output.register_hook(lambda _: events.append("|"))

    layers = [module for name, module in model.named_modules() if name.split(".")[-2:-1] == ["layers"]]
    assert len(layers) == LAYERS
    hooks = [layer.register_forward_hook(mark) for layer in layers]
    with (
        mock.patch.object(_fsdp_param_group, "foreach_all_gather", of_fsdp2),
        mock.patch.object(FlatParamHandle, "unshard", of_fsdp1),
    ):
        yield events
    for hook in hooks:
        hook.remove()


def step(model: Any) -> list[torch.Tensor]:
    ids = IDS[dist.get_rank()]
    model.zero_grad()
    output = model(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [output.loss.detach(), *(getattr(g, "_local_tensor", g).clone() for g in gradients)]


def order(kind: str, tied: bool, forward: int, backward: int) -> tuple[str, str, bool]:
    """Gathers in forward and in backward; whether every number is that of no prefetching."""
    model = WRAP[kind](swapped(tied))
    set_prefetch(model, forward=0, backward=0)
    plain = step(model)
    set_prefetch(model, forward=forward, backward=backward)
    step(model)  # FSDP1 prefetches in the order that it saw in a first step
    with recorded(model) as events:
        ids = IDS[dist.get_rank()]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        in_forward, before = " ".join(events), len(events)
        loss.backward()
    same = all(torch.equal(a, b) for a, b in zip(step(model), plain, strict=True))
    return in_forward, " ".join(events[before:]), same


@pytest.mark.parametrize(
    ("tied", "forward", "backward", "in_forward", "in_backward"),
    [
        (False, 0, 0, "root embed 0 | 1 | 2 | head", "root head 2 1 | 0 | embed |"),  # torch's own, one ahead
        (False, 1, 1, "root embed 0 1 | 2 | head |", "root head 2 1 | 0 | embed |"),
        (False, 2, 2, "root embed 0 1 2 | head | |", "root head 2 1 0 | embed | |"),
        (True, 1, 1, "root embed 0 1 | 2 | |", "root embed 2 1 | 0 | |"),  # the head is embed's, still there
    ],
)
def test_fsdp2(tied: bool, forward: int, backward: int, in_forward: str, in_backward: str) -> None:
    """Prefetched, a unit is on its way before the one in front of it has ended; the head like a layer."""
    found = run_ranks(2, order, "fsdp2", tied, forward, backward)
    assert found == [(in_forward, in_backward, True)] * 2


@pytest.mark.parametrize(
    ("depth", "in_forward", "in_backward"),
    [
        (0, "root embed 0 | 1 | 2 | head", "head 2 | 1 | 0 | embed"),
        (1, "root embed 0 1 | 2 | head |", "head 2 1 | 0 | embed |"),
    ],
)
def test_fsdp1(depth: int, in_forward: str, in_backward: str) -> None:
    assert run_ranks(2, order, "fsdp1", False, depth, depth) == [(in_forward, in_backward, True)] * 2


class Critic(nn.Module):
    """Not Hugging Face's: a model says nothing of its parts, and its value head is one module of many."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0) for _ in range(LAYERS))
        self.value = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.value(x)


def critic(kind: str, plain_module: bool) -> tuple[int, float]:
    """How many units there are, and the largest error of a gradient against one process's."""
    torch.manual_seed(0)
    if plain_module:
        made, reference = Critic(), Critic()
        x = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(1))
        keywords: dict[str, Any] = {"layer_classes": [nn.TransformerEncoderLayer]}
        inputs, whole = x[dist.get_rank()], torch.cat(list(x), dim=1)  # [s, b, H]
    else:
        config = tiny_model("LlamaForCausalLM", num_hidden_layers=LAYERS).config
        config.num_labels = 1
        made, reference = (_seeded(transformers.LlamaForTokenClassification, config) for _ in range(2))
        keywords, inputs, whole = {}, IDS[dist.get_rank()], IDS.flatten(0, 1)
    wrapped = WRAP[kind](made, **keywords)
    for forward, backward in ((0, 0), (1, 1)):
        set_prefetch(wrapped, forward=forward, backward=backward, **keywords)
    for model, given in ((wrapped, inputs), (reference, whole)):
        output = model(given)
        getattr(output, "logits", output).square().mean().backward()
    units = [m for m in wrapped.modules() if isinstance(m, FSDPModule | FullyShardedDataParallel)]
    whole_gradients = contextlib.nullcontext()
    if kind == "fsdp1":
        whole_gradients = FullyShardedDataParallel.summon_full_params(
            wrapped, with_grads=True, writeback=False
        )
    expected = dict(reference.named_parameters())
    with whole_gradients:
        errors = [
            float(
                (getattr(p.grad, "full_tensor", lambda p=p: p.grad)() - expected[_own(name)].grad).abs().max()
            )
            for name, p in wrapped.named_parameters()
        ]
    return len(units), max(errors)


def _own(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def _seeded(model_class: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return model_class(config).eval()


@pytest.mark.parametrize("kind", WRAP)
@pytest.mark.parametrize("plain_module", [False, True])
def test_models_without_an_lm_head(kind: str, plain_module: bool) -> None:
    """Layers and root; Hugging Face's embedding is one more."""
    expected = LAYERS + 1 + (not plain_module)
    for units, error in run_ranks(2, critic, kind, plain_module):
        assert units == expected
        assert error < 1e-6


def mistake(what: str) -> None:
    model = swapped(tied=False)
    if what == "not wrapped":
        set_prefetch(model)
    elif what == "no layers":
        wrap_fsdp2(Critic())
    elif what == "two ahead":
        set_prefetch(wrap_fsdp1(model), forward=2)
    else:
        set_prefetch(wrap_fsdp2(model), backward=-1)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("not wrapped", "expected one wrapped by FSDP, got a LlamaForCausalLM"),
        ("no layers", "layer_classes: expected the classes of Critic's decoder layers"),
        ("two ahead", "expected 0 or 1, as FSDP1"),
        ("negative", "backward: expected a number of units, 0 or more, got -1"),
    ],
)
def test_mistakes(what: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_ranks(1, mistake, what)

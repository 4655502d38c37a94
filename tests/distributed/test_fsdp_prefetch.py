"""Prefetching under FSDP1 and FSDP2: what is gathered when, and that it changes no number."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, FSDPModule, FullyShardedDataParallel, fully_shard

pytest.importorskip("transformers", reason="needs transformers: pip install 'mcore-entropy[hf]'")

import transformers
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

import mcore_entropy as me
from mcore_entropy.adapters.fsdp import set_prefetch, wrap_fsdp1, wrap_fsdp2
from mcore_entropy.adapters.huggingface import swap_lm_head
from tests.adapters.tiny_models import VOCABULARY, tiny_model
from tests.ranks import run_ranks

IDS = torch.randint(3, VOCABULARY, (2, 2, 9), generator=torch.Generator().manual_seed(1))
LAYERS = 3


def model_to_wrap(tied: bool = False) -> Any:
    model = tiny_model("LlamaForCausalLM", num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    swap_lm_head(model, me.EntropyConfig(entropy_coeff=0.1))
    return model


def gathers(model: Any) -> list[str]:
    """In a step, the units in the order that their weights' gather begins, between marks of what runs."""
    names = {id(unit): name for name, unit in _units(model).items()}
    groups = {}
    for unit in _units(model).values():
        for group in unit._get_fsdp_state()._fsdp_param_groups if _many(unit) else [unit._get_fsdp_state()._fsdp_param_group]:
            groups[id(group)] = names[id(unit)]
    events: list[str] = []
    unshard = FSDPParamGroup.unshard

    def seen(group: Any, async_op: bool = False) -> None:
        if id(group) in groups and group._all_gather_result is None and not group.is_unsharded:
            events.append(groups[id(group)])
        unshard(group, async_op)

    def mark(text: str) -> Any:
        return lambda *_: events.append(text)

    for name, unit in _units(model).items():
        unit.register_forward_hook(mark(f"{name} ran"))
    loss = model(input_ids=IDS[dist.get_rank()], labels=IDS[dist.get_rank()], use_cache=False).loss
    events.clear()  # the first step finds the root and sets up
    loss.backward()
    with mock.patch.object(FSDPParamGroup, "unshard", seen):
        events.clear()
        loss = model(input_ids=IDS[dist.get_rank()], labels=IDS[dist.get_rank()], use_cache=False).loss
        events.append("backward")
        loss.backward()
    return events

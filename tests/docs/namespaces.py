"""What the snippets of each page find: the names that a reader has from their own program, at toy size.

A page's entry says on how many ranks its snippets run (gloo, on the CPU), one after the other in one
namespace. A page that is not here starts with nothing, on one rank.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Names = dict[str, Any]
V, H, B, S = 64, 32, 2, 8


@dataclass(frozen=True)
class Setting:
    """`names()` is entered around the page's snippets; `check(names)` holds after them."""

    names: Callable[[], contextlib.AbstractContextManager[Names]]
    ranks: int = 1
    check: Callable[[Names], None] = lambda names: None


@contextlib.contextmanager
def nothing() -> Iterator[Names]:
    yield {}


def _tokens() -> Tensor:
    return torch.randint(V, (B, S), generator=torch.Generator().manual_seed(1))


def _llama() -> Any:
    from tests.adapters.tiny_models import tiny_model

    return tiny_model("LlamaForCausalLM")


# --- README -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _readme() -> Iterator[Names]:
    from mcore_entropy import EntropyConfig
    from tests.megatron.tiny_gpt import TinyGPT, build, make_batch, model_parallel

    options = TinyGPT(sequence_length=S, micro_batch_size=B)
    with model_parallel(options):
        batch = make_batch(options)
        yield {
            "EntropyConfig": EntropyConfig,
            "model": build(options).core,
            "tokens": batch.tokens,
            "position_ids": batch.position_ids,
            "attention_mask": batch.attention_mask,
            "labels": batch.labels,
            "llama": _llama(),
            "input_ids": batch.tokens,
            "hidden": torch.randn(B, S, H),
            "weight": torch.randn(V, H),
            "target": batch.labels,
            "logits": torch.randn(B, S, V),
            "mask": torch.ones(B, S, dtype=torch.bool),
            "group": dist.group.WORLD,
        }


def _stock_loss_is_minus_the_log_prob(names: Names) -> None:
    torch.testing.assert_close(-names["statistics"].log_probs, names["stock"], rtol=1e-5, atol=1e-5)
    assert names["statistics"].entropy.shape == (B, S)


# --- docs/ ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _hugging_face() -> Iterator[Names]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from mcore_entropy.adapters.fsdp import wrap_fsdp2

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    tokens = _tokens()
    torch.manual_seed(2)
    with torch.random.fork_rng(devices=()):
        logits, weight, hidden = torch.randn(B, S, V), torch.randn(V, H), torch.randn(B, S, H)
    yield {
        "AutoModelForCausalLM": SimpleNamespace(from_pretrained=lambda _: _llama()),
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens,
        "mesh": mesh,
        "wrap_fsdp2": wrap_fsdp2,
        "logits": distribute_tensor(logits, mesh["tp"], [Shard(2)]),
        "weight": distribute_tensor(weight, mesh["tp"], [Shard(0)]),
        "hidden": hidden,
        "target": tokens,
    }


@contextlib.contextmanager
def _megatron_lm() -> Iterator[Names]:
    from mcore_entropy.megatron.arguments import add_entropy_args

    args = add_entropy_args(argparse.ArgumentParser()).parse_args([])
    yield {
        "args": args,
        "get_args": lambda: args,
        "model_cfg": SimpleNamespace(pre_wrap_hooks=[]),
        "loss_func": lambda loss_mask, output_tensor, model=None: output_tensor,
    }


@contextlib.contextmanager
def _verl() -> Iterator[Names]:
    torch.manual_seed(3)
    yield {
        "hidden": torch.randn(1, B * S, H, requires_grad=True),
        "weight": torch.randn(V, H, requires_grad=True),
        "labels": _tokens().reshape(1, B * S),
        "tp_group": dist.group.WORLD,
    }


@contextlib.contextmanager
def _rl() -> Iterator[Names]:
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens = _tokens()
    losses = torch.rand(B, S, requires_grad=True)
    mask = torch.ones(B, S, dtype=torch.bool)
    cp_group = dist.group.WORLD
    # Every rank makes all groups; a data-parallel group of one rank each.
    dp_group = [dist.new_group([other]) for other in range(size)][rank]
    yield {
        "torch": torch,
        "tokens": tokens,
        "attention_mask": torch.ones_like(tokens),
        "response_mask": torch.ones_like(tokens).bool(),
        "cp_rank": rank,
        "cp_size": size,
        "dp_size": 1,
        "cp_group": cp_group,
        "dp_group": dp_group,
        "token_shard": tokens.view(B, 2 * size, -1)[:, [rank, 2 * size - 1 - rank]].flatten(1),
        "real_shard": mask[:, : S // size],
        "losses": losses,
        "masks": [mask, mask],
        "micro_batches": [(losses * 2, mask), (losses * 3, mask)],
        "ranks": size,
        "result": SimpleNamespace(entropy=torch.rand(B, S)),
    }


SETTINGS = {
    "README.md": Setting(_readme, check=_stock_loss_is_minus_the_log_prob),
    "docs/huggingface.md": Setting(_hugging_face, ranks=2),
    "docs/megatron_lm.md": Setting(_megatron_lm),
    "docs/migrating_from_verl.md": Setting(_verl),
    "docs/rl.md": Setting(_rl, ranks=2),
}

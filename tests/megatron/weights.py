"""Weights of a tiny GPT by global names, the same whatever the layout, with values drawn by name."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def shard_dimension(parameter: Tensor) -> int | None:
    """Along which dimension tensor parallelism cuts a parameter."""
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def global_name(core: Any, name: str) -> str:
    """A parameter's name with its layer's number in the whole model; one name for tied weights."""
    if name.startswith("decoder.layers."):
        *prefix, index, rest = name.split(".", 3)
        return ".".join(
            [*prefix, str(core.decoder.layers[int(index)].layer_number - 1), _in_layer(core, rest)]
        )
    if name == "output_layer.weight" and core.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    return name


def _in_layer(core: Any, name: str) -> str:
    """With an expert's number among all of the layer's; other names are as they are."""
    from megatron.core import parallel_state

    before, found, after = name.partition("local_experts.")
    if not found:
        return name
    index, rest = after.split(".", 1)
    ranks = parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * core.config.num_moe_experts // ranks
    return f"{before}{first + int(index)}.{rest}"


def is_idle(core: Any, name: str) -> bool:
    """A last stage with MTP layers has an embedding, which tied weights use; its head's own idles."""
    tied = core.share_embeddings_and_output_weights
    return tied and name == "output_layer.weight" and hasattr(core, "embedding")


@torch.no_grad()
def fill(core: Any, names: Mapping[str, str], seed: int) -> None:
    """This rank's shards of weights drawn by name; norms are around 1, the rest around 0."""
    from megatron.core import parallel_state

    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    by_name = dict(core.named_parameters())
    for name, seeded_by in names.items():
        parameter = by_name[name]
        generator = torch.Generator().manual_seed(seed + zlib.crc32(seeded_by.encode()))
        dimension, shape = shard_dimension(parameter), list(parameter.shape)
        if dimension is not None:
            shape[dimension] *= tp_size
        whole = 0.2 * torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            whole += 1
        parameter.copy_(whole if dimension is None else whole.chunk(tp_size, dimension)[tp_rank])

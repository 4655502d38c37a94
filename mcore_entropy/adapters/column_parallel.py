"""Operands of a column-parallel head of DTensors, checked: weight [V, H], its rows sharded."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from mcore_entropy.adapters.sharding import (
    Placements,
    VocabularyOnMesh,
    checked_dtensor,
    completed,
    known_placements,
    local_part,
)
from mcore_entropy.functional.linear_passes import HeadOperands


@dataclass(frozen=True)
class ColumnParallelHead:
    """hidden [*, H], weight [V, H] and bias [V], which fit together.

    Attributes:
        vocabulary: how weight's rows lie over its mesh.
        tokens: how the mesh holds hidden's tokens once the tensor-parallel ranks have the same.
    """

    hidden: Tensor
    weight: DTensor
    bias: DTensor | None
    vocabulary: VocabularyOnMesh
    tokens: Placements

    @staticmethod
    def of(hidden: object, weight: object, bias: object, tp_mesh: DeviceMesh | None) -> ColumnParallelHead:
        """The head of these operands.

        Raises:
            ValueError: they do not fit, or weight is not sharded over the tensor-parallel ranks alone.
        """
        hint = "a plain shard goes to mcore_entropy.linear_log_probs_and_entropy with its tp_group"
        checked = checked_dtensor("weight", weight, hint)
        vocabulary = _vocabulary_of(checked, tp_mesh)
        if bias is not None:
            bias = checked_dtensor(
                "bias", bias, "shard it with the weight: distribute_tensor(bias, mesh, [Shard(0)])"
            )
            if bias.device_mesh != checked.device_mesh or known_placements("bias", bias) != known_placements(
                "weight", checked
            ):
                raise ValueError(
                    f"bias: expected weight's mesh {checked.device_mesh} and placements "
                    f"{checked.placements}, got {bias.device_mesh} and {bias.placements}"
                )
            VocabularyOnMesh.of("bias", bias, known_placements("bias", bias), 0)
        tokens = _tokens_of(hidden, vocabulary)
        return ColumnParallelHead(hidden, checked, bias, vocabulary, tokens)  # type: ignore[arg-type] # `_tokens_of` has looked

    def hidden_on_mesh(self) -> DTensor:
        """hidden as the tensor-parallel ranks need it: all of this rank's tokens, whole rows."""
        if not isinstance(self.hidden, DTensor):
            return DTensor.from_local(self.hidden, self.vocabulary.mesh, self.tokens, run_check=False)
        # DTensor's own autograd gives a sharded hidden its part of the complete gradient.
        return self.hidden.redistribute(placements=self.tokens)

    def local_operands(self) -> HeadOperands:
        """This rank's operands for the fused head, which gives hidden the complete gradient on every rank."""
        if isinstance(self.hidden, DTensor):
            hidden = local_part(self.hidden_on_mesh(), self.tokens)
        else:
            hidden = completed(self.hidden)
        # Ranks with other tokens have another part of the sum over tokens.
        rows = tuple(
            Shard(0) if i == self.vocabulary.mesh_dim else Replicate() if p == Replicate() else Partial()
            for i, p in enumerate(self.tokens)
        )
        bias = None if self.bias is None else local_part(self.bias, rows)
        return HeadOperands(hidden, local_part(self.weight, rows), bias)


def _vocabulary_of(weight: DTensor, tp_mesh: DeviceMesh | None) -> VocabularyOnMesh:
    placements = known_placements("weight", weight)
    if weight.dim() != 2:
        raise ValueError(f"weight: expected shape [V, H], got {tuple(weight.shape)}")
    vocabulary = VocabularyOnMesh.of("weight", weight, placements, 0)
    mesh, mesh_dim = weight.device_mesh, vocabulary.mesh_dim
    others = [p for i, p in enumerate(placements) if i != mesh_dim]
    if mesh_dim is None or any(p != Replicate() for p in others):
        raise ValueError(
            "weight: expected Shard(0) on one mesh dimension and Replicate() on all others, got "
            f"{weight.placements} on {mesh}; pass a weight that no rank shards, or what FSDP gathers in its "
            "module's forward, to mcore_entropy.linear_log_probs_and_entropy"
        )
    if tp_mesh is None:
        name = None if mesh.mesh_dim_names is None else mesh.mesh_dim_names[mesh_dim]
        if name != "tp":
            raise ValueError(
                'weight: expected to be sharded over a mesh dimension called "tp", or tp_mesh, got mesh '
                f"dimension {mesh_dim} ({name!r}) of {mesh}; {_FSDP}"
            )
        return vocabulary
    if not isinstance(tp_mesh, DeviceMesh) or tp_mesh.ndim != 1:
        raise ValueError(f'tp_mesh: expected a mesh of one dimension, as mesh["tp"] gives, got {tp_mesh!r}')
    ranks, tp_ranks = (
        dist.get_process_group_ranks(m) for m in (mesh.get_group(mesh_dim), tp_mesh.get_group())
    )
    if ranks != tp_ranks:
        raise ValueError(
            f"weight: expected to be sharded over the ranks {tp_ranks} of tp_mesh, got the ranks {ranks}, "
            f"mesh dimension {mesh_dim} of {mesh}; {_FSDP}"
        )
    return vocabulary


# Data-parallel ranks have different tokens; what the head sums over its group would mix them.
_FSDP = (
    "FSDP shards its parameters over data-parallel ranks and gathers them in its module's forward: call the "
    "head there (mcore_entropy.adapters.fsdp and mcore_entropy.adapters.huggingface do)"
)


def _tokens_of(hidden: object, vocabulary: VocabularyOnMesh) -> Placements:
    mesh = vocabulary.mesh
    if not isinstance(hidden, Tensor):
        raise ValueError(f"hidden: expected a tensor [*, H], got {type(hidden).__name__}")
    if not isinstance(hidden, DTensor):
        if mesh.ndim > 1:
            raise ValueError(
                f"hidden: expected a DTensor on weight's mesh {mesh}, got a plain tensor, which does not "
                "tell whether the ranks of the other mesh dimensions have the same tokens"
            )
        return (Replicate(),)
    if hidden.device_mesh != mesh:
        raise ValueError(
            f"hidden: expected a plain tensor or a DTensor on weight's mesh {mesh}, got one on "
            f"{hidden.device_mesh}"
        )
    placements = known_placements("hidden", hidden)
    if Shard(hidden.dim() - 1) in placements:
        raise ValueError(
            f"hidden: expected whole rows, Replicate or Shard of a token dimension, got {hidden.placements}; "
            "the head is column-parallel, so its input is not sharded over the hidden size"
        )
    return vocabulary.replicated(placements)

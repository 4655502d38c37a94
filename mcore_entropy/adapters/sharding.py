"""How a DTensor lies over its mesh: who holds which vocabulary, which tokens are here, what is refused.

Everything here is read from metadata that the ranks of a mesh share; nothing communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

# Private, and how torch's own tensor-parallel styles hand a gathered input on.
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

# Private; there is no public way. What a rank holds follows from how DTensor cuts an uneven dimension, and
# from the order of the mesh dimensions that cut it: copied rules would drift from torch's.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mcore_entropy.functional.agreement import errors_on_every_rank
from mcore_entropy.parallel import TensorParallelGroup

Placements: TypeAlias = tuple[Placement, ...]


@dataclass(frozen=True)
class VocabularyOnMesh:
    """A DTensor's vocabulary dimension.

    Attributes:
        mesh_dim: the mesh dimension that shards it, None where every rank has the whole vocabulary.
        start: global index of this rank's first column.
        columns: columns of all ranks.
    """

    mesh: DeviceMesh
    mesh_dim: int | None
    start: int
    columns: int

    @staticmethod
    def of(name: str, value: DTensor, placements: Placements, vocab_dim: int) -> VocabularyOnMesh:
        """Where `vocab_dim` of the tensor lies; `placements` are those of `known_placements`.

        Raises:
            ValueError: two mesh dimensions shard it, or this rank's part is not DTensor's part.
        """
        mesh = value.device_mesh
        sharding = [i for i, placement in enumerate(placements) if placement == Shard(vocab_dim)]
        if len(sharding) > 1:
            raise ValueError(
                f"{name}: expected at most one mesh dimension that shards the vocabulary (tensor dimension "
                f"{vocab_dim}), got placements {value.placements}; redistribute all but one to Replicate()"
            )
        columns = value.shape[vocab_dim]
        if not sharding:
            return VocabularyOnMesh(mesh, None, 0, columns)
        found = VocabularyOnMesh(mesh, sharding[0], 0, columns)
        with errors_on_every_rank(TensorParallelGroup.resolve(found.group)):
            shape, offset = compute_local_shape_and_global_offset(value.shape, mesh, placements)
            held = value.to_local().shape
            if tuple(held) != tuple(shape):
                raise ValueError(
                    f"{name}: expected a local shard of shape {tuple(shape)}, as DTensor cuts "
                    f"{tuple(value.shape)} by {value.placements}, got {tuple(held)}; DTensor.from_local "
                    "needs shape= and stride= for uneven shards, and they must be those of distribute_tensor"
                )
        # An empty shard lies behind all columns; what its offset says depends on the version of torch.
        start = offset[vocab_dim] if shape[vocab_dim] else columns
        return VocabularyOnMesh(mesh, sharding[0], start, columns)

    @property
    def group(self) -> dist.ProcessGroup | TensorParallelGroup:
        """The ranks that share a vocabulary: a single one where it is not sharded, Megatron or not."""
        if self.mesh_dim is None:
            return TensorParallelGroup.single_rank()
        return self.mesh.get_group(self.mesh_dim)

    def vocab_size(self, given: int | None) -> int:
        """How many columns count; a vocabulary larger than the columns is seen here alone.

        Raises:
            ValueError: there are fewer columns.
        """
        if given is None:
            return self.columns
        if isinstance(given, int) and given > self.columns:
            raise ValueError(
                f"vocab_size: expected at most the {self.columns} columns of the DTensor, got {given}"
            )
        return given

    def replicated(self, placements: Placements) -> Placements:
        """The same placements, but whole on every rank of the vocabulary's mesh dimension."""
        return tuple(Replicate() if i == self.mesh_dim else p for i, p in enumerate(placements))

    def local_tokens(self, name: str, value: object, tokens: Placements) -> object:
        """What there is one of a token, as this rank's plain tensor; plain values pass as they are.

        `tokens`: how the mesh holds the token dimensions.

        Raises:
            ValueError: a DTensor on another mesh, or that holds other tokens on this rank.
        """
        if not isinstance(value, DTensor):
            return value
        if value.device_mesh != self.mesh:
            raise ValueError(
                f"{name}: expected a plain tensor of this rank's tokens or a DTensor on {self.mesh}, got one "
                f"on {value.device_mesh}"
            )
        expected = tokens if value.dim() else (Replicate(),) * self.mesh.ndim
        if known_placements(name, value) != expected:
            raise ValueError(
                f"{name}: expected placements {expected}, which give each rank the tokens it has logits of, "
                f"got {value.placements}; redistribute it, or pass this rank's part as a plain tensor"
            )
        return value.to_local()


def known_placements(name: str, value: DTensor) -> Placements:
    """The tensor's placements, each Replicate or Shard of a dimension counted from the first.

    Raises:
        ValueError: one of another kind, or a rank outside the mesh.
    """
    if value.device_mesh.get_coordinate() is None:
        raise ValueError(
            f"{name}: expected a DTensor on a mesh that this rank is in, got {value.device_mesh} on rank "
            f"{dist.get_rank()}; only the mesh's ranks may call"
        )
    placements: list[Placement] = []
    for placement in value.placements:
        # Not isinstance: up to torch 2.9 _StridedShard is a subclass of Shard, and it is cut otherwise.
        if type(placement) is Shard:
            placements.append(Shard(placement.dim % max(value.dim(), 1)))
        elif type(placement) is Replicate:
            placements.append(placement)
        else:
            raise ValueError(
                f"{name}: expected placements Shard or Replicate, got {value.placements}; a Partial is not "
                "summed yet (redistribute it), and a _StridedShard is what FSDP leaves of a tensor-parallel "
                "parameter outside its module's forward"
            )
    return tuple(placements)


def checked_dtensor(name: str, value: object, hint: str) -> DTensor:
    """`value` if it is a DTensor; `hint` says what takes a plain tensor."""
    if not isinstance(value, DTensor):
        raise ValueError(f"{name}: expected a DTensor, got {_kind(value)}; {hint}")
    return value


def _kind(value: object) -> str:
    return f"a plain tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def local_part(value: DTensor, gradient: Sequence[Placement]) -> Tensor:
    """This rank's part, whose gradient is a DTensor of the placements `gradient`."""
    return completed(value.to_local(grad_placements=gradient))


def completed(value: Tensor) -> Tensor:
    """`value`, once a collective that still fills it is through; its gradient passes."""
    if isinstance(value, AsyncCollectiveTensor):
        value = _Completed.apply(value)
    return value


class _Completed(torch.autograd.Function):
    """The tensor that an AsyncCollectiveTensor stands for. Its own address is 0, which a kernel would read.

    Waiting outside of a Function would leave autograd's graph: the wrapper has it, not what it wraps.
    """

    @staticmethod
    def forward(ctx: Any, pending: AsyncCollectiveTensor) -> Tensor:
        return pending.wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient

"""The operands of the fused head's kernels, and how a product is laid out over the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mcore_entropy.backends.interface import RowInputs
from mcore_entropy.backends.triton.machine import Machine, Tile, machine
from mcore_entropy.backends.triton.rows import Scaling

# Steps along H that one program takes: about 0.7 ms of an H200, next to which its start and end are little.
_PROGRAM_DEPTH = 65536


@dataclass(frozen=True)
class Schedule:
    """How many programs compute a product, how many of them run at once, and how many tiles each takes."""

    programs: int
    at_once: int
    tiles_a_program: int


@dataclass(frozen=True)
class HeadProduct:
    """The operands of one product, hidden [n, H] and weight [v, H], bias [v], with the rows' scaling."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    inputs: RowInputs
    scaling: Scaling
    machine: Machine

    @staticmethod
    def of(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, inputs: RowInputs, live: Tensor | None = None
    ) -> HeadProduct:
        hidden, weight = (x if x.stride(1) == 1 else x.contiguous() for x in (hidden, weight))
        bias = None if bias is None else bias.contiguous()
        scaling = Scaling.of(inputs, hidden.shape[0], hidden.device, live)
        return HeadProduct(hidden, weight, bias, inputs, scaling, machine(hidden.device))

    @property
    def tma(self) -> bool:
        return self.machine.tma and describable(self.hidden) and describable(self.weight)

    def flags(self, tile: Tile, tma: bool) -> dict[str, object]:
        return dict(
            BM=tile.rows,
            BN=tile.columns,
            BK=tile.depth,
            GROUP=tile.group,
            TMA=tma,
            BIAS=self.bias is not None,
            SOFTCAP=self.scaling.softcap is not None,
            UPCAST=self.machine.interpreted,
            num_warps=tile.warps,
            enable_fp_fusion=True,
            num_stages=tile.stages,
        )

    def schedule(self, tile: Tile, columns: int) -> Schedule:
        rows, hidden_size = self.hidden.shape
        tiles = -(-rows // tile.rows) * -(-columns // tile.columns)
        at_once = self.machine.multiprocessors * tile.per_multiprocessor
        tiles_a_program = max(_PROGRAM_DEPTH // hidden_size, 1)
        rounds, rest = divmod(tiles, at_once * tiles_a_program)
        return Schedule(rounds * at_once + min(rest, at_once), at_once, tiles_a_program)


def describable(matrix: Tensor) -> bool:
    """Whether the copy engine can address it: 16-byte aligned rows, none over another."""
    aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0
    return aligned and matrix.stride(0) >= matrix.shape[1]


def source(matrix: Tensor, rows: int, columns: int, tma: bool) -> Tensor | TensorDescriptor:
    # Made on the host: a descriptor made on the device needs triton's allocator, a context variable that
    # autograd's backward thread does not inherit.
    return TensorDescriptor.from_tensor(matrix, [rows, columns]) if tma else matrix

"""The torch backend's work on an Ascend NPU, whose tiles may go through the vendor's fused cross entropy."""

from __future__ import annotations

import torch

from mcore_entropy.backends.npu.cross_entropy import fused_tile_statistics, why_not_fused
from mcore_entropy.backends.pytorch.backend import TorchBackend
from mcore_entropy.execution import Execution


class NpuBackend(TorchBackend):
    """See `mcore_entropy.backends.interface.Backend`: plain torch operations, in fp32, in tiles."""

    name = "npu"


class FusedNpuBackend(NpuBackend):
    """The same with the forward's sums from the operator; gradients are the torch backend's either way."""

    name = "npu_fused"
    tile_statistics = staticmethod(fused_tile_statistics)

    def check(self, execution: Execution, dtype: torch.dtype) -> None:
        super().check(execution, dtype)
        if dtype == torch.float64:
            raise ValueError(
                "execution.backend: 'npu_fused' cannot run here: its operator does not take fp64"
            )
        obstacle = why_not_fused()
        if obstacle is not None:
            raise ValueError(f"execution.backend: 'npu_fused' cannot run here: {obstacle}")

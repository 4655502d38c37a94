"""The npu backend: the torch backend on an Ascend NPU, on demand with its fused cross entropy."""

from mcore_entropy.backends.npu.backend import FusedNpuBackend, NpuBackend

__all__ = ["FusedNpuBackend", "NpuBackend"]

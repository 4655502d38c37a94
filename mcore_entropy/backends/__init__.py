"""One device's share of the work; `select` is the only place that chooses a backend."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable

import torch

from mcore_entropy.backends.interface import Backend
from mcore_entropy.backends.npu import FusedNpuBackend, NpuBackend
from mcore_entropy.backends.pytorch import TorchBackend
from mcore_entropy.execution import Execution

_LOWEST_CAPABILITY = (8, 0)


def select(execution: Execution, device: torch.device, dtype: torch.dtype) -> Backend:
    """The backend that `execution` asks for, for tensors of a device and dtype.

    ``"auto"`` is npu on an Ascend NPU, else triton where it can run (`why_not_triton`), otherwise torch.
    An NPU is known by its tensors' device type: under torch-npu's ``transfer_to_npu``, ``Tensor.is_cuda`` is
    true there too.

    Raises:
        ValueError: execution names an unknown backend, or asks for what the chosen one cannot do.
    """
    name = execution.backend
    if name not in ("auto", *_BACKENDS):
        raise ValueError(f"execution.backend: expected 'auto' or one of {list(_BACKENDS)}, got {name!r}")
    if name == "auto":
        name = _chosen(device, dtype)
    elif name == "triton" and (obstacle := why_not_triton(device, dtype)) is not None:
        raise ValueError(f"execution.backend: 'triton' cannot run here: {obstacle}")
    backend = _BACKENDS[name]()
    backend.check(execution, dtype)
    return backend


def _chosen(device: torch.device, dtype: torch.dtype) -> str:
    if device.type == "npu":
        return "npu"
    return "torch" if why_not_triton(device, dtype) is not None else "triton"


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """What keeps the Triton backend from tensors of this device and dtype; None when nothing does."""
    if dtype == torch.float64:
        return "its statistics are fp32, and the tensors are fp64"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed; pip install 'mcore-entropy[triton]'"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda" or torch.version.cuda is None:
        return f"it needs an NVIDIA GPU (or TRITON_INTERPRET=1 and a CPU), and the tensors are on {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LOWEST_CAPABILITY:
        return f"it needs compute capability 8.0 or newer, and {device} has {capability[0]}.{capability[1]}"
    return None


@functools.cache
def _triton_backend() -> Backend:
    # Not imported at module level: `import mcore_entropy` works with torch alone.
    from mcore_entropy.backends.triton.backend import TritonBackend

    return TritonBackend()


_BACKENDS: dict[str, Callable[[], Backend]] = {
    "torch": TorchBackend,
    "triton": _triton_backend,
    "npu": NpuBackend,
    "npu_fused": FusedNpuBackend,
}

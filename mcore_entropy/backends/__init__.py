"""One device's share of the work; `select` is the only place that chooses a backend."""

from __future__ import annotations

from mcore_entropy.backends.interface import Backend
from mcore_entropy.backends.pytorch import TorchBackend
from mcore_entropy.execution import Execution

_BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (TorchBackend(),)}


def select(execution: Execution) -> Backend:
    """The backend that `execution` asks for; ``"auto"`` is torch, the only one, on every device.

    Raises:
        ValueError: execution names an unknown backend, or asks for what the chosen one cannot do.
    """
    name = execution.backend
    if name == "auto":
        name = "torch"
    if name not in _BACKENDS:
        raise ValueError(f"execution.backend: expected 'auto' or one of {sorted(_BACKENDS)}, got {name!r}")
    backend = _BACKENDS[name]
    backend.check(execution)
    return backend

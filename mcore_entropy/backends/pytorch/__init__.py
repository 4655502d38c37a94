"""The reference backend: plain torch operations, on the CPU and on any device torch runs on."""

from mcore_entropy.backends.pytorch.backend import TorchBackend

__all__ = ["TorchBackend"]

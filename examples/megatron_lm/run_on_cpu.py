"""A script of Megatron-LM, such as pretrain_gpt.py, on the CPU: torchrun ... run_on_cpu.py SCRIPT ARGUMENTS

`megatron_on_cpu` does it for Megatron-core; the scripts ask for CUDA in further places, and get answers here.
An installed megatron-core comes before the checkout's own, because it has its index builder compiled.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mcore_entropy.megatron.cpu import megatron_on_cpu


class CudaMeansCpu(TorchFunctionMode):
    """Every function of torch that is given a CUDA device takes the CPU: ``torch.rand(2, device="cuda")``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*(on_cpu(value) for value in args), **keywords)


def on_cpu(value: Any) -> Any:
    """The CPU for a CUDA device or its name; anything else as it is."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


class NoStream(contextlib.nullcontext[None]):
    """A stream or event of a machine where everything has happened already."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_keywords: None


def pretend_cuda() -> None:
    """What the scripts ask of torch.cuda, answered as far as it matters to them."""
    cuda: Any = torch.cuda
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.device_count = lambda: 1
    cuda.set_device = lambda _device: None
    cuda.get_device_capability = lambda *_device: (8, 0)
    cuda.get_device_properties = lambda *_device: SimpleNamespace(
        major=8, minor=0, name="cpu", multi_processor_count=1, total_memory=0
    )
    cuda.Stream = cuda.Event = lambda *_args, **_keywords: NoStream()
    cuda.stream = lambda _stream: contextlib.nullcontext()
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(cuda, name, lambda *_device: 0)
    cuda.memory_stats = lambda *_device: {}
    cuda.empty_cache = cuda.reset_peak_memory_stats = lambda *_device: None
    cuda.FloatTensor, cuda.IntTensor, cuda.LongTensor = torch.FloatTensor, torch.IntTensor, torch.LongTensor
    torch.accelerator.is_available = lambda: False  # DataLoader, before it pins memory
    torch.nn.Module.cuda = lambda self, *_device: self  # type: ignore[method-assign]


@contextlib.contextmanager
def megatron_lm_on_cpu(checkout: Path) -> Iterator[None]:
    """A checkout's scripts run inside, and find its packages; the process is good for nothing else then."""
    sys.path.append(str(checkout))
    pretend_cuda()
    with megatron_on_cpu(), CudaMeansCpu():
        import megatron.training.initialize

        # The index builder, and up to 0.17 CUDA kernels.
        megatron.training.initialize._compile_dependencies = lambda: None
        yield


def main() -> None:
    script = Path(sys.argv[1]).resolve()
    sys.argv = sys.argv[1:]
    with megatron_lm_on_cpu(script.parent):
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()

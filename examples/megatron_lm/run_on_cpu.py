"""A script of Megatron-LM, such as pretrain_gpt.py, on the CPU: torchrun ... run_on_cpu.py SCRIPT ARGUMENTS

`megatron_on_cpu` does the same for Megatron-core. The scripts insist on CUDA in further places, which this program
gives them for as long as it runs. megatron-core must be installed, and comes before the checkout's own: it has its
index builder compiled.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mcore_entropy.megatron.cpu import megatron_on_cpu


class NoStream(contextlib.nullcontext[None]):
    """A CUDA stream or event of a machine without any: everything has happened already."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_keywords: None


def pretend_cuda() -> None:
    """What Megatron-LM's scripts ask of torch.cuda, answered as far as it matters to them."""
    cuda: Any = torch.cuda
    cuda.is_available = cuda.is_initialized = lambda: True  # arguments.py, initialize.py
    cuda.device_count = lambda: 1
    cuda.set_device = lambda _device: None
    cuda.get_device_capability = lambda *_device: (8, 0)
    cuda.get_device_properties = lambda *_device: SimpleNamespace(
        major=8, minor=0, name="cpu", multi_processor_count=1, total_memory=0
    )
    cuda.Stream = cuda.Event = lambda *_args, **_keywords: NoStream()
    cuda.stream = lambda _stream: contextlib.nullcontext()
    for counter in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(cuda, counter, lambda *_device: 0)
    cuda.memory_stats = lambda *_device: {}
    cuda.empty_cache = cuda.reset_peak_memory_stats = lambda *_device: None
    torch.nn.Module.cuda = lambda self, *_device: self  # type: ignore[method-assign]


def main() -> None:
    script = Path(sys.argv[1]).resolve()
    sys.argv = sys.argv[1:]
    sys.path[0] = ""  # where this file lies, Megatron-LM looks for nothing
    sys.path.append(str(script.parent))
    pretend_cuda()
    with megatron_on_cpu():
        import megatron.core.datasets.utils

        megatron.core.datasets.utils.compile_helpers = lambda: None  # the package has them compiled
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()

"""From options to what is to be done; what cannot be done is a UserError of one sentence."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from mcore_entropy.cli.benchmark.heads import Head
from mcore_entropy.cli.benchmark.problem import UserError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Defaults:
    """What holds where an option is not given."""

    tokens: int
    hidden_size: int
    vocab_size: int
    dtype: str
    repeats: int


# Sizes that end within a minute on two cores, and those of a real model's head.
ON_CPU = Defaults(tokens=1024, hidden_size=256, vocab_size=32000, dtype="float32", repeats=5)
ON_ACCELERATOR = Defaults(tokens=4096, hidden_size=4096, vocab_size=131072, dtype="bfloat16", repeats=10)


def device_named(name: str) -> torch.device:
    """This rank's, which is then the current one; "auto" takes an accelerator where there is one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        name = "cpu" if accelerator is None else accelerator.type
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device: expected auto, cpu, cuda or npu, got {name!r}") from None
    if device.type == "cpu":
        return device
    if accelerator is None or accelerator.type != device.type:
        here = "only the CPU" if accelerator is None else accelerator.type
        raise UserError(
            f"--device {name}: torch can use {here} here; `mcore-entropy doctor` says what is missing"
        )
    index = int(os.environ.get("LOCAL_RANK", 0)) if device.index is None else device.index
    if index >= torch.accelerator.device_count():
        raise UserError(f"--device {device.type}: there are {torch.accelerator.device_count()}, none {index}")
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def ranks_started(tensor_parallel: int | None) -> int:
    """How many torchrun has started; the option only says how many there ought to be."""
    started = int(os.environ.get("WORLD_SIZE", 1))
    if tensor_parallel is not None and tensor_parallel != started:
        raise UserError(
            f"--tensor-parallel {tensor_parallel}: {started} process{'es were' if started > 1 else ' was'} "
            f"started; start it as `torchrun --nproc-per-node {tensor_parallel} -m mcore_entropy.cli "
            f"benchmark --tensor-parallel {tensor_parallel}`"
        )
    if started > 1 and not dist.is_available():
        raise UserError("this torch is built without torch.distributed, which several ranks need")
    return started


def dtype_named(name: str) -> torch.dtype:
    """One of the three that heads are trained in."""
    if name not in _DTYPES:
        raise UserError(f"--dtype: expected {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def heads_named(names: str | None, heads: Sequence[tuple[Head, str | None]]) -> list[tuple[Head, str | None]]:
    """Those of the heads that the option names, or all."""
    if names is None:
        return list(heads)
    wanted = [name.strip() for name in names.split(",")]
    known = [head.name for head, _ in heads]
    if unknown := [name for name in wanted if name not in known]:
        raise UserError(f"--heads: expected some of {', '.join(known)}, got {unknown[0]!r}")
    return [(head, reason) for head, reason in heads if head.name in wanted]


def check_outputs(json_path: Path | None, plot_path: Path | None, check_only: bool) -> None:
    """Before minutes are spent on what cannot be written."""
    for option, path in (("--json", json_path), ("--plot", plot_path)):
        if path is None:
            continue
        target = path if path.exists() else path.absolute().parent
        if path.is_dir() or not target.exists() or not os.access(target, os.W_OK):
            reason = "it is a folder" if path.is_dir() else f"{target} is not there or not writable"
            raise UserError(f"{option} {path}: cannot be written, {reason}")
    if plot_path is None:
        return
    if check_only:
        raise UserError("--plot: there is nothing to draw with --check-only")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot: matplotlib is not installed; pip install matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if plot_path.suffix.removeprefix(".").lower() not in formats:
        raise UserError(f"--plot {plot_path}: expected a name that ends in .png, .svg or .pdf")

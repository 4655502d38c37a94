"""Starting and stopping a run: the process group, the device, and mistakes that are told once.

A rank that exits before the others have heard why leaves them hanging in a collective, or has torchrun kill
the one that was about to say it. So a mistake of the user is a `UserMistake` raised on *all* ranks: the first
rank prints it, all meet, and all leave with exit code 2.
"""

from __future__ import annotations

import argparse
import atexit
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")

# On every rank Megatron tells of each optional package it does without, and torch of functions renamed since.
warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


class UserMistake(Exception):
    """Something the user can put right. The message is a whole sentence."""


class Parser(argparse.ArgumentParser):
    """argparse, except that every rank reads the same command line and only the first may answer it."""

    def error(self, message: str) -> NoReturn:
        raise UserMistake(f"{message}; --help lists the options.")

    def print_help(self, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)


@dataclass(frozen=True)
class World:
    """The processes that torchrun started (or the only one, without torchrun), and this one's device."""

    rank: int
    size: int
    device: torch.device

    def say(self, *lines: str) -> None:
        if self.rank == 0:
            print(*lines, sep="\n", flush=True)

    def where(self) -> str:
        """What the processes run on, and how they speak to each other."""
        if self.device.type == "cuda":
            return f"{torch.cuda.get_device_name(self.device)}, NCCL"
        if torch.cuda.is_available():
            return f"CPU, gloo ({torch.cuda.device_count()} GPU(s) are too few for a process each)"
        return "CPU, gloo"

    def meet(self) -> None:
        """A barrier over gloo: it works before any GPU is touched."""
        dist.all_reduce(torch.zeros(1))

    def from_rank_zero(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on rank 0 while the others wait; all get its result, or raise its `UserMistake`."""
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = work()
            except UserMistake as mistake:
                answer[1] = str(mistake)
        dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
        if answer[1] is not None:
            raise UserMistake(answer[1])
        return answer[0]


def choose_device() -> torch.device:
    """A GPU for each process of this host if there are enough of them, otherwise the CPU.

    CUDA_VISIBLE_DEVICES="" asks for the CPU.
    """
    local_rank, processes = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.cuda.is_available() and torch.cuda.device_count() >= processes:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


@contextmanager
def world(*, for_megatron: bool = True) -> Iterator[World]:
    """The default process group: gloo for CPU tensors and, where there are GPUs, NCCL for theirs."""
    if for_megatron:  # it wants one queue, for its overlap; FSDP's needs several
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    device = choose_device()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:  # plain `python`, one process
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


@contextmanager
def megatron(world: World, tensor_model_parallel_size: int, seed: int) -> Iterator[None]:
    """Megatron's process groups and random states. On a CPU, its CUDA calls are led there meanwhile."""
    from megatron.core import parallel_state, tensor_parallel

    from mcore_entropy.megatron.cpu import megatron_on_cpu

    with megatron_on_cpu() if world.device.type == "cpu" else nullcontext():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def option(name: str) -> str:
    """How the argument `name` is written on the command line."""
    return f"--{name.replace('_', '-')}"


def check_counts(args: argparse.Namespace) -> None:
    """Raises `UserMistake` for a whole number below 1 that is no seed and no warm-up."""
    for name, value in vars(args).items():
        if type(value) is int and name not in ("seed", "lr_warmup_iters", "warmup_iters") and value < 1:
            raise UserMistake(f"{option(name)} must be at least 1, not {value}.")


def check_finite(args: argparse.Namespace) -> None:
    """Raises `UserMistake` for a number that is infinite or none at all."""
    for name, value in vars(args).items():
        if type(value) is float and not math.isfinite(value):
            raise UserMistake(f"{option(name)} must be a finite number, not {value}.")


def check_above_zero(args: argparse.Namespace, *names: str) -> None:
    """Raises `UserMistake` for an argument of these names that is 0 or less."""
    for name in names:
        if getattr(args, name) <= 0:
            raise UserMistake(f"{option(name)} must be above 0, not {getattr(args, name):g}.")


def check_multiples(args: argparse.Namespace, *rules: tuple[str, int, str]) -> None:
    """Raises `UserMistake` for an argument that is not a multiple of a rule's divisor, with the reason."""
    for name, divisor, why in rules:
        if getattr(args, name) % divisor:
            raise UserMistake(f"{option(name)} {getattr(args, name)} is not a multiple of {divisor}, {why}.")


def check_tensor_parallel_size(args: argparse.Namespace, world: World) -> None:
    """Raises `UserMistake` unless it divides the processes; sets the data-parallel size that follows."""
    tp = args.tensor_model_parallel_size
    if world.size % tp:
        raise UserMistake(
            f"--tensor-model-parallel-size {tp} does not divide the number of processes, {world.size}: "
            f"start {tp} of them or a multiple with torchrun --nproc-per-node."
        )
    args.data_parallel_size = world.size // tp


def make_folder(folder: Path, name: str) -> None:
    """Raises `UserMistake` where the folder of the option `name` cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserMistake(f"{option(name)}: cannot make the folder {folder}: {error.strerror}.") from None


def check_packages(packages: Mapping[str, str]) -> None:
    """Raises `UserMistake` unless these modules, the keys, can be imported; the values install them."""
    missing = [package for module, package in packages.items() if find_spec(module) is None]
    if missing:
        raise UserMistake(
            f"missing from the environment {sys.prefix}: {' '.join(missing)} "
            "(all of it: pip install -e '.[demo]' in the checkout of mcore_entropy)."
        )


def run(program: Callable[[World], int], *, for_megatron: bool = True) -> NoReturn:
    """Runs `program` on every rank and exits with what it returns, or with 2 after a mistake."""
    with world(for_megatron=for_megatron) as here:
        try:
            code = program(here)
        except UserMistake as mistake:
            sentence = f"{os.path.basename(sys.argv[0])}: error: {mistake}"
            if here.rank == 0:
                print(sentence, file=sys.stderr, flush=True)
            for_torchrun(sentence)  # every rank: torchrun shows the one that ended first
            here.meet()
            code = 2
    leave(code)


def leave(code: int) -> NoReturn:
    """Ends the process, but for the interpreter's own end.

    A DDP of torch 2.13 or 2.14 leaves threads of its gloo group behind destroy_process_group, and with them
    the interpreter's end aborts now and then: "terminate called without an active exception", exit code -6.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def for_torchrun(sentence: str) -> None:
    """Has torchrun repeat it at the end of what it writes about any process that fails."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        with open(error_file, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": sentence, "extraInfo": {"timestamp": int(time.time())}}}, file)

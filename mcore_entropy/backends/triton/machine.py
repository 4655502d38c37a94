"""What a device is able to, and the table of tiles that follows from it.

A tile depends on the architecture and on what a kernel does, never on the number of tokens nor on a timing: a
token's results must not depend on its neighbours, and every run must give the same bits.
docs/decisions/0005-triton-tiles.md has the measurements. Only what asks a device needs Triton: the tables are
there without it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Machine:
    """One device.

    Attributes:
        multiprocessors: how many programs of one tile run at once.
        tma: whether it copies blocks by descriptor (sm_90 and newer).
        large_tiles: whether a program may use more than 200 KiB of shared memory.
        interpreted: kernels run in Triton's interpreter, on the CPU.
    """

    multiprocessors: int
    tma: bool
    large_tiles: bool
    interpreted: bool = False


@dataclass(frozen=True)
class Tile:
    """One program's part of a matrix product [n, H] x [H, v], and how it is computed.

    Attributes:
        rows, columns, depth: of a tile of the product, and of one step along H.
        group: row tiles that are computed one after the other for the same columns.
        warps, stages: of the program; steps whose loads are under way at once.
        per_multiprocessor: programs that share a multiprocessor.
    """

    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int
    per_multiprocessor: int


_WIDE_STATISTICS = Tile(rows=128, columns=256, depth=64, group=16, warps=8, stages=3, per_multiprocessor=1)
_WIDE_GRADIENT = Tile(rows=128, columns=256, depth=64, group=8, warps=8, stages=3, per_multiprocessor=1)
_SMALL = Tile(rows=128, columns=128, depth=32, group=8, warps=4, stages=3, per_multiprocessor=1)
_INTERPRETED = Tile(rows=32, columns=64, depth=32, group=2, warps=4, stages=1, per_multiprocessor=1)


def interpreted() -> bool:
    """Whether ``TRITON_INTERPRET=1`` was in force when the kernels were made."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


@functools.cache
def machine(device: torch.device) -> Machine:
    if interpreted():
        return Machine(multiprocessors=3, tma=True, large_tiles=False, interpreted=True)
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    properties = driver.active.utils.get_device_properties(index)
    return Machine(
        multiprocessors=properties["multiprocessor_count"],
        tma=torch.cuda.get_device_capability(index) >= (9, 0),
        large_tiles=properties["max_shared_mem"] > 200 * 1024,
    )


def statistics_tile(device: Machine) -> Tile:
    if device.interpreted:
        return _INTERPRETED
    return _WIDE_STATISTICS if device.large_tiles and device.tma else _SMALL


def gradient_tile(device: Machine) -> Tile:
    if device.interpreted:
        return _INTERPRETED
    return _WIDE_GRADIENT if device.large_tiles and device.tma else _SMALL

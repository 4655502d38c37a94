"""The cards that an estimate can be for: their memory, and what decides the sizes of tiles on them."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from mcore_entropy.backends.triton.machine import Machine
from mcore_entropy.cli.estimate.tiles import Tiles, TorchTiles, TritonTiles
from mcore_entropy.cli.estimate.workload import Workload
from mcore_entropy.execution import Execution

_CUDA, _CPU = torch.device("cuda"), torch.device("cpu")
# Any device type without rules of its own: torch knows the name "npu" only where torch-npu is.
_NPU = torch.device("meta")
_HOPPER = Machine(multiprocessors=132, tma=True, large_tiles=True)


def _older(multiprocessors: int) -> Machine:
    return Machine(multiprocessors, tma=False, large_tiles=False)


@dataclass(frozen=True)
class Card:
    """One device. `gib`: what torch shows as its capacity, rounded down; `machine` None: no Triton there."""

    name: str
    gib: float
    device: torch.device
    machine: Machine | None


CARDS = {
    card.name: card
    for card in (
        Card("H200", 139, _CUDA, _HOPPER),
        Card("H100-80", 79, _CUDA, _HOPPER),
        Card("A100-80", 79, _CUDA, _older(108)),
        Card("A100-40", 39, _CUDA, _older(108)),
        Card("L40S", 44, _CUDA, _older(142)),
        Card("4090", 23, _CUDA, _older(128)),
        Card("910B", 60, _NPU, None),
    )
}
BACKENDS = ("auto", "triton", "torch", "npu")


def card_of(text: str) -> Card:
    """The card of this name, `cpu` for this machine, or a number of GiB on a GPU like the H100.

    Raises:
        ValueError: it is none of them.
    """
    by_name = {name.lower(): card for name, card in CARDS.items()}
    if text.lower() in by_name:
        return by_name[text.lower()]
    if text.lower() == "cpu":
        gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return Card("cpu", round(gib, 1), _CPU, None)
    try:
        gib = float(text)
    except ValueError:
        gib = math.nan
    if not 0 < gib < math.inf:
        raise ValueError(f"card: expected one of {', '.join(CARDS)}, cpu, or a number of GiB, got {text!r}")
    return Card(f"{gib:g} GiB", gib, _CUDA, _HOPPER)


def tiles_of(backend: str, card: Card, work: Workload, execution: Execution) -> Tiles:
    """Those of a backend, by name, on a card; of `auto` the one that the library would choose there.

    Raises:
        ValueError: there is no such backend on this card.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "triton" and card.machine is None:
        raise ValueError(f"backend: triton runs on NVIDIA GPUs, and the card is {card.name}")
    if backend == "npu" and card.device != _NPU:
        raise ValueError(f"backend: npu runs on Ascend NPUs, and the card is {card.name}")
    if backend in ("auto", "triton") and card.machine is not None:
        return TritonTiles(work, execution, card.machine, card.device)
    return TorchTiles(work, execution, card.device)

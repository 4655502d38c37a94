"""An estimate: the three heads on one card, whether they fit, and the settings to use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mcore_entropy.backends.triton.sizes import KeptSize
from mcore_entropy.cli.estimate.cards import Card, tiles_of
from mcore_entropy.cli.estimate.fused_head import fused
from mcore_entropy.cli.estimate.logits_heads import chunked, eager
from mcore_entropy.cli.estimate.tiles import TritonTiles
from mcore_entropy.cli.estimate.workload import FP32, Head, Workload
from mcore_entropy.execution import Execution
from mcore_entropy.products import HALF

MIB, GIB = 2**20, 2**30
# What is tried in turn, from the fastest: tokens of a chunk, and MiB of the workspace.
_SMALLER = ((None, None), (4096, 128), (2048, 64), (1024, 32), (512, 16))
_SPARE = 0.9  # of the memory left, for logits to keep: the allocator's blocks do not fit without gaps


@dataclass(frozen=True)
class Settings:
    """What to pass to the library; `why` says it in a sentence."""

    path: str
    chunk_size: int | None
    execution: Execution
    why: str


@dataclass(frozen=True)
class Estimate:
    """Attributes:
    reserved_gib: what the rest of the model takes, None where the user did not say.
    heads: eager, chunked, fused with the settings.
    """

    work: Workload
    card: Card
    backend: str
    reserved_gib: float | None
    heads: tuple[Head, ...]
    settings: Settings

    @property
    def resident(self) -> int:
        return _resident(self.work)

    def total(self, head: Head) -> int:
        """Weight, hidden states, what is reserved, and the head's peak."""
        return self.resident + int((self.reserved_gib or 0) * GIB) + head.peak.bytes

    def fits(self, head: Head) -> bool:
        return self.total(head) <= self.card.gib * GIB

    def as_json(self) -> dict[str, Any]:
        work, settings = self.work, self.settings
        return {
            "head": {
                "tokens": work.tokens,
                "hidden_size": work.hidden_size,
                "vocab_size": work.vocab_size,
                "columns_per_rank": work.columns,
                "dtype": str(work.dtype).removeprefix("torch."),
                "tensor_parallel": work.tensor_parallel,
                "sequence_parallel": work.sequence_parallel,
                "masked": work.masked,
                "entropy": work.entropy,
                "main_grad": work.main_grad,
            },
            "card": {"name": self.card.name, "usable_gib": self.card.gib, "backend": self.backend},
            "resident_bytes": self.resident,
            "reserved_gib": self.reserved_gib or 0,
            "paths": [
                {
                    "path": head.name,
                    "peak_bytes": head.peak.bytes,
                    "peak_at": head.peak.name,
                    "parts": {part.name: part.bytes for part in head.peak.parts},
                    "moments": {one.name: one.bytes for one in head.moments},
                    "total_bytes": self.total(head),
                    "flops": head.flops,
                    "fits": self.fits(head),
                }
                for head in self.heads
            ],
            "settings": {
                "path": settings.path,
                "chunk_size": settings.chunk_size,
                "workspace_mib": settings.execution.workspace_mib,
                "logits_budget_mib": settings.execution.logits_budget_mib,
                "compact_rows": settings.execution.compact_rows,
                "why": settings.why,
            },
        }


def _resident(work: Workload) -> int:
    """What exists before the head runs: hidden states, weight, and main_grad where there is one."""
    main_grad = work.columns * work.hidden_size * FP32 if work.main_grad else 0
    return work.hidden_bytes + work.weight_bytes + main_grad


def estimate(
    work: Workload, card: Card, backend: str = "auto", reserved_gib: float | None = None
) -> Estimate:
    """The three heads, the fused one with the fastest settings that fit.

    Raises:
        ValueError: the backend does not run on this card, or a value is out of its range.
    """
    if reserved_gib is not None and not 0 <= reserved_gib < math.inf:
        raise ValueError(f"reserved: expected 0 GiB or more, got {reserved_gib:g}")
    free = int((card.gib - (reserved_gib or 0)) * GIB) - _resident(work)

    def head_with(chunk_size: int | None, execution: Execution) -> Head:
        return fused(work, tiles_of(backend, card, work, execution), execution, chunk_size)

    dense = (eager(work), chunked(work))
    for chunk_size, workspace_mib in _SMALLER:
        execution = Execution(workspace_mib=workspace_mib)
        head = head_with(chunk_size, execution)
        if head.peak.bytes <= free:
            break
    fits = head.peak.bytes <= free
    default = (chunk_size, workspace_mib) == _SMALLER[0]
    if fits and default and reserved_gib is not None:
        left = int(_SPARE * (free - head.peak.bytes))
        keeping = Execution(logits_budget_mib=_budget_mib(work, card, backend, left))
        with_kept = head_with(None, keeping)
        if with_kept.peak.bytes <= free:
            execution, head = keeping, with_kept
    if fits:
        share = head.peak.bytes / dense[0].peak.bytes
        why = f"The fused head fits, in {share:.1%} of eager's memory"
        why += "." if default else ", with smaller chunks and tiles than the default, which are slower."
    else:
        why = (
            f"The fused head does not fit in the {max(free, 0) / GIB:.1f} GiB that are left, with small "
            "chunks and tiles either: use fewer tokens a micro-batch, or more tensor-parallel ranks."
        )
    settings = Settings("fused" if fits else "none", chunk_size, execution, why)
    return Estimate(work, card, backend, reserved_gib, (*dense, head), settings)


def _budget_mib(work: Workload, card: Card, backend: str, left: int) -> int:
    """MiB of logits worth keeping in `left` bytes: all of them or as many as there is room for."""
    tiles = tiles_of(backend, card, work, Execution())
    if not isinstance(tiles, TritonTiles) or work.dtype not in HALF or left < MIB:
        return 0
    whole = -(-KeptSize.budget_for_all(work.live(work.tokens), work.columns, tiles.machine) // MIB)
    return min(whole, left // MIB)

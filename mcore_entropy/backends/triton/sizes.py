"""How much memory the kernels' tiles and partials take: from shapes, options and the machine alone.

Nothing here needs Triton or a GPU, so that memory can be planned where there is none. n rows of one call, v
columns of this rank, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_entropy.backends.triton.machine import Machine, statistics_tile
from mcore_entropy.backends.triton.slices import column_slices
from mcore_entropy.execution import Execution

_WORKSPACE_MIB = 256
_WITH_HIDDEN_SUM_MIB = 512
# A tile at least so wide: with fewer columns the passes over the sums cost more than they are worth.
_FEWEST_COLUMNS = 1024
# Rows of one launch of the forward: the partials of a tile are bounded, and more rows bring no speed.
STATISTICS_ROWS = 8192
_WIDE_MULTIPLE = 64  # cuBLAS has no fast kernels for odd row strides


def wide_workspace(execution: Execution) -> int:
    """Bytes that a tile of fp32 logits may take where the operands are fp32."""
    return execution.workspace_bytes(_WORKSPACE_MIB)


def gradient_workspace(execution: Execution, tokens: int, hidden_size: int) -> int:
    """Bytes that a half-precision tile of the logits' gradient may take, `tokens` being those of the call."""
    hidden_sum_mib = 4 * tokens * hidden_size // 2**20
    return execution.workspace_bytes(max(_WITH_HIDDEN_SUM_MIB - hidden_sum_mib, _WORKSPACE_MIB))


def most_rows(itemsize: int, execution: Execution) -> int:
    """See `Backend.most_rows`, for operands of `itemsize` bytes."""
    return max(execution.workspace_bytes(_WORKSPACE_MIB) // (itemsize * _FEWEST_COLUMNS), 1)


def gradient_slices(
    rows: int, hidden_size: int, columns: int, kept_columns: int, workspace: int, device: Machine
) -> list[slice]:
    """The slices of columns that a half-precision backward of n rows works in; kept columns come first."""
    at_most = max(workspace // (2 * max(rows, 1)), 1)
    return [
        *column_slices(0, kept_columns, at_most, rows, hidden_size, device),
        *column_slices(kept_columns, columns, at_most, rows, hidden_size, device),
    ]


def wide_slices(rows: int, columns: int, workspace: int) -> list[slice]:
    """The slices of columns in which fp32 logits of n rows exist."""
    step = max(workspace // (4 * max(rows, 1)) // _WIDE_MULTIPLE, 1) * _WIDE_MULTIPLE
    return [slice(start, min(start + step, columns)) for start in range(0, columns, step)]


def widest(slices: list[slice]) -> int:
    return max((s.stop - s.start for s in slices), default=0)


def aligned(columns: int) -> int:
    """A row's stride for so many half-precision columns: rows start on 16-byte boundaries."""
    return -(-columns // 8) * 8


def statistics_tiles(columns: int, device: Machine) -> int:
    """Tiles of columns of the forward's product; each leaves its sums of every row."""
    return -(-columns // statistics_tile(device).columns)


@dataclass(frozen=True)
class KeptSize:
    """Whole tiles of columns whose logits a forward keeps for its backward; none for 0 tiles."""

    tiles: int
    columns: int
    bytes: int

    @staticmethod
    def within(tokens: int, columns: int, budget: int, device: Machine) -> KeptSize:
        """As many as `budget` bytes hold for all tokens."""
        width = statistics_tile(device).columns
        bytes_a_tile = KeptSize._of_a_tile(tokens, device)
        tiles = min(budget // max(bytes_a_tile, 1), statistics_tiles(columns, device))
        if not tiles or not tokens:
            return KeptSize(0, 0, 0)
        kept = min(tiles * width, columns)
        return KeptSize(tiles, kept, tokens * (aligned(kept) * 2 + tiles * 4))

    @staticmethod
    def budget_for_all(tokens: int, columns: int, device: Machine) -> int:
        """The least budget within which every column is kept: whole tiles, the last one too."""
        return statistics_tiles(columns, device) * KeptSize._of_a_tile(tokens, device)

    @staticmethod
    def _of_a_tile(tokens: int, device: Machine) -> int:
        return tokens * (statistics_tile(device).columns * 2 + 4)

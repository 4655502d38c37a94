"""How large the torch backend's tiles are: from shapes, options and the device's type alone.

n rows of one call, v columns of this rank. The default workspace is 12 MiB on the CPU, where tiles should
stay in the cache, and 256 MiB elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mcore_entropy.execution import Execution
from mcore_entropy.statistics import statistics_dtype

_CPU_WORKSPACE_MIB = 12
_DEVICE_WORKSPACE_MIB = 256
# Live at once for one tile: the logits, their exponentials, and a third for a softcap's slope, for
# the squares of a metric or for a half-precision copy.
_TILES_ALIVE = 3
# More rows than this bring a matrix product no speed (docs/decisions/0004-torch-tiles.md), and fewer columns
# than this lose it. Tiles are a multiple of it wide: cuBLAS has no fast kernels for odd row strides.
_MOST_ROWS = 2048
_FEWEST_COLUMNS = 64


def tile_cells(device: torch.device, dtype: torch.dtype, execution: Execution) -> int:
    """How many numbers one tile may hold."""
    default = _CPU_WORKSPACE_MIB if device.type == "cpu" else _DEVICE_WORKSPACE_MIB
    return execution.workspace_bytes(default) // (_TILES_ALIVE * statistics_dtype(dtype).itemsize)


def even_ranges(length: int, at_most: int, multiple: int = 1) -> Iterator[slice]:
    """[0, length) in slices of nearly equal length, all but the last of a multiple of `multiple`."""
    count = max(-(-length // max(at_most, 1)), 1)
    step = -(-length // (count * multiple)) * multiple
    for start in range(0, length, max(step, 1)):
        yield slice(start, min(start + step, length))


def most_rows(cells: int) -> int:
    """Rows of a tile of the fused head."""
    return max(min(_MOST_ROWS, cells // _FEWEST_COLUMNS), 1)


def column_blocks(rows: int, columns: int, cells: int) -> list[slice]:
    """Columns of the tiles of [n, v]."""
    at_most = cells // max(rows, 1) // _FEWEST_COLUMNS * _FEWEST_COLUMNS
    return list(even_ranges(columns, max(at_most, _FEWEST_COLUMNS), _FEWEST_COLUMNS))

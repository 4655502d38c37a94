"""How wide the slices of columns are in which the fused head's backward works."""

from __future__ import annotations

import functools

from mcore_entropy.backends.triton.machine import Machine

_MULTIPLE = 256  # every tile's width divides it
_SUM_PASS = 800  # reading and writing hidden's sum once, as steps along the columns of its product


@functools.lru_cache(maxsize=1024)
def column_slices(
    start: int, stop: int, at_most: int, rows: int, hidden_size: int, device: Machine
) -> list[slice]:
    """[start, stop) in slices of the width that wastes least of the device, all but the last of it.

    The last round of a product's tiles leaves multiprocessors idle: with 1.6 rounds of tiles, a fifth of
    two rounds. Wide slices, besides, cost fewer passes over hidden's sum.
    """
    widths = range(_MULTIPLE, max(min(at_most, stop - start), _MULTIPLE) + 1, _MULTIPLE)
    step = min(
        reversed(widths), key=lambda width: _slice_cost(stop - start, width, rows, hidden_size, device)
    )
    return [slice(first, min(first + step, stop)) for first in range(start, stop, step)]


def _slice_cost(columns: int, width: int, rows: int, hidden_size: int, device: Machine) -> float:
    """Time of the products of [n, H] with `columns` columns in slices of a width, in any unit."""
    whole, rest = divmod(columns, width)
    cost = 0.0
    for number, columns_of_one in ((whole, width), (1, rest)):
        if not columns_of_one or not number:
            continue
        one = float(_rounds(rows, columns_of_one, device) * hidden_size)  # the gradient's tile
        one += _rounds(columns_of_one, hidden_size, device) * rows  # the weight's gradient
        one += _SUM_PASS * rows * hidden_size / (128 * 256 * device.multiprocessors)
        cost += number * one
    return cost


def _rounds(rows: int, columns: int, device: Machine) -> int:
    tiles = -(-rows // 128) * -(-columns // 256)
    return -(-tiles // device.multiprocessors)

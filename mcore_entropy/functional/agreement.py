"""What ``MCORE_ENTROPY_CHECKS=1`` verifies across the ranks of a group: that they were told the same.

Every rank of a group must call with the same shapes, options and per-token values. A rank that does not
would hang the others in a collective, or give each rank another loss. So before its collectives each pass
compares, through the group's store (see `mcore_entropy.functional.meeting`), what it is about to do.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mcore_entropy.functional.meeting import Meetings, Message, has_other_ranks
from mcore_entropy.parallel import TensorParallelGroup, VocabShard, checks_enabled

_BLOCK = 1024  # tokens that are looked at together to find the first that differs


@contextmanager
def errors_on_every_rank(group: TensorParallelGroup) -> Iterator[None]:
    """With checks on, an error that one rank meets inside is raised on all of them.

    The others learn of it where they next compare; a call without errors compares once, further on.
    Dynamo traces this around the little that is checked outside an op, which is the same on all ranks.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if error is not None:
        if checks_enabled() and not torch.compiler.is_compiling() and has_other_ranks(group):
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            Meetings.of(group).tell({"error": f"{kind}{error}"})
        raise error


def check_agreement(
    group: TensorParallelGroup,
    call: str,
    facts: dict[str, Any],
    tensors: dict[str, Tensor | None],
    shard: VocabShard | None = None,
) -> None:
    """Compare over the group what `call` this is, its facts, then per-token tensors, then the shards' places.

    Raises:
        ValueError: on every rank, naming what differs, or what another rank was given.
        RuntimeError: a rank did not come.
    """
    if not checks_enabled() or not has_other_ranks(group):
        return
    meetings = Meetings.of(group)
    told: dict[str, str] = {name: str(value) for name, value in facts.items()}
    for name, tensor in tensors.items():
        told[name] = str(None if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}")
    present = {name: _comparable(tensor) for name, tensor in tensors.items() if tensor is not None}
    message: Message = {
        "call": call,
        "facts": told,
        "digests": {name: _digest(tensor) for name, tensor in present.items()},
        "columns": None if shard is None else [shard.start, shard.start + shard.columns],
    }
    everyone = _without_errors(meetings.exchange(message))
    _raise_if_different("call", [other["call"] for other in everyone])
    different = [
        _different(name, values)
        for name in told
        if len(set(values := [other["facts"][name] for other in everyone])) > 1
    ]
    if different:
        raise ValueError("; ".join(different))
    for name, tensor in present.items():
        if len({other["digests"][name] for other in everyone}) > 1:
            raise ValueError(_first_difference(name, tensor, call, meetings))
    if shard is not None:
        _check_columns([other["columns"] for other in everyone], shard.vocab_size)


def _without_errors(everyone: list[Message | None]) -> list[Message]:
    found = [
        f"rank {rank}: {message['error']}"
        for rank, message in enumerate(everyone)
        if message is not None and "error" in message
    ]
    if found:
        raise ValueError(f"another rank of the group failed before the collectives: {'; '.join(found)}")
    return [message for message in everyone if message is not None]


def _check_columns(ranges: list[list[int]], vocab_size: int) -> None:
    """The shards follow each other without gap or overlap and hold the vocabulary, or ValueError."""
    expected_start = 0
    for start, stop in ranges:
        if start != expected_start:
            break
        expected_start = stop
    else:
        if expected_start >= vocab_size:
            return
    raise ValueError(
        f"vocab_start_index: expected shards that follow each other in rank order and hold vocab_size = "
        f"{vocab_size} columns, got the column ranges {_by_rank(ranges)}"
    )


def _first_difference(name: str, tensor: Tensor, call: str, meetings: Meetings) -> str:
    """The first token whose value is not the same on all ranks: two more meetings, of all of them."""

    def exchanged(of: Callable[[Tensor], Any], pieces: tuple[Tensor, ...]) -> list[list[Any]]:
        message = {"call": call, "values": [of(piece) for piece in pieces]}
        return [other["values"] for other in _without_errors(meetings.exchange(message))]

    blocks = tensor.split(_BLOCK)
    block = _first_unequal(exchanged(_digest, blocks))
    values = exchanged(lambda number: repr(number.item()), blocks[block].unbind())
    token = _first_unequal(values)
    count = sum(len(set(of_token)) > 1 for of_token in zip(*values, strict=True))
    first = block * _BLOCK
    return (
        f"{_different(name, [of_rank[token] for of_rank in values])}, at token {first + token} ({count} of "
        f"tokens {first} to {first + len(values[0]) - 1} differ)"
    )


def _first_unequal(lists: list[list[Any]]) -> int:
    return next(index for index, values in enumerate(zip(*lists, strict=True)) if len(set(values)) > 1)


def _comparable(tensor: Tensor) -> Tensor:
    """[N] on the CPU, in which equal values have equal bits: one NaN, one zero."""
    values = tensor.detach().flatten().cpu()
    if values.is_floating_point():
        values = torch.where(values.isnan(), torch.nan, values) + 0.0
    return values.contiguous()


def _digest(values: Tensor) -> str:
    """Of the bits. (numpy, which would give a buffer, need not be installed.)"""
    size = values.numel() * values.element_size()
    buffer = (ctypes.c_char * size).from_address(values.data_ptr()) if size else b""
    return hashlib.blake2b(buffer, digest_size=16).hexdigest()


def _raise_if_different(name: str, values: list[str]) -> None:
    if len(set(values)) > 1:
        raise ValueError(_different(name, values))


def _different(name: str, values: list[str]) -> str:
    return f"{name}: expected the same on every rank of the group, got {_by_rank(values)}"


def _by_rank(values: list[Any]) -> str:
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))

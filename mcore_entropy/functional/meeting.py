"""Where the ranks of a group compare notes without a collective: the store that the group met through.

A rank that goes another way than the others (it raised, it makes another call, it is gone) would leave them
waiting in a collective. Through the store it can be told from one that agrees, and named.

Every meeting of a group has a number, which each rank counts for itself: two ranks that make the same calls
come to the same meetings.
"""

from __future__ import annotations

import json
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# Private, and the only way from a group to its store.
from torch.distributed.distributed_c10d import Store, _get_process_group_store

from mcore_entropy.parallel import TensorParallelGroup

Message = dict[str, Any]  # of what JSON knows; one with "error" says that its rank does not go on

_SLICE = timedelta(seconds=1)  # Python sees a Ctrl-C, and a failed rank's message, between two waits


class Meetings:
    """One group's meetings, as this rank counts them.

    A rank writes a message under the meeting's number and its own rank, and reads the others'. Once all of
    them have written the next one, nobody reads the last any more, and its writer deletes it: the store
    holds a message or two of each rank, however many meetings there were.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._store = _store_of(group)
        self._timeout = _timeout_of(group)
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._number = 0
        self._written: list[str] = []

    @staticmethod
    def of(group: TensorParallelGroup) -> Meetings:
        """The group's, made once.

        Raises:
            RuntimeError: the group has no store.
        """
        assert group.process_group is not None
        found = _meetings.get(group.process_group)
        if found is None:
            found = _meetings[group.process_group] = Meetings(group.process_group)
        return found

    def tell(self, message: Message) -> None:
        """Leave a message for the others' next meeting, and do not wait for them."""
        self._number += 1
        self._written.append(self._key(self._rank))
        self._store.set(self._written[-1], json.dumps(message))

    def exchange(self, message: Message) -> list[Message | None]:
        """Everybody's message, by rank; None for ranks that had not arrived when another's told of an error.

        Raises:
            RuntimeError: a rank did not arrive within the group's timeout, and none told why.
        """
        self.tell(message)
        deadline = time.monotonic() + self._timeout.total_seconds()
        keys = [self._key(rank) for rank in range(self._size)]
        while True:
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
            try:
                self._store.wait(keys, min(left, _SLICE))
            except dist.DistStoreError:
                present = [self._read(key) for key in keys]
                if any(other is not None and "error" in other for other in present):
                    return present
                missing = [rank for rank, other in enumerate(present) if other is None]
                if missing and time.monotonic() >= deadline:
                    self._give_up(missing, message)
            else:
                break
        everyone: list[Message | None] = [json.loads(text) for text in self._store.multi_get(keys)]
        for key in self._written[:-1]:
            self._store.delete_key(key)
        del self._written[:-1]
        return everyone

    def _give_up(self, missing: list[int], message: Message) -> None:
        ranks = " and ".join(f"rank {rank}" for rank in missing)
        seconds = self._timeout.total_seconds()
        text = (
            f"{ranks} of the group's {self._size} did not arrive within its timeout of {seconds:g} s at "
            f"comparison {self._number}, where this rank does: {message.get('call', 'a comparison')}. It "
            "ended, hangs, makes fewer or other calls, or runs without MCORE_ENTROPY_CHECKS=1"
        )
        # For a rank that comes late: it must not go on to a collective alone.
        self._store.set(self._key(self._rank), json.dumps({"error": f"gave up: {text}"}))
        raise RuntimeError(text)

    def _read(self, key: str) -> Message | None:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _key(self, rank: int) -> str:
        return f"mcore_entropy/{self._number}/{rank}"


# A group's end is its meetings' end.
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, Meetings] = weakref.WeakKeyDictionary()


def has_other_ranks(group: TensorParallelGroup) -> bool:
    """Whether there is somebody to meet: not on a single rank, nor in torch's fake group of one process."""
    return group.size > 1 and dist.get_backend(group.process_group) != "fake"


def _store_of(group: dist.ProcessGroup) -> Store:
    try:
        store = _get_process_group_store(group)
    except KeyError:
        store = None
    if store is None:
        raise RuntimeError(
            "MCORE_ENTROPY_CHECKS=1: expected a group made by init_process_group, new_group or a DeviceMesh, "
            f"whose store the ranks compare their calls through, got {group} without one; was it destroyed? "
            "MCORE_ENTROPY_CHECKS=0 does without"
        )
    return store


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the group's own collectives wait; where its backend does not say, how long its store does."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout: timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    of_store: timedelta = _store_of(group).timeout  # type: ignore[attr-defined] # torch's stubs have it not
    return of_store

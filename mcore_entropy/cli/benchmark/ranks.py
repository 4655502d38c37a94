"""The ranks of a run, and how they agree on what became of a head.

A head that fails on one rank, out of memory as a rule, leaves the others waiting in its collectives for ever.
So each head has a process group of its own; a rank that fails says so in a store that no collective of the
head uses, and leaves the group. NCCL's collectives end where they are aborted, which the others do that watch
the store; gloo's end where a peer closes its connections, which it does with the last reference to its group.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

Group = dist.ProcessGroup | None
_PATIENCE = timedelta(minutes=30)  # a rank may compile much longer than another
_COLLECTIVE_PATIENCE = timedelta(minutes=10)  # should something keep a failed rank's group alive after all
_POLL = 0.05  # seconds


class HeadFailed(Exception):
    """A head raised on some rank; the message says what, and on which. Raised on all ranks alike."""


class Alone:
    """One process with the whole vocabulary."""

    rank, size = 0, 1

    def channel(self, _name: str) -> AloneChannel:
        return AloneChannel()

    def close(self) -> None:
        """Nothing is open."""


class AloneChannel:
    """One head's attempts in one process."""

    group: Group = None

    def attempt(self, run: Callable[[], Any]) -> list[Any]:
        try:
            return [run()]
        except Exception as error:
            raise HeadFailed(described(error)) from error


class Together:
    """The processes that torchrun has started, each with a shard of the vocabulary."""

    def __init__(self, device: torch.device) -> None:
        backend = "cpu:gloo"
        if device.type != "cpu":
            backend += f",{device.type}:{dist.get_default_backend_for_device(device)}"
        dist.init_process_group(backend, timeout=_PATIENCE)
        self.device, self.rank, self.size = device, dist.get_rank(), dist.get_world_size()
        port = [0]
        host = os.environ["MASTER_ADDR"]
        if self.rank == 0:
            # Any free port, and a store of this run's own: the watching threads wait in theirs.
            self._server = TCPStore(host, 0, None, is_master=True, timeout=_PATIENCE, wait_for_workers=False)
            port = [self._server.port]
        dist.broadcast_object_list(port, device=torch.device("cpu"))
        self.store, self.watched = (
            TCPStore(host, port[0], None, is_master=False, timeout=_PATIENCE) for _ in range(2)
        )

    def channel(self, name: str) -> TogetherChannel:
        """For a head; to be called by all ranks in the same order."""
        return TogetherChannel(self, name)

    def close(self) -> None:
        """Wait for all: rank 0 holds the store."""
        self.store.set(f"done {self.rank}", "")
        self.store.wait([f"done {rank}" for rank in range(self.size)])
        if self.rank == 0:
            self.store.wait([f"left {rank}" for rank in range(1, self.size)])
        else:
            self.store.set(f"left {self.rank}", "")


class TogetherChannel:
    """One head's attempts, in a group of its own."""

    def __init__(self, ranks: Together, name: str) -> None:
        self._ranks, self._name, self._attempts = ranks, name, 0
        # The one lasting reference: see `_leave`.
        self.group: Group = dist.new_group(timeout=_COLLECTIVE_PATIENCE)
        # Now, while all are well: a group that is still to connect cannot be aborted.
        dist.all_reduce(torch.zeros(1, device=ranks.device), group=self.group)

    def attempt(self, run: Callable[[], Any]) -> list[Any]:
        """Every rank's result of `run`, which JSON must be able to hold, in rank order.

        Raises:
            HeadFailed: on all ranks, when one of them failed.
        """
        self._attempts += 1
        key, store = f"{self._name} {self._attempts}", self._ranks.store
        result, reason = None, ""
        with self._watching(key):
            try:
                result = run()
            except Exception as error:
                reason = described(error)
                if store.add(f"{key} failures", 1) == 1:  # not of those that this failure makes fail
                    store.set(f"{key} first", json.dumps([self._ranks.rank, reason]))
                traceback.clear_frames(error.__traceback__)  # they hold the group, and tensors
        if reason:
            self._leave()
        store.set(f"{key} of {self._ranks.rank}", json.dumps([reason, result]))
        outcomes = [json.loads(store.get(f"{key} of {rank}")) for rank in range(self._ranks.size)]
        if any(reason for reason, _ in outcomes):
            self._leave()
            rank, reason = json.loads(store.get(f"{key} first"))
            raise HeadFailed(f"on rank {rank} of {self._ranks.size}: {reason}")
        return [result for _, result in outcomes]

    @contextlib.contextmanager
    def _watching(self, key: str) -> Iterator[None]:
        """Meanwhile, abort the group when some rank has failed."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_POLL):
                if self._ranks.watched.check([f"{key} first"]):
                    self._abort()
                    return

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _abort(self) -> None:
        """End NCCL's collectives on this rank; gloo's go on."""
        if self.group is not None and self._ranks.device.type != "cpu":
            with contextlib.suppress(Exception):  # what it raises of a group that has failed already
                self.group.abort()

    def _leave(self) -> None:
        """Close this rank's connections, so that gloo's collectives end on the others."""
        if self.group is None:
            return
        self._abort()
        with contextlib.suppress(Exception):
            dist.destroy_process_group(self.group)
        self.group = None
        # A backward that raised leaves its other nodes, which hold the group, in this thread's queue; the
        # next backward takes them out.
        torch.zeros((), requires_grad=True).backward()
        gc.collect()  # of graphs and tracebacks that hold it


Ranks = Alone | Together
Channel = AloneChannel | TogetherChannel


def described(error: BaseException) -> str:
    """In one line."""
    if isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error):
        return "out of memory"
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else ""
    return f"{type(error).__name__}: {first}"[:300].rstrip(": ")

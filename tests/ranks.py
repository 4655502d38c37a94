"""Tests on several ranks: real processes with a gloo group, on the CPU.

    def shards_add_up(rows):                   # module level, so that other processes can import it
        total = torch.full((rows,), float(dist.get_rank()))
        dist.all_reduce(total)
        return total

    def test_shards_add_up():
        first, second = run_ranks(2, shards_add_up, 3)

Every call has a default group of its own, destroyed with all groups made in it when the call ends.
Under plain pytest, `run_ranks` keeps one pool of processes for each world size until pytest ends;
a call that fails or times out takes its pool with it. Under `torchrun -m pytest` the ranks are
torchrun's processes: every one of them calls the function and gets the list of all results.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import connection
from typing import IO, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import as_backend
from tests.conftest import poisoned_buffers

_START_TIMEOUT = 120.0  # seconds for processes to import torch and to meet
_STACKS_DELAY = 1.0  # seconds that a hanging rank gets to write down where it hangs
_GRACE = 15.0  # seconds between a time-out on one of torchrun's ranks and the others' giving up


class RankTraceback(Exception):
    """The cause of an exception that `run_ranks` raises: which rank raised it, and where."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """Call `function(*args)` on `world_size` ranks and return their results in rank order.

    Function, arguments and results are pickled (tensors by value). If a rank raises, the others are
    stopped and its exception is raised here; if the ranks take longer than `timeout` seconds, they
    are killed and TimeoutError says where each of them was.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _run_under_torchrun(world_size, function, args, timeout)
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = _Pool(world_size)
    try:
        return pool.run(function, args, timeout)
    except BaseException:  # a rank's, a time-out, or pytest's: the ranks are out of step
        del _pools[world_size]
        pool.kill()
        raise


# --- pools of processes ---------------------------------------------------------------------------

_pools: dict[int, _Pool] = {}


@atexit.register
def _close_pools() -> None:
    for pool in _pools.values():
        pool.close()


class _Pool:
    """`world_size` processes that wait for functions to call, all in a group made for the call."""

    def __init__(self, world_size: int) -> None:
        self.store = dist.TCPStore(
            "127.0.0.1", 0, None, is_master=True, wait_for_workers=False
        )  # port 0: any free one; it lives here, so that ranks may die without it
        context = multiprocessing.get_context("spawn")
        self.processes: list[Any] = []
        self.connections: list[connection.Connection] = []
        self.stacks: list[IO[bytes]] = []
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"):
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                stacks = tempfile.NamedTemporaryFile(prefix="stacks-")  # noqa: SIM115
                process = context.Process(
                    target=_worker,
                    args=(rank, world_size, self.store.port, theirs, stacks.name),
                    daemon=False,  # Megatron's checkpoint writer starts processes of its own
                )
                process.start()
                theirs.close()  # so that a dead rank shows as an end of file
                self.processes.append(process)
                self.connections.append(ours)
                self.stacks.append(stacks)
        try:
            self._collect(_START_TIMEOUT, "starting")
        except BaseException:
            self.kill()
            raise

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        call = pickle.dumps((function, args))
        for rank, pipe in enumerate(self.connections):
            try:
                pipe.send_bytes(call)
            except OSError:
                raise self._death_of(rank) from None
        return self._collect(timeout, f"running {getattr(function, '__qualname__', function)}")

    def _collect(self, timeout: float, doing: str) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(results) < len(self.connections):
            waiting = {c: rank for rank, c in enumerate(self.connections) if rank not in results}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                hanging = sorted(waiting.values())
                raise TimeoutError(
                    f"{doing} took longer than {timeout:g} s on rank(s) {hanging} of "
                    f"{len(self.connections)}:\n{self._where(hanging)}"
                )
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    answer = pipe.recv_bytes()
                except (EOFError, OSError):
                    raise self._death_of(rank) from None
                outcome, value, where = pickle.loads(answer)
                if outcome == "raised":
                    raise value from RankTraceback(f"rank {rank} of {len(self.connections)}\n{where}")
                results[rank] = value
        return [results[rank] for rank in range(len(self.connections))]

    def _death_of(self, rank: int) -> RuntimeError:
        self.processes[rank].join(5)
        return RuntimeError(
            f"rank {rank} of {len(self.processes)} died, exit code {self.processes[rank].exitcode}"
        )

    def _where(self, ranks: list[int]) -> str:
        """The Python stacks of ranks that hang."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(_STACKS_DELAY)
        return "\n".join(f"rank {rank}\n{self.stacks[rank].read().decode()}" for rank in ranks)

    def close(self) -> None:
        """Let the processes end, at the end of their pipes."""
        for pipe in self.connections:
            pipe.close()
        for process in self.processes:
            process.join(5)
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for closable in (*self.connections, *self.stacks):
            closable.close()


def _worker(rank: int, world_size: int, port: int, pipe: connection.Connection, stacks_name: str) -> None:
    """One rank of a pool: answer every call until the pipe is closed."""
    with open(stacks_name, "wb") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)  # sent by `_Pool._where`
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to handle
        torch.set_num_threads(1)
        as_backend.install()
        store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
        pipe.send_bytes(pickle.dumps(("returned", None, "")))
        for number in itertools.count():
            try:
                call = pipe.recv_bytes()
            except EOFError:
                gc.unfreeze()  # for those that look at what is alive when Python ends
                break
            if number > 0:
                _destroy_group()  # of the call before: by now every rank is through with it
                gc.freeze()  # what is left are modules: the next collection need not look at them
            try:
                _make_group(dist.PrefixStore(f"call {number}", store), rank, world_size)
                function, args = pickle.loads(call)
                with poisoned_buffers():
                    answer = pickle.dumps(("returned", function(*args), ""))
            except BaseException as error:
                answer = _raised(error)
            pipe.send_bytes(answer)


def _make_group(store: dist.Store, rank: int, world_size: int, timeout: float | None = None) -> None:
    """The default group, with gloo; its collectives give up after `timeout` seconds."""
    limit = None if timeout is None else timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)


def _raised(error: BaseException) -> bytes:
    """The message that carries an exception; one that cannot be pickled goes as a RuntimeError."""
    where = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        message = pickle.dumps(("raised", error, where))
        pickle.loads(message)
    except Exception:
        substitute = RuntimeError(f"{type(error).__name__}: {error}")
        message = pickle.dumps(("raised", substitute, where))
    return message


# --- the processes of torchrun --------------------------------------------------------------------


class _Torchrun:
    """This process as one of torchrun's ranks."""

    def __init__(self) -> None:
        self.store, self.rank, self.world_size = next(iter(dist.rendezvous("env://")))
        self.calls = 0

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        store = dist.PrefixStore(f"call {self.calls}", self.store)
        self.calls += 1
        # The backend gives up later than the alarm: whose time-out it was would be chance otherwise.
        _make_group(store, self.rank, self.world_size, timeout + _GRACE)
        results: list[Any] = [None] * self.world_size
        failure, outcome = None, (0.0, b"")
        try:
            with _interrupted_after(timeout):
                dist.all_gather_object(results, function(*args))
        except (Exception, pytest.skip.Exception, pytest.fail.Exception) as error:
            failure, outcome = error, (time.monotonic(), _raised(error))
            _destroy_group()  # wakes the ranks that wait for this one
        # The group may be broken, so the store tells every rank what became of the others.
        names = [f"outcome of {rank}" for rank in range(self.world_size)]
        store.set(names[self.rank], pickle.dumps(outcome))
        store.wait(names, timedelta(seconds=timeout + 2 * _GRACE))
        _destroy_group()
        outcomes = [pickle.loads(store.get(name)) for name in names]
        failed = [rank for rank, (_, message) in enumerate(outcomes) if message]
        if not failed:
            return results
        # Every rank raises the first failure: the later ones came of it, when its group was destroyed.
        first = min(failed, key=lambda rank: outcomes[rank][0])
        if first == self.rank and failure is not None:
            raise failure
        _, error, where = pickle.loads(outcomes[first][1])
        raise error from RankTraceback(f"rank {first} of {self.world_size}\n{where}")


def _destroy_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
        # The connections close with the last reference. Groups in a cycle (a model's, a schedule's) would
        # keep theirs, with threads that poll the closed end for ever: hundreds, busy, after some tests.
        gc.collect()


_torchrun: _Torchrun | None = None


def _run_under_torchrun(
    world_size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float
) -> list[Any]:
    global _torchrun
    if world_size != int(os.environ["WORLD_SIZE"]):
        pytest.skip(f"needs {world_size} ranks; torchrun started {os.environ['WORLD_SIZE']} processes")
    if _torchrun is None:
        _torchrun = _Torchrun()
    return _torchrun.run(function, args, timeout)


@contextlib.contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """TimeoutError in this (the main) thread; the alarm of a pytest plugin is set again after it."""

    def interrupt(*_: Any) -> None:
        raise TimeoutError(f"took longer than {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, interrupt)
    before, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, before)
        signal.signal(signal.SIGALRM, handler)

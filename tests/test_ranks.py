"""The multi-rank harness itself: results, failures, time-outs, recovery, and torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankTraceback, run_ranks

pytestmark = pytest.mark.skipif(
    "RANK" in os.environ, reason="tests the harness's own processes, not torchrun's"
)


def scaled_sum(factor: torch.Tensor) -> tuple[int, int, int, torch.Tensor]:
    total = factor * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return dist.get_rank(), os.getpid(), torch.get_num_threads(), total


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 had enough")
    dist.barrier()  # the others wait for rank 1


class Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def fail_unpicklably() -> None:
    raise Unpicklable("a", "b")


def hang_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(3600)


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def assert_works(world_size: int) -> list[int]:
    results = run_ranks(world_size, scaled_sum, torch.tensor([1.0, 2.0]))
    assert [rank for rank, *_ in results] == list(range(world_size))
    assert all(threads == 1 for _, _, threads, _ in results)
    expected = torch.tensor([1.0, 2.0]) * sum(range(1, world_size + 1))
    for *_, total in results:
        assert torch.equal(total, expected)
    return [pid for _, pid, *_ in results]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_rank_order_from_lasting_processes(world_size: int) -> None:
    processes = assert_works(world_size)
    assert len({*processes, os.getpid()}) == world_size + 1
    assert assert_works(world_size) == processes


def test_an_exception_stops_the_ranks_that_wait_and_the_next_call_works() -> None:
    before = assert_works(2)
    started = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 had enough") as caught:
        run_ranks(2, fail_on_rank_1)
    assert time.monotonic() - started < 60
    assert isinstance(caught.value.__cause__, RankTraceback)
    assert "rank 1 of 2" in str(caught.value.__cause__)
    assert "in fail_on_rank_1" in str(caught.value.__cause__)
    assert_gone(before)
    assert set(assert_works(2)).isdisjoint(before)


def test_an_exception_that_cannot_be_pickled_arrives_as_text() -> None:
    with pytest.raises(RuntimeError, match="Unpicklable: ab"):
        run_ranks(2, fail_unpicklably)


def test_a_hang_is_a_failure_that_says_where() -> None:
    before = assert_works(2)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"rank\(s\) \[0\] of 2") as caught:
        run_ranks(2, hang_on_rank_0, timeout=2)
    assert time.monotonic() - started < 60
    assert "in hang_on_rank_0" in str(caught.value)
    assert_gone(before)
    assert set(assert_works(2)).isdisjoint(before)


def test_a_rank_that_dies_is_a_failure() -> None:
    with pytest.raises(RuntimeError, match="rank 1 of 2 died, exit code 7"):
        run_ranks(2, die_on_rank_1)
    assert_works(2)


def assert_gone(processes: list[int]) -> None:
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


UNDER_TORCHRUN = """
import os
import time

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.test_ranks import fail_on_rank_1, hang_on_rank_0


def rank_and_process():
    dist.barrier()
    return dist.get_rank(), os.getpid()


def check():
    results = run_ranks(2, rank_and_process)
    assert [rank for rank, _ in results] == [0, 1]
    assert results[int(os.environ["RANK"])][1] == os.getpid()


def test_results_on_every_rank():
    check()
    check()


def test_other_world_size_is_skipped():
    run_ranks(4, rank_and_process)


def test_failure_reaches_every_rank():
    started = time.monotonic()
    with pytest.raises(ValueError if os.environ["RANK"] == "1" else Exception):
        run_ranks(2, fail_on_rank_1)
    assert time.monotonic() - started < 60
    check()


def test_hang_reaches_every_rank():
    with pytest.raises(TimeoutError):
        run_ranks(2, hang_on_rank_0, timeout=2)
    check()
"""


def test_under_torchrun_the_ranks_are_its_processes(tmp_path: Path) -> None:
    test_file = tmp_path / "test_under_torchrun.py"
    test_file.write_text(UNDER_TORCHRUN)
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(tmp_path), str(test_file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("3 passed, 1 skipped") == 2, done.stdout + done.stderr

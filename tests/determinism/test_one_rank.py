"""The same bits in twenty runs of one process, and of one program started again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tests
from tests.determinism.calls import FORMS, assert_same_results, make
from tests.deterministic import deterministic_algorithms
from tests.metamorphic.calls import Call, Results, assert_true, results_of, values_of
from tests.unit.cases import DTYPES, dtype_name, leaf

RUNS = 20
every_form = pytest.mark.parametrize("form", FORMS)
ROOT = Path(tests.__file__).parent.parent


@pytest.fixture(params=[1, 2], ids=lambda count: f"{count} threads")
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def run_among_others(call: Call, number: int) -> Results:
    """A run whose inputs lie elsewhere, after work of other shapes that leaves its numbers in memory."""
    other = make(FORMS[number % 2], torch.float32).rows(slice(number, number + 37))
    results_of(other, other.inputs)
    return results_of(call, {name: x.clone() for name, x in call.inputs.items()})


@pytest.mark.usefixtures("_threads")
@every_form
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_twenty_runs(form: str, dtype: torch.dtype) -> None:
    call = make(form, dtype)
    first = results_of(call, call.inputs)
    assert_true(call, first)
    for number in range(1, RUNS):
        assert_same_results(run_among_others(call, number), first, f"run {number}")


@every_form
def test_twenty_backwards_of_one_graph(form: str) -> None:
    call = make(form, torch.bfloat16)
    leaves = {name: leaf(x) for name, x in call.inputs.items()}
    found = values_of(call, leaves)
    assert found.entropy is not None
    gradients = [
        torch.autograd.grad(
            (found.log_probs, found.entropy), list(leaves.values()), call.upstream, retain_graph=True
        )
        for _ in range(RUNS)
    ]
    first, *others = (dict(zip(leaves, of_run, strict=True)) for of_run in gradients)
    for number, other in enumerate(others, 1):
        assert_same_results(other, first, f"backward {number}")


@every_form
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_under_deterministic_algorithms(form: str, dtype: torch.dtype) -> None:
    """No operation that torch refuses there, and on one rank the bits that there are without."""
    call = make(form, dtype)
    without = results_of(call, call.inputs)
    with deterministic_algorithms(True):
        for number in range(RUNS):
            assert_same_results(run_among_others(call, number), without, f"run {number}")


def start(rank: int, store: Path, hash_seed: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "tests.determinism.digests", str(rank), str(store)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def test_three_starts_of_a_program_on_two_ranks(tmp_path: Path) -> None:
    """Python's order of sets and of hashes is another in each."""
    answers = []
    for hash_seed in (0, 1, 4242):
        ranks = [start(rank, tmp_path / f"store {hash_seed}", hash_seed) for rank in range(2)]
        try:
            printed = [process.communicate(timeout=120)[0].splitlines() for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        assert [process.returncode for process in ranks] == [0, 0]
        *digests, seed_seen = printed[0]
        assert seed_seen == f"PYTHONHASHSEED {hash_seed}"
        answers.append(digests + printed[1][:-1])
    assert len(set(answers[0])) == len(answers[0]), "digests of different results are different"
    assert answers[0] == answers[1] == answers[2]

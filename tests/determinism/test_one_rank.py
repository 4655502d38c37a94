"""The same bits in twenty runs of one process, and of one program started again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tests
from tests.determinism.calls import FORMS, assert_same_results, make
from tests.deterministic import deterministic_algorithms
from tests.metamorphic.calls import Call, Results, assert_true, results_of, values_of
from tests.unit.cases import dtype_name, leaf

RUNS = 20
every_form = pytest.mark.parametrize("form", FORMS)
ROOT = Path(tests.__file__).parent.parent


def run_among_others(call: Call, number: int) -> Results:
    """A run whose inputs lie elsewhere, after work of other shapes that leaves its numbers in memory."""
    other = make(FORMS[number % 2], torch.float32).rows(slice(number, number + 7))
    results_of(other, other.inputs)
    return results_of(call, {name: x.clone() for name, x in call.inputs.items()})


@every_form
@pytest.mark.parametrize(
    ("dtype", "threads"),
    [(torch.float32, 2), (torch.bfloat16, 1), (torch.bfloat16, 2), (torch.float16, 2), (torch.float64, 1)],
    ids=lambda value: dtype_name(value) if isinstance(value, torch.dtype) else f"{value} threads",
)
def test_twenty_runs(form: str, dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        call = make(form, dtype)
        first = results_of(call, call.inputs)
        assert_true(call, first)
        for number in range(1, RUNS):
            assert_same_results(run_among_others(call, number), first, f"run {number}")
    finally:
        torch.set_num_threads(before)


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_under_deterministic_algorithms(form: str, dtype: torch.dtype) -> None:
    """No operation that torch refuses there, and on one rank the bits that there are without."""
    call = make(form, dtype)
    without = results_of(call, call.inputs)
    with deterministic_algorithms(True):
        for number in range(RUNS):
            assert_same_results(run_among_others(call, number), without, f"run {number}")


def start(store: Path, hash_seed: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.determinism.digests", str(store)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def test_three_starts_of_a_program_on_two_ranks(tmp_path: Path) -> None:
    """Python's order of sets and of hashes is another in each."""
    hash_seeds = (0, 1, 4242)
    programs = [start(tmp_path / f"store {seed}", seed) for seed in hash_seeds]
    try:
        printed = [program.communicate(timeout=240)[0].splitlines() for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [0, 0, 0]
    # Two forms on one rank, two cases on two ranks, and what Python itself says.
    digests = [sorted(line for line in lines if not line.startswith("seed")) for lines in printed]
    assert [len(set(found)) for found in digests] == [6, 6, 6], "what differs has another digest"
    assert digests[0] == digests[1] == digests[2]
    seeds_seen = [{line for line in lines if line.startswith("seed")} for lines in printed]
    assert seeds_seen == [{f"seed {seed}"} for seed in hash_seeds]

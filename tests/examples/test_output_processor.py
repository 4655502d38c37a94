"""The example of an output_processor as users run it, and what one may rely on: see tests/megatron too."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from megatron.core.models.gpt import GPTModel

from tests.examples.running import run_example

HAS_OUTPUT_PROCESSOR = "output_processor" in inspect.signature(GPTModel.forward).parameters


@pytest.mark.skipif(not HAS_OUTPUT_PROCESSOR, reason="needs megatron-core 0.18, with output_processor")
@pytest.mark.parametrize("options", [["--sequence-parallel"], ["--untie-embeddings-and-output-weights"]])
def test_agrees_with_dense_logits(options: list[str], tmp_path: Path) -> None:
    run = run_example("output_processor.py", *options, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    *table, verdict = run.stdout.splitlines()
    assert verdict.startswith("TP 2: ") and verdict.endswith("PASSED")
    rows = [[float(number) for number in line.split()] for line in table[1:]]
    assert len({temperature for _, temperature, *_ in rows}) == len(rows)
    counted = [row for row in rows if any(row[2:])]
    assert 0 < len(counted) < len(rows)
    for _, _, log_prob, _, entropy, _ in counted:
        assert log_prob < 0 < entropy


@pytest.mark.skipif(HAS_OUTPUT_PROCESSOR, reason="this megatron-core has output_processor")
def test_an_older_megatron_is_one_sentence(tmp_path: Path) -> None:
    run = run_example("output_processor.py", ranks=None, cwd=tmp_path)
    assert run.returncode == 2
    assert "output_processor.py: error: output_processor needs megatron-core 0.18 or newer." in run.stderr

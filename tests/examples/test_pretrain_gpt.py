"""The demo as users run it: torchrun, two ranks, a tiny model, real text."""

from __future__ import annotations

import json
import re
import sysconfig
from pathlib import Path

import pytest

for package in ("megatron.core", "tokenizers", "tqdm", "matplotlib"):
    pytest.importorskip(package)

from tests.examples.running import assert_learns, metrics, run_example

DEMO = "pretrain_gpt.py"
VOCABULARY = 512
TINY = [
    "--data", *(str(Path(sysconfig.get_path("stdlib")) / name) for name in ("argparse.py", "typing.py")),
    *("--vocab-size", str(VOCABULARY), "--num-layers", "1", "--hidden-size", "32", "--seq-length", "32"),
    *("--train-iters", "12", "--lr-warmup-iters", "2", "--lr", "1e-2", "--global-batch-size", "16"),
]  # fmt: skip
TENSOR_PARALLEL = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--micro-batch-size", "16")
DATA_PARALLEL = ("--micro-batch-size", "4")  # two micro-batches on each of two ranks


def test_trains_and_leaves_what_it_says(tmp_path: Path) -> None:
    run = run_example(DEMO, *TINY, *TENSOR_PARALLEL, "--save", "out", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "TP 2 with sequence parallelism, DP 1" in run.stdout
    out = tmp_path / "out"
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((out / "tokenizer.json").read_text())["model"]["vocab"]) == VOCABULARY
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "12"
    assert (out / "iter_0000012" / "metadata.json").is_file()
    for named in ("out/plot.png", "out/metrics.jsonl", "out/iter_0000012", "out/tokenizer.json"):
        assert named in run.stdout
    steps = metrics(out)
    assert_learns(steps, iterations=12, vocabulary=VOCABULARY)
    [kept] = (tmp_path / "mcore-entropy").iterdir()  # no draft is left beside it
    assert {path.name for path in kept.iterdir()} == {"tokenizer.json", "tokens.pt"}


def test_both_heads_agree_and_layout_changes_nothing(tmp_path: Path) -> None:
    """With an entropy bonus, so that its gradient is compared too; tensor against data parallelism."""
    losses = []
    for name, layout in (("tensor", TENSOR_PARALLEL), ("data", DATA_PARALLEL)):
        run = run_example(
            DEMO, *TINY, *layout, "--compare-stock", "--entropy-coeff", "0.1", "--save", name, cwd=tmp_path
        )
        assert run.returncode == 0, run.stderr
        [verdict] = re.findall(
            "^Entropy-aware against stock head, 12 iterations: .*", run.stdout, re.MULTILINE
        )
        assert verdict.endswith("PASSED")
        assert re.search(r"^embedding\.word_embeddings\.weight +\d\.\de-\d\d +\d\.\de-\d\d", run.stdout, re.M)
        losses.append([step["loss"] for step in metrics(tmp_path / name)])
    # The same batches, weights and updates. Twelve steps of Adam enlarge rounding to some 1e-5 of the loss.
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


MISTAKES = {
    "a file that is not there": (["--data", "absent.txt"], "--data: cannot read absent.txt: No such file"),
    "too few processes": (
        ["--tensor-model-parallel-size", "4"],
        "does not divide the number of processes, 2",
    ),
    "a text too short": (["--data", "short.txt"], "the text is too short: "),
    "an unknown option": (["--tensor-parallel", "2"], "unrecognized arguments: --tensor-parallel 2"),
}


@pytest.mark.parametrize("mistake", ["a file that is not there", "too few processes"])
def test_a_mistake_ends_all_ranks_and_is_told_by_one(mistake: str, tmp_path: Path) -> None:
    arguments, sentence = MISTAKES[mistake]
    run = run_example(DEMO, *arguments, cwd=tmp_path)
    assert run.returncode != 0
    lines = run.stderr.splitlines()
    [told] = [line for line in lines if line.startswith("pretrain_gpt.py: error: ")]
    assert sentence in told
    assert run.stdout == ""
    # torchrun's own page follows, traceback and all: its last line repeats the sentence.
    assert "exitcode  : 2" in run.stderr
    assert sentence in lines[-2]
    assert 'pretrain_gpt.py", line' not in run.stderr  # no traceback of ours


@pytest.mark.parametrize("mistake", [name for name in MISTAKES if name != "too few processes"])
def test_a_mistake_is_one_sentence_and_exit_code_2(mistake: str, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short to learn from.")
    arguments, sentence = MISTAKES[mistake]
    run = run_example(DEMO, *arguments, ranks=None, cwd=tmp_path)
    assert run.returncode == 2
    [told] = run.stderr.splitlines()
    assert sentence in told
    assert run.stdout == ""

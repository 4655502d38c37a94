"""The GRPO example as users run it: torchrun or not, a tiny model, a few iterations; and that it learns."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

for package in ("megatron.core", "tensorboard", "tqdm", "matplotlib", "psutil"):
    pytest.importorskip(package)

from tests.examples.running import metrics, run_example

EXAMPLE = "grpo_gpt.py"
TINY = [
    *("--num-layers", "1", "--hidden-size", "32", "--prompts", "8", "--group-size", "4", "--seed", "7"),
    *("--warmup-iters", "120", "--warmup-lr", "1e-2", "--train-iters", "6", "--lr-warmup-iters", "1"),
    *("--lr", "1e-2", "--kl-coeff", "0.05", "--clip-ratio", "0.2", "0.28", "--temperature", "0.9"),
]
ADAPTIVE = ["--target-entropy", "3", "--entropy-coeff-step", "0.01"]
TENSOR_PARALLEL = ["--tensor-model-parallel-size", "2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a tensor-parallel run, and what it printed."""
    folder = tmp_path_factory.mktemp("grpo")
    arguments = [*TINY, *ADAPTIVE, *TENSOR_PARALLEL, "--compare-stock", "3", "--save", "out"]
    run = run_example(EXAMPLE, *arguments, cwd=folder)
    assert run.returncode == 0, run.stderr
    return folder / "out", run.stdout


def test_trains_and_leaves_what_it_says(trained: tuple[Path, str]) -> None:
    out, printed = trained
    [verdict] = [line for line in printed.splitlines() if line.startswith("Entropy-aware against stock")]
    assert ", 3 iteration(s): " in verdict
    assert verdict.endswith("PASSED")
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "iter_0000006" / "metadata.json").is_file()
    for named in ("out/plot.png", "out/metrics.jsonl", "out/tensorboard", "out/iter_0000006"):
        assert named in printed

    steps = metrics(out)
    assert [step["iteration"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert all(0 < step["entropy"] < math.log(256) for step in steps)
    assert all(2 <= step["answer_length"] <= 8 for step in steps)
    assert any(step["clip_fraction"] > 0 for step in steps)  # the second update is off the old policy
    assert steps[-1]["kl"] > steps[0]["kl"] > 0
    # The entropy is below its target: a step up after each iteration.
    assert [step["entropy_coeff"] for step in steps] == pytest.approx([0, 0.01, 0.02, 0.03, 0.04, 0.05])


def test_tensorboard_has_every_number(trained: tuple[Path, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, _ = trained
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    steps = metrics(out)
    assert set(events.Tags()["scalars"]) == {f"grpo/{name}" for name in steps[0] if name != "iteration"}
    for name in ("reward", "entropy", "kl", "clip_fraction"):
        logged = events.Scalars(f"grpo/{name}")
        assert [event.step for event in logged] == [1, 2, 3, 4, 5, 6]
        assert [event.value for event in logged] == pytest.approx([step[name] for step in steps], rel=1e-6)


def test_the_same_seed_gives_the_same_numbers(trained: tuple[Path, str], tmp_path: Path) -> None:
    run = run_example(EXAMPLE, *TINY, *ADAPTIVE, *TENSOR_PARALLEL, "--save", "out", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    ours, other = metrics(tmp_path / "out"), metrics(trained[0])
    for step in (*ours, *other):
        del step["seconds"]
    assert ours == other


def test_data_parallel_ranks_share_the_work(trained: tuple[Path, str], tmp_path: Path) -> None:
    """The warm-up starts as it does on tensor-parallel ranks; what follows drifts, by Adam and by samples."""
    run = run_example(EXAMPLE, *TINY, "--compare-stock", "3", "--save", "out", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "TP 1, DP 2" in run.stdout
    losses = [
        [float(loss) for loss in re.findall(r"^warm-up +(?:1|10|20)/120 \| loss (.*)$", printed, re.M)]
        for printed in (run.stdout, trained[1])
    ]
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert all(2 <= step["answer_length"] <= 8 for step in metrics(tmp_path / "out"))


@pytest.mark.slow
def test_it_learns(tmp_path: Path) -> None:
    """With the defaults, over a fifth of their iterations: means of the last ten and the first ten."""
    run = run_example(EXAMPLE, *TENSOR_PARALLEL, "--train-iters", "60", "--save", "out", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    steps = metrics(tmp_path / "out")
    before, after = (
        {name: sum(step[name] for step in part) / 10 for name in ("reward", "entropy")}
        for part in (steps[:10], steps[-10:])
    )
    assert after["reward"] > before["reward"] + 0.1  # seen: 0.34 and 0.56
    assert after["entropy"] < before["entropy"] - 0.2  # without a bonus


MISTAKES = {
    "too few processes": (
        ["--tensor-model-parallel-size", "4"],
        "--tensor-model-parallel-size 4 does not divide the number of processes",
    ),
    "prompts that do not divide": (["--prompts", "9"], "--prompts 9 is not a multiple of 2, --updates x"),
    "a group of one": (["--group-size", "1"], "--group-size must be at least 2"),
    "a clip below zero": (["--clip-ratio", "-0.2"], "--clip-ratio takes one or two numbers above 0"),
    "a clip beyond all ratios": (["--clip-ratio", "1.5", "0.2"], "--clip-ratio 1.5: the lower bound"),
    "a negative target": (["--target-entropy", "-1"], "--target-entropy must not be negative, not -1."),
    "a target that cannot be": (["--target-entropy", "6"], "--target-entropy 6 is above ln V = 5.55"),
    "a step to no target": (
        ["--entropy-coeff-step", "0.01"],
        "--entropy-coeff-step is for --target-entropy, and does nothing without it.",
    ),
    "a rate of no warm-up": (
        ["--warmup-iters", "0", "--warmup-lr", "0.01"],
        "--warmup-lr does nothing with --warmup-iters 0.",
    ),
    "no number": (["--kl-coeff", "nan"], "--kl-coeff must be a finite number, not nan."),
    "an unknown loss": (["--loss", "mean"], "invalid choice: 'mean'"),
    "a file for a folder": (["--save", "file"], "--save: cannot make the folder file: File exists."),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(mistake: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    arguments, sentence = MISTAKES[mistake]
    run = run_example(EXAMPLE, *arguments, ranks=None, cwd=tmp_path)
    assert run.returncode == 2
    [told] = run.stderr.splitlines()
    assert sentence in told
    assert run.stdout == ""


def test_a_mistake_ends_all_ranks_and_is_told_by_one(tmp_path: Path) -> None:
    arguments, sentence = MISTAKES["prompts that do not divide"]
    run = run_example(EXAMPLE, *arguments, cwd=tmp_path)
    assert run.returncode != 0
    [told] = [line for line in run.stderr.splitlines() if line.startswith("grpo_gpt.py: error: ")]
    assert sentence.replace("of 2", "of 4") in told  # of two data-parallel ranks
    assert 'grpo_gpt.py", line' not in run.stderr  # no traceback of ours

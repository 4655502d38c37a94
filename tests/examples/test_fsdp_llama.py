"""The data-parallel Llama as users run it: torchrun or not, a tiny model, real text."""

from __future__ import annotations

import json
import math
import sysconfig
from pathlib import Path

import pytest
import torch

for package in ("transformers", "safetensors", "tokenizers", "tqdm", "matplotlib"):
    pytest.importorskip(package)

from transformers import AutoTokenizer, LlamaForCausalLM

from tests.examples.running import run_example

EXAMPLE = "fsdp_llama.py"
VOCABULARY, LENGTH, BATCH, ITERATIONS, SEED = 512, 32, 16, 12, 7
TINY = [
    "--data", *(str(Path(sysconfig.get_path("stdlib")) / name) for name in ("argparse.py", "typing.py")),
    *("--vocab-size", str(VOCABULARY), "--num-layers", "1", "--hidden-size", "32", "--seed", str(SEED)),
    *("--train-iters", str(ITERATIONS), "--lr-warmup-iters", "2", "--lr", "1e-2"),
    *("--seq-length", str(LENGTH)),
    *("--global-batch-size", str(BATCH), "--micro-batch-size", "4"),
]  # fmt: skip


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def loss_of_checkpoint(folder: Path, kept: Path) -> float:
    """That of the stock model on the tokens of the last iteration."""
    tokens = torch.load(kept / "tokens.pt", weights_only=True)
    order = torch.randperm((len(tokens) - 1) // LENGTH, generator=torch.Generator().manual_seed(SEED))
    chosen = order[(ITERATIONS - 1) * BATCH : ITERATIONS * BATCH]
    rows = tokens[chosen[:, None] * LENGTH + torch.arange(LENGTH + 1)].long()
    labels = rows.clone()
    labels[:, 1:][rows[:, :-1] == 0] = -100
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model(input_ids=rows, labels=labels).loss.item()


def test_trains_and_leaves_what_it_says(tmp_path: Path) -> None:
    # At the last iteration the learning rate is 0, so that its loss is the checkpoint's.
    run = run_example(EXAMPLE, *TINY, "--min-lr", "0", "--compare-stock", "5", "--save", "out", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "FSDP2 on 2 ranks, fp32, 2 micro-batches an iteration" in run.stdout
    [verdict] = [line for line in run.stdout.splitlines() if line.startswith("Entropy-aware against stock")]
    assert ", 3 iterations: " in verdict
    assert verdict.endswith("PASSED")
    out = tmp_path / "out"
    for named in ("out/plot.png", "out/metrics.jsonl", "from_pretrained('out/checkpoint')"):
        assert named in run.stdout
    plot = (out / "plot.png").read_bytes()
    assert plot.startswith(b"\x89PNG")
    width, height = (int.from_bytes(plot[start : start + 4], "big") for start in (16, 20))
    assert 600 <= height < width <= 2000
    steps = metrics(out)
    assert [step["iteration"] for step in steps] == list(range(1, ITERATIONS + 1))
    assert all(BATCH * LENGTH - 4 <= step["tokens"] <= BATCH * LENGTH for step in steps)
    uniform = math.log(VOCABULARY)
    assert all(0 < step["entropy"] <= uniform for step in steps)
    assert steps[0]["loss"] == pytest.approx(uniform, abs=0.3)
    assert steps[0]["entropy"] == pytest.approx(uniform, abs=0.1)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert steps[-1]["entropy"] < steps[0]["entropy"] - 0.1
    assert steps[1]["learning_rate"] == 1e-2
    assert steps[-1]["learning_rate"] == 0

    [kept] = (tmp_path / "mcore-entropy").iterdir()
    assert loss_of_checkpoint(out / "checkpoint", kept) == pytest.approx(steps[-1]["loss"], rel=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(out / "checkpoint")
    assert tokenizer.decode(tokenizer("def f(x):").input_ids) == "def f(x):"
    assert tokenizer.eos_token_id == 0


def test_every_kind_and_number_of_ranks_does_the_same(tmp_path: Path) -> None:
    """With an entropy bonus, and untied weights: the same batches, weights and updates."""
    options = [*TINY, "--entropy-coeff", "0.1", "--untie-embeddings-and-output-weights"]
    of_run = {}
    for kind, ranks in (("ddp", None), ("ddp", 2), ("fsdp1", 2), ("fsdp2", 2), ("fsdp2", None)):
        name = f"{kind}-{ranks}"
        run = run_example(EXAMPLE, *options, "--parallel", kind, "--save", name, ranks=ranks, cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        state = LlamaForCausalLM.from_pretrained(tmp_path / name / "checkpoint").state_dict()
        of_run[name] = (metrics(tmp_path / name), state)
    reference, weights = of_run.pop("ddp-None")
    for name, (steps, state) in of_run.items():
        for statistic in ("loss", "entropy"):
            expected = [step[statistic] for step in reference]
            # A few steps of Adam enlarge rounding.
            assert [step[statistic] for step in steps] == pytest.approx(expected, rel=1e-4), (name, statistic)
        assert [step["tokens"] for step in steps] == [step["tokens"] for step in reference], name
        assert state.keys() == weights.keys()
        for parameter, value in weights.items():
            difference = (state[parameter] - value).abs().max().item()
            # Adam makes a step of the learning rate's size even of a gradient that is rounding alone.
            assert difference < 2e-2, (name, parameter)


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "ddp"])
def test_in_bf16_both_heads_agree(kind: str, tmp_path: Path) -> None:
    run = run_example(
        EXAMPLE, *TINY, "--parallel", kind, "--bf16", "--compare-stock", "4", "--save", "out", cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert f"{kind.upper()} on 2 ranks, bf16" in run.stdout
    steps = metrics(tmp_path / "out")
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    model = LlamaForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


MISTAKES = {
    "a file that is not there": (["--data", "absent.txt"], "--data: cannot read absent.txt: No such file"),
    "a batch that does not divide": (["--global-batch-size", "6"], "--global-batch-size 6 is not a multiple"),
    "heads that do not divide": (["--num-key-value-heads", "3"], "--num-attention-heads 4 is not a multiple"),
    "no number": (["--entropy-coeff", "nan"], "--entropy-coeff must be a finite number, not nan."),
    "an unknown kind": (["--parallel", "fsdp3"], "invalid choice: 'fsdp3'"),
}


def test_a_mistake_ends_all_ranks_and_is_told_by_one(tmp_path: Path) -> None:
    arguments, sentence = MISTAKES["a file that is not there"]
    run = run_example(EXAMPLE, *arguments, cwd=tmp_path)
    assert run.returncode != 0
    [told] = [line for line in run.stderr.splitlines() if line.startswith("fsdp_llama.py: error: ")]
    assert sentence in told
    assert run.stdout == ""
    assert 'fsdp_llama.py", line' not in run.stderr  # no traceback of ours


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(mistake: str, tmp_path: Path) -> None:
    arguments, sentence = MISTAKES[mistake]
    run = run_example(EXAMPLE, *arguments, ranks=None, cwd=tmp_path)
    assert run.returncode == 2
    [told] = run.stderr.splitlines()
    assert sentence in told
    assert run.stdout == ""

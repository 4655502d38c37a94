"""The data-parallel Llama as users run it: torchrun or not, a tiny model, real text."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

for package in ("transformers", "safetensors", "tokenizers", "tqdm", "matplotlib"):
    pytest.importorskip(package)

from transformers import AutoTokenizer, LlamaForCausalLM

from tests.examples.running import assert_learns, metrics, run_example

EXAMPLE = "fsdp_llama.py"
VOCABULARY, LENGTH, BATCH, ITERATIONS, SEED = 512, 32, 16, 12, 7
TINY = [
    "--data", *(str(Path(sysconfig.get_path("stdlib")) / name) for name in ("argparse.py", "typing.py")),
    *("--vocab-size", str(VOCABULARY), "--num-layers", "1", "--hidden-size", "32", "--seed", str(SEED)),
    *("--train-iters", str(ITERATIONS), "--lr-warmup-iters", "2", "--lr", "1e-2"),
    *("--min-lr", "0", "--seq-length", str(LENGTH)),
    *("--global-batch-size", str(BATCH), "--micro-batch-size", "4"),
]  # fmt: skip


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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run by FSDP2 on two ranks, and what it printed.

    At the last iteration the learning rate is 0, so that its loss is the checkpoint's.
    """
    folder = tmp_path_factory.mktemp("fsdp2")
    run = run_example(EXAMPLE, *TINY, "--compare-stock", "5", "--save", "out", cwd=folder)
    assert run.returncode == 0, run.stderr
    assert "Warning" not in run.stderr
    return folder, run.stdout


def test_trains_and_leaves_what_it_says(trained: tuple[Path, str]) -> None:
    folder, printed = trained
    out = folder / "out"
    assert "FSDP2 on 2 ranks, fp32, 2 micro-batches an iteration" in printed
    [verdict] = [line for line in printed.splitlines() if line.startswith("Entropy-aware against stock")]
    assert ", 3 iteration(s): " in verdict
    assert verdict.endswith("PASSED")
    for named in ("out/plot.png", "out/metrics.jsonl", "from_pretrained('out/checkpoint')"):
        assert named in printed
    plot = (out / "plot.png").read_bytes()
    assert plot.startswith(b"\x89PNG")
    width, height = (int.from_bytes(plot[start : start + 4], "big") for start in (16, 20))
    assert 600 <= height < width <= 2000
    assert len(plot) > 20_000
    steps = metrics(out)
    assert all(BATCH * LENGTH - 4 <= step["tokens"] <= BATCH * LENGTH for step in steps)
    assert_learns(steps, iterations=ITERATIONS, vocabulary=VOCABULARY)
    assert steps[1]["learning_rate"] == 1e-2
    assert steps[-1]["learning_rate"] == 0


def test_the_checkpoint_is_the_trained_model(trained: tuple[Path, str]) -> None:
    folder, _ = trained
    checkpoint = folder / "out" / "checkpoint"
    [kept] = (folder / "mcore-entropy").iterdir()
    last = metrics(folder / "out")[-1]["loss"]
    assert loss_of_checkpoint(checkpoint, kept) == pytest.approx(last, rel=1e-6)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.decode(tokenizer("def f(x):").input_ids) == "def f(x):"
    assert tokenizer.eos_token_id == 0


@pytest.mark.parametrize(("kind", "ranks"), [("ddp", None), ("ddp", 2), ("fsdp1", 2)])
def test_every_kind_and_number_of_ranks_does_the_same(
    kind: str, ranks: int | None, trained: tuple[Path, str], tmp_path: Path
) -> None:
    """The same batches, weights and updates; and gradients, whose scale clipping and Adam would hide."""
    run = run_example(EXAMPLE, *TINY, "--parallel", kind, "--save", "out", ranks=ranks, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    steps, expected = metrics(tmp_path / "out"), metrics(trained[0] / "out")
    for value in ("loss", "entropy", "tokens", "learning_rate", "gradient_norm"):
        # A dozen of Adam's steps enlarge rounding; seen: 1e-6.
        assert [step[value] for step in steps] == pytest.approx([step[value] for step in expected], rel=1e-4)
    ours, other = (
        LlamaForCausalLM.from_pretrained(folder / "out" / "checkpoint").state_dict()
        for folder in (tmp_path, trained[0])
    )
    for name, weight in other.items():
        # A hundredth of the learning rate, the size of a step; seen: 1e-6, or nothing on as many ranks.
        torch.testing.assert_close(
            ours[name], weight, atol=1e-4, rtol=0, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "ddp"])
def test_bf16_untied_on_one_rank(kind: str, tmp_path: Path) -> None:
    """With an entropy bonus; --compare-stock has the last word on each step's loss and entropy."""
    options = ["--bf16", "--entropy-coeff", "0.1", "--untie-embeddings-and-output-weights"]
    run = run_example(
        EXAMPLE,
        *TINY,
        *options,
        *("--parallel", kind, "--compare-stock", "1", "--save", "out"),
        ranks=None,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    assert f"{kind.upper()} on 1 rank, bf16, 4 micro-batches an iteration" in run.stdout
    steps = metrics(tmp_path / "out")
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    state = LlamaForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint").state_dict()
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert not torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])


MISTAKES = {
    "a file that is not there": (["--data", "absent.txt"], "--data: cannot read absent.txt: No such file"),
    "a batch that does not divide": (["--global-batch-size", "6"], "--global-batch-size 6 is not a multiple"),
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


@pytest.mark.parametrize("mistake", [name for name in MISTAKES if name != "a file that is not there"])
def test_a_mistake_is_one_sentence_and_exit_code_2(mistake: str, tmp_path: Path) -> None:
    arguments, sentence = MISTAKES[mistake]
    run = run_example(EXAMPLE, *arguments, ranks=None, cwd=tmp_path)
    assert run.returncode == 2
    [told] = run.stderr.splitlines()
    assert sentence in told
    assert run.stdout == ""

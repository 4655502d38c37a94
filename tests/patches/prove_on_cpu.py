"""Patched and otherwise unchanged, Megatron-LM's pretrain_gpt.py trains on the CPU as it did.

    python -m tests.patches.prove_on_cpu MEGATRON_LM [--work FOLDER]

MEGATRON_LM is an unpatched checkout, which is only read. Every run is 50 iterations of a tiny GPT in fp32 on
real text, by torchrun. Three are compared: the unpatched script, the patched one, and dense_head.py's truth.
Prints the largest differences, and fails where one is beyond rounding. TensorBoard's rows need tensorboard.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from patches import apply

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "megatron_lm"
ITERATIONS, SAVED, INTERVAL = 50, 25, 5
COEFFICIENT = "0.1"
METRICS = ("sum_pi_squared", "varentropy", "max_prob")
# Adam makes whole steps of gradients that are nearly 0, and so enlarges rounding. What rounding alone does is
# measured: the truth against itself with other micro-batches, the same sums in another order. A run may be
# off by a multiple of that, or of the last printed digit: the first iterations by no more than the latter.
MULTIPLE, PRINTED = 4.0, 1e-6
FIRST = 15
OTHER_ORDER = ("--micro-batch-size", "4")
ON = ("--entropy-aware-output-layer",)
LAYOUTS = {
    "TP 2": ("--tensor-model-parallel-size", "2"),
    "TP 2, SP": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "PP 2": ("--pipeline-model-parallel-size", "2"),
    "DP 2, untied": ("--untie-embeddings-and-output-weights",),
}
Series = dict[str, dict[int, float]]


@dataclass
class Proof:
    """The two trees, the text, and the verdicts so far."""

    checkout: Path
    work: Path
    runs: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def patched(self) -> Path:
        return self.work / "patched"

    def prepare(self) -> None:
        """A tree of links to the checkout's, with patched files of its own; Megatron's indexed data set."""
        self.patched.mkdir(parents=True)
        files = apply.version_of(self.checkout, apply.targets()["megatron_lm"])[0].files
        for entry in self.checkout.iterdir():
            if entry.name not in [file.path for file in files]:
                (self.patched / entry.name).symlink_to(entry)
        for file in files:
            (self.patched / file.path).write_bytes((self.checkout / file.path).read_bytes())
        print(apply.run("apply", self.patched, apply.targets()["megatron_lm"]))
        text = self.work / "text.jsonl"
        call([sys.executable, EXAMPLE / "prepare_text.py", text], cwd=self.work)
        tool = self.checkout / "tools" / "preprocess_data.py"
        arguments = ["--input", text, "--output-prefix", self.work / "text", "--workers", "1", "--append-eod"]
        tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "256"]
        call([sys.executable, tool, *arguments, *tokenizer], cwd=self.checkout)

    def train(self, program: str, layout: str, *arguments: str, coefficient: str = "0") -> Series:
        """50 iterations of "stock", "patched" or "dense" on two ranks: what each reported, by iteration."""
        tree = self.patched if program == "patched" else self.checkout
        runner = ROOT / "tests/patches/dense_head.py" if program == "dense" else EXAMPLE / "run_on_cpu.py"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        data = ["--data-path", self.work / "text_text_document", "--data-cache-path", self.work / "cache"]
        shape = (EXAMPLE / "tiny_cpu.args").read_text(encoding="utf-8").split()
        log = call(
            [*launch, runner, tree / "pretrain_gpt.py", *shape, *data, *LAYOUTS[layout], *arguments],
            cwd=self.work,
            DENSE_COEFF=coefficient,
        )
        found = reported(log)
        self.runs += 1
        (self.work / f"{self.runs:02d} {program} {layout}.log").write_text(log, encoding="utf-8")
        if max(found["lm loss"]) != ITERATIONS:
            raise SystemExit(
                f"{program}, {layout}: expected {ITERATIONS} iterations in the log:\n{log[-3000:]}"
            )
        return found

    def row(self, what: str, difference: float, allowed: float) -> None:
        """One line of the table."""
        verdict = "" if difference <= allowed else " FAILED"
        print(f"| {what} | {difference:.1e} | {allowed:.1e}{verdict} |", flush=True)
        if verdict:
            self.failures.append(what)


def call(command: list[str | Path], *, cwd: Path, **environment: str) -> str:
    """A program's output; SystemExit with its end where it fails."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    settings["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    run = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **settings, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if run.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{run.stdout[-6000:]}")
    return run.stdout


def reported(log: str) -> Series:
    """The numbers of Megatron's log lines, by name and iteration; "validation lm loss" and the like too.

    The second line of a run is left out: Megatron does not reset its sums after the first, so that it shows
    the mean of two iterations.
    """
    series: Series = {}
    for iteration, line in re.findall(r" iteration +(\d+)/ +\d+ \|(.*)", log):
        for name, value in re.findall(r"\| ([a-z_ ]+): (-?[\d.]+E[+-]\d+)", line):
            series.setdefault(name, {})[int(iteration)] = float(value)
    for values in series.values():
        del values[min(values) + 1]
    for iteration, line in re.findall(r"validation loss at iteration (\d+) on validation set \|(.*)", log):
        for name, value in re.findall(r" ([a-z_ ]+) value: (-?[\d.]+E[+-]\d+)", line):
            series.setdefault(f"validation {name}", {})[int(iteration)] = float(value)
    return series


def largest(ours: Series, theirs: Series, name: str, after: int = 0, until: int = ITERATIONS) -> float:
    """The largest difference of what both reported after an iteration, and until another."""
    iterations = [number for number in ours[name] if number in theirs[name] and after < number <= until]
    assert len(iterations) >= (until - after) - 2 or name.startswith("validation ")
    return max(abs(ours[name][number] - theirs[name][number]) for number in iterations)


def truth(proof: Proof, layout: str, coefficient: str = "0") -> tuple[Series, dict[str, float]]:
    """The truth's run, and by name how far off another run may be."""
    dense = proof.train("dense", layout, coefficient=coefficient)
    other = proof.train("dense", layout, *OTHER_ORDER, coefficient=coefficient)
    return dense, {name: MULTIPLE * max(largest(other, dense, name), PRINTED) for name in dense}


def same_as_before(proof: Proof, layout: str) -> tuple[Series, float]:
    """Loss curves with and without us; gives the patched run, and how far off its loss may be."""
    dense, allowed = truth(proof, layout)
    stock = proof.train("stock", layout)
    patched = proof.train("patched", layout, *ON, "--save", f"saved {layout}", "--save-interval", str(SAVED))
    for name, other in (("lm loss", stock), ("entropy", dense)):
        difference = largest(patched, other, name, until=FIRST)
        against = "unpatched" if other is stock else "fp64"
        what = f"{layout}: {name}, first {FIRST} iterations, patched against {against}"
        proof.row(what, difference, MULTIPLE * PRINTED)
    for name in ("lm loss", "entropy", "validation lm loss", "validation entropy"):
        fall = f"{dense[name][min(dense[name])]:.3f} → {dense[name][ITERATIONS]:.3f}"
        if name in stock:
            what = f"{layout}: {name} ({fall}), patched against unpatched"
            proof.row(what, largest(patched, stock, name), allowed[name])
            proof.row(f"{layout}: {name}, unpatched against fp64", largest(stock, dense, name), allowed[name])
        what = f"{layout}: {name} ({fall}), patched against fp64"
        proof.row(what, largest(patched, dense, name), allowed[name])
    return patched, allowed["lm loss"]


def checkpoint_goes_on(proof: Proof, layout: str, patched: Series, allowed: float) -> None:
    """The checkpoint of the patched script's 25th iteration, in the unpatched script and in its own."""
    load = ("--load", f"saved {layout}", "--ckpt-step", str(SAVED), "--exit-on-missing-checkpoint")
    unpatched, own = proof.train("stock", layout, *load), proof.train("patched", layout, *ON, *load)
    if min(unpatched["lm loss"]) != SAVED + 1:
        raise SystemExit(f"expected to go on at {SAVED + 1}, got {min(unpatched['lm loss'])}")
    for what, run in (("unpatched", unpatched), ("patched", own)):
        difference = largest(run, patched, "lm loss", after=SAVED)
        proof.row(f"{layout}: checkpoint in the {what} script, loss against going on", difference, allowed)


def with_coefficient(proof: Proof, layout: str, head: str) -> None:
    """An entropy bonus, further metrics, and both heads."""
    dense, allowed = truth(proof, layout, COEFFICIENT)
    arguments = ("--entropy-coeff", COEFFICIENT, "--entropy-head", head, "--entropy-metrics", *METRICS)
    log_folder = proof.work / f"tensorboard {layout} {head}"
    board = ("--tensorboard-dir", str(log_folder)) if find_spec("tensorboard") else ()
    patched = proof.train("patched", layout, *ON, *arguments, *board)
    for name in ("lm loss", "entropy", *METRICS):
        what = f"{layout}: {name}, coefficient {COEFFICIENT}, {head} head, against fp64"
        proof.row(what, largest(patched, dense, name), allowed[name])
    if board:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(log_folder)).Reload()
        written = {
            name: {event.step: event.value for event in events.Scalars(name)}
            for name in ("entropy", *METRICS)
        }
        difference = max(largest(written, patched, name) for name in written)
        proof.row(f"{layout}: TensorBoard's entropy and metrics against the log line's", difference, PRINTED)


def with_interval(proof: Proof, layout: str, every: Series) -> None:
    """Measured at 1, 5, 10, …, repeated in between."""
    run = proof.train("patched", layout, *ON, "--entropy-log-interval", str(INTERVAL))
    expected = {
        number: every["entropy"][max(1, number // INTERVAL * INTERVAL)] for number in range(1, ITERATIONS + 1)
    }
    what = f"{layout}: entropy every {INTERVAL} iterations, repeated in between"
    proof.row(what, largest(run, {"entropy": expected}, "entropy"), PRINTED)


def main() -> int:
    parser = argparse.ArgumentParser(description="Prove the patch of pretrain_gpt.py on the CPU.")
    parser.add_argument("megatron_lm", type=Path)
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp(prefix="megatron-lm-"))
    proof = Proof(args.megatron_lm.resolve(), work.resolve())
    proof.prepare()
    print("| what | largest difference | allowed |\n|---|---|---|")
    for layout in LAYOUTS:
        patched, allowed = same_as_before(proof, layout)
        if layout != "DP 2, untied":
            checkpoint_goes_on(proof, layout, patched, allowed)
        if layout == "TP 2":
            with_interval(proof, layout, patched)
    for layout, head in (("TP 2, SP", "fused"), ("TP 2", "logits"), ("PP 2", "fused")):
        with_coefficient(proof, layout, head)
    print("FAILED: " + "; ".join(proof.failures) if proof.failures else f"all within what is allowed; {work}")
    return bool(proof.failures)


if __name__ == "__main__":
    sys.exit(main())

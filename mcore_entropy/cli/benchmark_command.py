"""`mcore-entropy benchmark`: its options, its progress bar, its exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mcore_entropy.cli.benchmark import machine, plot, report
from mcore_entropy.cli.benchmark.comparison import Comparison, Row
from mcore_entropy.cli.benchmark.heads import OURS, own_heads
from mcore_entropy.cli.benchmark.peers import peers
from mcore_entropy.cli.benchmark.problem import Problem, UserError
from mcore_entropy.cli.benchmark.ranks import Alone, Together
from mcore_entropy.cli.benchmark.requested import (
    ON_ACCELERATOR,
    ON_CPU,
    check_outputs,
    device_named,
    dtype_named,
    heads_named,
    ranks_started,
)


def benchmark(
    tokens: Annotated[int | None, typer.Option(help="Tokens a step; 1024 on a CPU, else 4096.")] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Hidden size; 256 on a CPU, else 4096.")] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Vocabulary of all ranks together; 32000 on a CPU, else 131072.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 (on a CPU), bfloat16 (elsewhere) or float16.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, npu; auto takes what there is.")] = "auto",
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            help="Ranks that share the vocabulary, which torchrun starts: torchrun --nproc-per-node 2 -m "
            "mcore_entropy.cli benchmark --tensor-parallel 2"
        ),
    ] = None,
    masked: Annotated[
        float, typer.Option(help="Share of the tokens that do not count, as a prompt's.")
    ] = 0.0,
    repeats: Annotated[int | None, typer.Option(help="Rounds; 5 on a CPU, else 10.")] = None,
    heads: Annotated[
        str | None, typer.Option(help="Only these, by name with commas between; all by default.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results there too.")] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Draw time and memory there (.png, .svg, .pdf).")
    ] = None,
    check_only: Annotated[
        bool, typer.Option("--check-only", help="Compare with fp64, time nothing.")
    ] = False,
) -> None:
    """Compare the ways to log-probs and entropy on this machine: eager, torch.compile of it, mcore-entropy,
    and other projects' heads where they are installed.

    Every head is checked against fp64 before anything is timed; one that is wrong, fails or runs out of
    memory is left out, with its reason. Heads then take turns, forward and backward, and their peak memory is
    measured in a pass of its own. On a CPU it takes about a minute as it is.

    Exits with 1 when mcore-entropy itself is wrong or fails, with 2 when it cannot do what is asked.
    """
    speaks = os.environ.get("RANK", "0") == "0"  # one of torchrun's ranks
    try:
        where = device_named(device)
        defaults = ON_CPU if where.type == "cpu" else ON_ACCELERATOR
        problem = Problem(
            tokens=defaults.tokens if tokens is None else tokens,
            hidden_size=defaults.hidden_size if hidden_size is None else hidden_size,
            vocab_size=defaults.vocab_size if vocab_size is None else vocab_size,
            dtype=dtype_named(defaults.dtype if dtype is None else dtype),
            device=where,
            ranks=ranks_started(tensor_parallel),
            masked=masked,
        )
        rounds = defaults.repeats if repeats is None else repeats
        if rounds < 1:
            raise UserError(f"--repeats: expected at least 1, got {rounds}")
        chosen = heads_named(heads, [*((head, None) for head in own_heads()), *peers(problem)])
        check_outputs(json_path, plot_path, check_only)
        ranks = Together(where) if problem.ranks > 1 else Alone()
        comparison = Comparison(problem, ranks, chosen)
        with _progress(speaks, comparison.steps(0 if check_only else rounds)) as advance:
            comparison.check(advance)
            if not check_only:
                comparison.measure(rounds, advance)
        ranks.close()
        if speaks:
            _tell(comparison.rows, problem, 0 if check_only else rounds, json_path, plot_path)
    except UserError as error:
        if speaks:
            typer.echo(f"mcore-entropy benchmark: {error}", err=True)
        raise typer.Exit(2) from None
    if any(row.name == OURS and row.reason is not None for row in comparison.rows):
        raise typer.Exit(1)


@contextmanager
def _progress(speaks: bool, steps: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal's stderr, gone when it is done; nothing anywhere else."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not (speaks and console.is_terminal)
    ) as bar:
        task = bar.add_task("", total=steps)

        def advance(doing: str) -> None:
            bar.update(task, description=doing, advance=1)

        yield advance


def _tell(
    rows: list[Row], problem: Problem, rounds: int, json_path: Path | None, plot_path: Path | None
) -> None:
    found = machine.describe(problem.device)
    console = Console(highlight=False)
    versions = ", ".join(f"{name} {value}" for name, value in found.items() if name not in ("device", "date"))
    console.print(f"{problem.describe()}\n{found['device']}; {versions}; {found['date']}\n", markup=False)
    console.print(report.table(rows, problem))
    console.print()
    console.print(report.verdict(rows), markup=False)
    try:
        if json_path is not None:
            result = report.as_json(rows, problem, found, rounds)
            json_path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
        if plot_path is not None:
            plot.draw(rows, problem, found, plot_path)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written, {error.strerror}") from error

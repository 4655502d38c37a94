"""The commands by name; each has a module of its own."""

from __future__ import annotations

import typer

from mcore_entropy.cli.benchmark_command import benchmark
from mcore_entropy.cli.doctor_command import doctor

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Exact per-token log-probability and entropy over a tensor-parallel vocabulary.",
)


app.command()(doctor)
app.command()(benchmark)

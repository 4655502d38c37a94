"""`mcore-entropy doctor`: its option, its tables, its exit code; what it finds is in doctor.py."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mcore_entropy.cli.doctor import Finding, State, findings

_COLOURS = {State.OK: "green", State.NOTE: "yellow", State.WRONG: "red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what is installed, which backend tensors get on each device and why, what Megatron offers, which
    environment variables change something, and whether it computes right here.

    Exits with 1 when something is wrong: a line marked WRONG says what, and what to do.
    """
    found = findings()
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        _print(found)
    if any(finding.state is State.WRONG for finding in found):
        raise typer.Exit(1)


def _print(found: list[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=False)
    for section, lines in groupby(found, key=lambda finding: finding.section):
        table = Table(title=section, title_justify="left", show_header=False, box=None, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for line in lines:
            mark = "WRONG" if line.state is State.WRONG else line.state.value
            table.add_row(f"[{_COLOURS[line.state]}]{mark}[/]", escape(line.name), escape(line.text))
        console.print(table)
        console.print()

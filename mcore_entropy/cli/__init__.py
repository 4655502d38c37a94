"""The command ``mcore-entropy``."""

from __future__ import annotations

import sys


def main() -> None:
    """The console script's entry: without typer it says so and exits with 1."""
    try:
        import typer as typer
    except ImportError:
        sys.exit("mcore-entropy's command line needs typer: pip install 'mcore-entropy[cli]'")
    from mcore_entropy.cli.app import app

    app()

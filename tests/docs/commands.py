"""Running a command as a document names it, with this Python and this checkout."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.docs.pages import ROOT, Block

WIDTH = 100  # columns of the terminal that outputs are written for
_SCRIPT = "import sys; sys.argv[0] = 'mcore-entropy'; from mcore_entropy.cli import main; main()"
# The installed scripts would be those of another checkout where the environment is shared.
_PROGRAMS = {
    "mcore-entropy": (sys.executable, "-c", _SCRIPT),
    "python": (sys.executable,),
    "torchrun": (sys.executable, "-m", "torch.distributed.run"),
}


class CommandFailed(Exception):
    """A command ended with another exit code than 0; the message has what it wrote."""


def output_of(command: str, files: Iterable[Block] = (), timeout: float = 240) -> str:
    """What a command prints to stdout, without trailing blanks.

    With files (a page's blocks that have a title) it runs in a folder that holds them, otherwise in the
    repository's root.

    Raises:
        CommandFailed: it ended with another exit code than 0.
    """
    words = shlex.split(command)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MCORE_ENTROPY_")}
    environment |= {
        "COLUMNS": str(WIDTH),
        "NO_COLOR": "1",
        "TERM": "dumb",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, value = words.pop(0).split("=", 1)
        environment[name] = value
    program = [*_PROGRAMS.get(words[0], (words[0],)), *words[1:]]
    with tempfile.TemporaryDirectory() as folder:
        files = list(files)
        for block in files:
            assert block.title is not None
            Path(folder, block.title).write_text(block.text, encoding="utf-8")
        result = subprocess.run(
            program,
            cwd=folder if files else ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
    if result.returncode:
        raise CommandFailed(
            f"{command}: exit code {result.returncode}\n{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
        )
    return tidied(result.stdout)


def tidied(text: str) -> str:
    """Without blanks at the ends of lines and blank lines at both ends."""
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n") + "\n"

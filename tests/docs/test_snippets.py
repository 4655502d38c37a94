"""The Python in the documents runs: snippets page by page in one namespace, files by the page's own commands.

A snippet runs on as many ranks as tests/docs/namespaces.py says, in the order of the page. What is not run
says why in a comment right before it: `<!-- not run: REASON -->`; or `<!-- needs: MODULE -->`.
"""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterable
from typing import Any

import pytest

from tests.docs.namespaces import SETTINGS, Setting, nothing
from tests.docs.outputs import KINDS
from tests.docs.pages import Block, blocks, pages
from tests.ranks import run_ranks

PYTHON = {page: found for page in pages() if (found := [b for b in blocks(page) if b.language == "python"])}


def snippets(page: str) -> list[Block]:
    return [block for block in PYTHON[page] if block.kind != "not run" and not block.title]


def execute(found: Iterable[Block], names: dict[str, Any]) -> None:
    """Run snippets one after the other in one namespace; a traceback has the document's line."""
    names["__name__"] = "snippets"
    for block in found:
        code = compile("\n" * (block.line - 1) + block.text, block.page, "exec")
        exec(code, names)


def run_page(page: str, found: list[Block]) -> None:
    """On every rank."""
    setting = SETTINGS.get(page, Setting(nothing))
    with setting.names() as names:
        execute(found, names)
        setting.check(names)


@pytest.mark.parametrize("page", [page for page in PYTHON if snippets(page)])
def test_snippets_run(page: str) -> None:
    found = snippets(page)
    for block in found:
        if block.kind == "needs" and importlib.util.find_spec(str(block.comment)) is None:
            pytest.skip(f"{block} needs {block.comment}")
    run_ranks(SETTINGS.get(page, Setting(nothing)).ranks, run_page, page, found)


@pytest.mark.parametrize("page", PYTHON)
def test_files_are_run_by_a_command_of_their_page(page: str) -> None:
    commands = [shlex.split(str(block.comment)) for block in blocks(page) if block.kind in KINDS]
    idle = [block for block in PYTHON[page] if block.title and not any(block.title in c for c in commands)]
    assert not idle, f"no `output` or `recorded` command runs {[f'{b}: {b.title}' for b in idle]}"


def test_settings_belong_to_pages() -> None:
    assert set(SETTINGS) <= set(PYTHON), "names for pages without Python"


def test_a_failing_snippet_names_its_line() -> None:
    first = Block("PAGE.md", 10, "python", None, None, None, "x = 1\n")
    second = Block("PAGE.md", 20, "python", None, None, None, "\nx / 0\n")
    with pytest.raises(ZeroDivisionError) as caught:
        execute([first, second], {})
    last = caught.traceback[-1]
    assert (str(last.path), last.lineno + 1) == ("PAGE.md", 21)

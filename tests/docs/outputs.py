"""The outputs that documents paste, made again: `python -m tests.docs.outputs --write [PAGE ...]`.

It runs the command of every `<!-- output: … -->` and `<!-- recorded: … -->` comment (tests/docs/pages.py) and
writes what it prints into the block below. Without --write it says which `output` blocks differ, as the
tests do. A recorded command belongs on the machine that its page names.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable

from tests.docs.commands import output_of, tidied
from tests.docs.pages import ROOT, Block, blocks, pages, text_of

KINDS = ("output", "recorded")


def files_of(page: str) -> list[Block]:
    """The blocks of a page that are files: its commands find them in their folder."""
    return [block for block in blocks(page) if block.title]


def difference(block: Block) -> str:
    """Between what the page says and what the command prints now; empty where there is none."""
    assert block.comment is not None
    now = output_of(block.comment, files_of(block.page))
    lines = difflib.unified_diff(
        tidied(block.text).splitlines(), now.splitlines(), str(block), block.comment, lineterm=""
    )
    return "\n".join(lines)


def written(page: str, text: str, run: Callable[[str], str], kinds: tuple[str, ...] = KINDS) -> str:
    """The page's text with the output of every command of these kinds as `run` gives it."""
    lines = text.splitlines()
    for block in reversed(blocks(page, text)):  # from the end: line numbers before stay what they are
        if block.kind in kinds:
            assert block.comment is not None
            start = block.line - 1
            lines[start : start + block.text.count("\n")] = run(block.comment).splitlines()
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", nargs="*", help="documents, from the repository's root; all unless named")
    parser.add_argument("--write", action="store_true", help="write them, instead of saying what differs")
    parser.add_argument("--kind", choices=KINDS, action="append", help="these alone; both unless named")
    options = parser.parse_args()
    unknown = set(options.pages) - set(pages())
    if unknown:
        parser.error(f"no such documents: {', '.join(sorted(unknown))}")
    differ = False
    for page in options.pages or pages():
        if options.write:
            files = files_of(page)
            new = written(
                page,
                text_of(page),
                lambda command, files=files: output_of(command, files),
                tuple(options.kind or KINDS),
            )
            (ROOT / page).write_text(new, encoding="utf-8")
            continue
        for block in blocks(page):
            if block.kind == "output" and (found := difference(block)):
                differ = True
                print(found)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())

"""What is in the documents: fenced blocks with the comment right before them, links, and anchors.

A comment says what a block is:

    <!-- output: COMMAND -->     what COMMAND prints, the same at every run; tests compare it
    <!-- recorded: COMMAND -->   what COMMAND printed on some machine (timings); not compared
    <!-- not run: REASON -->     code that the tests do not execute, and why
    <!-- needs: MODULE -->       code that is executed where MODULE can be imported
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+)(?P<info>.*)$")
_COMMENT = re.compile(r"^<!-- (?P<kind>output|recorded|not run|needs): (?P<text>.*\S) -->$")
_TITLE = re.compile(r'title="([^"]*)"')
_LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)\)")
_HEADING = re.compile(r"^#{1,6} +(.*?)(?: +#+)?$")


@dataclass(frozen=True)
class Block:
    """A fenced block. `line` is that of its first line, from 1; `kind` and `comment` are the marker's."""

    page: str
    line: int
    language: str
    title: str | None
    kind: str | None
    comment: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Link:
    page: str
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.target}"


def pages() -> list[str]:
    """All documents, as paths from the repository's root."""
    found = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    for folder in ("docs", "patches", "examples"):
        found += sorted((ROOT / folder).rglob("*.md"))
    return [str(path.relative_to(ROOT)) for path in found]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, text: str | None = None) -> list[Block]:
    """The fenced blocks of a page."""
    lines = (text_of(page) if text is None else text).splitlines()
    found = []
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        number += 1
        if opening is None:
            continue
        first = number
        while number < len(lines) and lines[number].strip() != opening["fence"]:
            number += 1
        if number == len(lines):
            raise ValueError(f"{page}:{first}: a fenced block without an end")
        before = first - 2  # the line above the opening fence, blank lines left out
        while before >= 0 and not lines[before].strip():
            before -= 1
        marker = _COMMENT.match(lines[before]) if before >= 0 else None
        info = opening["info"].strip()
        title = _TITLE.search(info)
        width = len(opening["indent"])
        found.append(
            Block(
                page=page,
                line=first + 1,
                language=info.split()[0] if info else "",
                title=title[1] if title else None,
                kind=marker["kind"] if marker else None,
                comment=marker["text"] if marker else None,
                text="".join(f"{line[width:]}\n" for line in lines[first:number]),
            )
        )
        number += 1
    return found


def _prose(page: str) -> Iterator[tuple[int, str]]:
    """The lines outside of fenced blocks and of code spans, with their numbers."""
    lines = text_of(page).splitlines()
    inside = {
        number
        for block in blocks(page)
        for number in range(block.line - 1, block.line + block.text.count("\n") + 1)
    }
    for number, line in enumerate(lines, start=1):
        if number not in inside:
            yield number, line


def links(page: str) -> list[Link]:
    """Inline links and pictures, in prose and in tables."""
    return [
        Link(page, number, match[1])
        for number, line in _prose(page)
        for match in _LINK.finditer(re.sub(r"`[^`]*`(?!\])", "", line))
    ]


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them. (MkDocs checks its own in the strict build.)"""
    found: dict[str, int] = {}
    result = set()
    for _, line in _prose(page):
        heading = _HEADING.match(line)
        if heading is None:
            continue
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = found[slug] = found.get(slug, -1) + 1
        result.add(f"{slug}-{count}" if count else slug)
    return result

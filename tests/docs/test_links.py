"""Relative links and anchors of the documents lead somewhere; external links are well-formed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.docs import pages as documents
from tests.docs.pages import ROOT, Link, anchors, links, pages


def fault(link: Link) -> str | None:
    """What is wrong with a link, if anything is."""
    parts = urlsplit(link.target)
    if parts.scheme or parts.netloc:
        well_formed = parts.scheme == "https" and "." in parts.netloc and " " not in link.target
        return None if well_formed else "expected https://host/path"
    if parts.path.startswith("/"):
        return "expected a path relative to the document"
    path = os.path.normpath(os.path.join(os.path.dirname(link.page), parts.path)) if parts.path else link.page
    if not (documents.ROOT / path).is_file():
        return f"there is no file {path}"
    if parts.fragment and parts.fragment not in anchors(path):
        return f"{path} has no heading #{parts.fragment}"
    return None


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page: str) -> None:
    found = [f"{link}: {wrong}" for link in links(page) if (wrong := fault(link))]
    assert not found, "\n" + "\n".join(found)


def test_documents_that_the_code_names_exist() -> None:
    folders = ("mcore_entropy", "examples", "tests", "patches")
    sources = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    missing = [
        f"{source.relative_to(ROOT)} names {name}"
        for source in [*sources, ROOT / "Makefile", ROOT / "pyproject.toml", *map(ROOT.joinpath, pages())]
        for name in re.findall(r"(?<![\w/.])docs/[\w/.-]+\.(?:md|png)", source.read_text(encoding="utf-8"))
        if not (ROOT / name).is_file()
    ]
    assert not missing, "\n".join(missing)


def test_what_is_wrong_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    (tmp_path / "manual").mkdir()
    (tmp_path / "manual/other.md").write_text(
        "# A `title`, twice\n## A title, twice\n```\n# no heading\n```\n"
    )
    targets = {
        "manual/other.md": None,
        "manual/other.md#a-title-twice": None,
        "manual/other.md#a-title-twice-1": None,
        "manual/other.md#no-heading": "has no heading",
        "manual/missing.md": "there is no file",
        "#here": None,
        "#there": "has no heading",
        "/manual/other.md": "relative to the document",
        "https://example.org/a?b#c": None,
        "http:/example.org": "expected https",
    }
    lines = [f"[text [with] brackets]({target})" for target in targets]
    (tmp_path / "page.md").write_text(
        "# Here\n" + "\n".join(lines) + "\n`[no](link)`\n```\n[no](link)\n```\n![picture](manual/other.md)\n"
    )
    found = {link.target: fault(link) for link in links("page.md")}
    assert found.keys() == targets.keys()
    for target, expected in targets.items():
        actual = found[target]
        assert (actual is None) if expected is None else (actual is not None and expected in actual), target

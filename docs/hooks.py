"""MkDocs: a link that leaves docs/ leads to a copy of that file in the site, as text or as a page.

Documents are read in the repository as well as in the site, so they link to source files by relative paths.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = "docs"
COPIES = "source"  # the folder of the site with copies of what lies outside of docs/
CHANGELOG = "CHANGELOG.md"

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)\s#]+)(#[^)\s]*)?(?=\))")


def _copied(path: str) -> str:
    """Where in the site a file of the repository is copied to; pages stay pages, the rest is text."""
    return f"{COPIES}/{path}" if path.endswith((".md", ".png")) else f"{COPIES}/{path}.txt"


def _links_outside(markdown: str, page: str) -> set[str]:
    """The files outside of docs/ that a page links to; all paths are from the repository's root."""
    targets = {
        posixpath.normpath(posixpath.join(posixpath.dirname(page), match[1]))
        for match in _LINK.finditer(markdown)
    }
    return {path for path in targets if not path.startswith(f"{DOCS}/") and (ROOT / path).is_file()}


def on_files(files: Files, config: Any) -> Files:
    pages = {f"{DOCS}/{file.src_uri}": Path(file.abs_src_path) for file in files.documentation_pages()}
    pages[CHANGELOG] = ROOT / CHANGELOG
    seen: set[str] = set()
    while pages:
        page, place = pages.popitem()
        if page in seen:
            continue
        seen.add(page)
        if not page.startswith(f"{DOCS}/"):
            files.append(File.generated(config, _copied(page), abs_src_path=str(ROOT / page)))
        if page.endswith(".md"):
            outside = _links_outside(place.read_text(encoding="utf-8"), page)
            pages |= {path: ROOT / path for path in outside - seen}
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = page.file.src_uri
    is_copy = here.startswith(f"{COPIES}/")
    in_repository = here.removeprefix(f"{COPIES}/") if is_copy else f"{DOCS}/{here}"

    def in_the_site(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), match[1]))
        if path.startswith(f"{DOCS}/"):
            place = path.removeprefix(f"{DOCS}/")
        elif (ROOT / path).is_file():
            place = _copied(path)
        else:
            return match[0]  # MkDocs names what is not there
        return posixpath.relpath(place, posixpath.dirname(here) or ".") + (match[2] or "")

    return _LINK.sub(in_the_site, markdown)

"""What a version's tests came to, from pytest's junit file to a row of docs/compatibility.md."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HEADER = "| megatron-core | Python | torch | passed | failed | skipped | date | notes |"
RULE = "|---|---|---|---|---|---|---|---|"
BEGIN = "<!-- rows below are written by make compat -->"
END = "<!-- rows above are written by make compat -->"


@dataclass(frozen=True)
class Result:
    """Counts of one version's tests. Errors in setup, collection and teardown count as failures."""

    version: str
    python: str
    torch: str
    date: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    notes: tuple[str, ...] = ()
    complete: bool = True  # False: pytest ended before it had run every test

    @property
    def good(self) -> bool:
        # Nothing that ran is no success: a selection that fits no test, tests that are all skipped.
        return self.complete and self.failed == 0 and self.passed > 0

    def row(self) -> str:
        cells = [self.version, self.python, self.torch, self.passed, self.failed, self.skipped, self.date]
        notes = "; ".join(self.notes).replace("|", "\\|").replace("\n", " ")
        return " ".join(["|", " | ".join(map(str, cells)), "|", notes, "|"]).replace("  ", " ")


def read_junit(file: Path) -> tuple[int, int, int, tuple[str, ...]]:
    """Passed, failed, skipped, and notes: the tests that failed and the reasons for skipping.

    A test whose teardown fails as well has two entries or two children, and is one failure.
    """
    failed: dict[str, None] = {}  # in order
    skipped: dict[str, str] = {}
    names: dict[str, None] = {}
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        module = case.get("classname", "").rpartition(".")[2]  # none where the module cannot be imported
        name = f"{module}::{case.get('name')}" if module else case.get("name", "")
        names[name] = None
        for outcome in case:
            if outcome.tag in ("failure", "error"):
                failed[name] = None
            elif outcome.tag == "skipped":
                skipped[name] = outcome.get("message", "")
    skipped = {name: reason for name, reason in skipped.items() if name not in failed}
    notes = [f"failed: {name}" for name in failed]
    notes += [f"{count} skipped: {reason}" for reason, count in Counter(skipped.values()).items()]
    return len(names) - len(failed) - len(skipped), len(failed), len(skipped), tuple(notes)


def with_rows(page: str, results: Sequence[Result], order: Sequence[str]) -> str:
    """The page with these results' rows in its table; other versions' rows stay, all in `order`.

    Raises:
        ValueError: the page has no table to write into.
    """
    before, begin, rest = page.partition(BEGIN)
    table, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"page: expected the lines {BEGIN!r} and {END!r}, got a page without them")
    rows = {}
    for line in table.splitlines():
        if line.startswith("|") and line not in (HEADER, RULE):
            rows[line.split("|")[1].strip()] = line
    rows |= {result.version: result.row() for result in results}
    # A version that is no longer run has no row.
    table = "\n".join([HEADER, RULE, *(rows[version] for version in order if version in rows)])
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"

"""`make compat` itself: what it makes of pytest's outcomes, what it writes, and when it fails."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.compatibility import __main__ as program
from tests.compatibility.environments import RELEASES, CannotBuild, Release
from tests.compatibility.results import BEGIN, END, Result, with_rows

needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

TESTS = """
import pytest

@pytest.fixture
def broken_teardown():
    yield
    raise KeyError("teardown")

def test_good(): pass
def test_bad(): assert False
def test_bad_twice(broken_teardown): assert False
def test_bad_afterwards(broken_teardown): pass
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.skip(reason="no a|b here")
def test_left_out(depth): pass
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with tests and a page of its own, whose environments all hold this Python."""
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs/compatibility.md"
    page.write_text(f"Above.\n{BEGIN}\n{END}\nBelow.\n")
    (tmp_path / "tests/megatron").mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "env/bin").mkdir(parents=True)
    python = tmp_path / "env/bin/python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setattr(program, "PAGE", page)
    monkeypatch.setattr(program, "build", lambda release: python)
    return tmp_path


def write_tests(project: Path, text: str) -> None:
    (project / "tests/megatron/test_it.py").write_text(text)


def installed() -> str:
    return version("megatron-core")


@needs_megatron
def test_outcomes_are_counted_and_named(project: Path) -> None:
    write_tests(project, TESTS)
    result = program.run_tests(project / "env/bin/python", installed(), "2030-01-02", [])
    assert (result.passed, result.failed, result.skipped) == (1, 3, 2)
    assert result.notes == (
        "failed: test_it::test_bad",
        "failed: test_it::test_bad_twice",
        "failed: test_it::test_bad_afterwards",
        "2 skipped: no a|b here",
    )
    assert not result.good
    cells = result.row().replace("\\|", "").split("|")
    assert len(cells) == 10
    assert cells[1].strip() == installed()


@needs_megatron
@pytest.mark.parametrize(
    ("text", "options", "note"),
    [
        ("import no_such_module", [], "failed: tests.megatron.test_it"),
        ("import os\ndef test_crash(): os._exit(3)", [], "pytest ended with 3 and no report"),
        ("def test_good(): pass", ["-k", "nothing"], "pytest ended with 5"),
        ("def test_good(): raise KeyboardInterrupt", [], "pytest ended with 2"),
    ],
    ids=["import error", "crash", "no test", "interrupted"],
)
def test_what_is_no_success(project: Path, text: str, options: list[str], note: str) -> None:
    write_tests(project, text)
    result = program.run_tests(project / "env/bin/python", installed(), "2030-01-02", options)
    assert not result.good
    assert note in result.notes


@needs_megatron
def test_success_and_the_page(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "RELEASES", (Release("0.1.0", "3.1"), Release(installed(), "3.1")))
    write_tests(project, "def test_good(): pass")
    assert program.main([installed(), "-k", "good"]) == 0
    assert "| 1 |" not in program.PAGE.read_text()  # a selection's counts are not the page's
    assert program.main([installed()]) == 0
    page = program.PAGE.read_text()
    assert page.startswith("Above.\n")
    assert page.endswith("Below.\n")
    assert f"\n| {installed()} | " in page
    write_tests(project, "def test_bad(): assert False")
    assert program.main([installed()]) == 1
    assert "failed: test_it::test_bad" in program.PAGE.read_text()


def test_an_environment_that_cannot_be_built_fails_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(release: Release) -> Path:
        if release is RELEASES[0]:
            raise CannotBuild("no Python 3.11 found")
        return Path("python")

    good = Result("", "3.12.1", "2.14.1", "2030-01-02", passed=3)
    monkeypatch.setattr(program, "build", build)
    monkeypatch.setattr(program, "run_tests", lambda _, number, *__: replace(good, version=number))
    versions = [release.version for release in RELEASES]
    assert program.main([*versions, "-x"]) == 1
    rows = capsys.readouterr().out.splitlines()[-len(versions) :]
    assert "not built: no Python 3.11 found" in rows[0]
    assert all("| 3 | 0 | 0 |" in row for row in rows[1:])
    assert program.main([*versions[1:], "-x"]) == 0


def test_an_unknown_version_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"expected some of 0\.13\.1, .*, got 9\.9\.9"):
        program.main(["9.9.9", "-x"])


def test_rows_of_other_versions_stay_in_order() -> None:
    def result(version: str, passed: int) -> Result:
        return Result(version, "3.11.7", "2.13.0", "2030-01-02", passed=passed)

    page = with_rows(f"a\n{BEGIN}\n{END}\nb\n", [result("3", 1), result("1", 1)], ["1", "2", "3"])
    page = with_rows(page, [result("2", 1), result("3", 7)], ["1", "2", "3"])
    rows = [line.split("|")[1:5:3] for line in page.splitlines() if line.startswith("| ")][1:]
    assert [[cell.strip() for cell in row] for row in rows] == [["1", "1"], ["2", "1"], ["3", "7"]]
    assert with_rows(page, [], ["1", "2", "3"]) == page
    assert "| 2 |" not in with_rows(page, [], ["1", "3"])
    with pytest.raises(ValueError, match="page: expected the lines"):
        with_rows("no table", [], [])

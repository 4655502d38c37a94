"""requirements/: development's needs are pinned, within pyproject's bounds, and installed so by PINNED=1."""

from __future__ import annotations

import os
import re
import stat
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from requirements import audit, pins

FOLDER = Path(pins.__file__).parent
FILES = sorted(FOLDER.glob("*.txt"))
PYTHONS = [path for path in FILES if path.name.startswith("python")]
HERE = FOLDER / f"python{sys.version_info[0]}.{sys.version_info[1]}.txt"

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="pyproject.toml is read with tomllib")


def test_there_are_the_files_that_ci_uses() -> None:
    assert [path.name for path in FILES] == ["python3.11.txt", "python3.12.txt", "verl.txt"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_line_is_a_name_and_an_exact_public_version(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert lines
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][a-z0-9.]*", line), line
    assert lines == sorted(lines, key=lambda line: line.split("==")[0])
    assert len(pins.read(path)) == len(lines), "a name is listed twice"


@pytest.mark.parametrize("path", PYTHONS, ids=lambda path: path.name)
def test_what_pyproject_asks_for_is_pinned_within_its_bounds(path: Path) -> None:
    pinned = pins.read(path)
    needed = pins.needed(pins.EXTRAS, pins.pyproject())
    assert {"torch", "megatron-core", "pytest", "ruff", "typer", "build"} <= {each.name for each in needed}
    for requirement in needed:
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not pinned in {path.name}: make pins"
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}"


def test_what_verl_s_tests_install_is_pinned() -> None:
    makefile = (FOLDER.parent / "Makefile").read_text().replace("\\\n", " ")
    texts = [
        re.search(rf"^{name} :?\??= (.*)$", makefile, re.MULTILINE)[1] for name in ("VERL", "VERL_IMPORTS")
    ]
    pinned = {**pins.read(HERE), **pins.read(FOLDER / "verl.txt")}
    for requirement in map(Requirement, " ".join(texts).split()):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not pinned: make pins-verl"
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}"


@pytest.mark.skipif(not os.environ.get("PINNED"), reason="the environment was not installed with PINNED=1")
def test_a_pinned_environment_holds_the_pinned_versions() -> None:
    installed = {}
    for name in pins.read(HERE):
        try:
            installed[name] = pins.public_version(metadata.distribution(name))
        except metadata.PackageNotFoundError:
            continue  # of the extra docs, or of another platform
    assert {"torch", "megatron-core", "pytest"} <= installed.keys()
    assert installed == {name: version for name, version in pins.read(HERE).items() if name in installed}
    unpinned = pins.closure(pins.needed(["dev"], pins.pyproject())).keys() - installed.keys()
    assert not unpinned, "these were installed and no line pins them: make pins"


def test_extras_of_the_project_itself_and_markers_are_resolved() -> None:
    project = {
        "dependencies": ["torch>=2"],
        "optional-dependencies": {
            "dev": ["Mcore_Entropy[more,dev]", "pytest"],
            "more": ["numpy>=1", "pywin32; sys_platform == 'nowhere'"],
            "other": ["never"],
        },
    }
    assert {each.name for each in pins.needed(["dev", "absent"], project)} == {"torch", "pytest", "numpy"}


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(pins.Missing, match=r"^no-such-package, which mcore-entropy needs, is not installed"):
        pins.closure([Requirement("No_Such_Package>=1")])


def test_the_closure_reaches_what_extras_need() -> None:
    plain, with_extra = (pins.closure([Requirement(text)]) for text in ("pytest", "huggingface_hub[torch]"))
    assert "pluggy" in plain and "torch" not in plain
    assert "torch" in with_extra and "+" not in with_extra["torch"]


CLEAN = '{"dependencies": [{"name": "a", "version": "1.0", "vulns": []}]}'
KNOWN = CLEAN.replace("[]}", '[{"id": "PYSEC-0", "fix_versions": ["1.1"]}]}')
SKIPPED = CLEAN.replace('"version": "1.0", "vulns": []', '"skip_reason": "not found"')


@pytest.mark.parametrize(
    ("report", "complaint", "exit_code", "said"),
    [
        (CLEAN, "", 0, ": 0 known"),
        (KNOWN, "Found 1 known vulnerability", 1, "a 1.0: PYSEC-0, mended in 1.1"),
        (
            "",
            "ERROR\nConnectionError: no route",
            2,
            "cannot reach the advisory service from here; its last line: Conn",
        ),
        ("", "", 2, "its last line: it said nothing"),
        (SKIPPED, "", 2, "about 0 of 1 packages of some.txt"),
        ('{"dependencies": []}', "", 2, "about 0 of 0 packages"),
    ],
)
def test_an_audit_is_clean_only_where_there_was_an_answer(
    report: str, complaint: str, exit_code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = tmp_path / "pip-audit"
    stand_in.write_text(f"#!/bin/sh\nprintf '%s' '{report}'\nprintf '%s' '{complaint}' >&2\nexit 1\n")
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    assert audit.main([str(stand_in), "some.txt"]) == exit_code
    assert said in "".join(capsys.readouterr())


def test_an_audit_without_pip_audit_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main([str(tmp_path / "none"), "some.txt"]) == 2
    assert "NOT AUDITED" in capsys.readouterr().err

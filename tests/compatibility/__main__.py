"""Run the tests of the Megatron integration on every supported megatron-core.

    make compat                           all versions; writes their rows of docs/compatibility.md
    make compat ARGS='0.13.1 0.14.0'      these versions, and their rows
    make compat ARGS='0.13.1 -k swap -x'  from the first option on, arguments are pytest's; writes nothing

Exits with 1 if a version's environment cannot be built, a test fails, or none passes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from tests.compatibility.environments import RELEASES, ROOT, CannotBuild, Release, build
from tests.compatibility.results import Result, read_junit, with_rows

PAGE = ROOT / "docs/compatibility.md"


def main(arguments: Sequence[str]) -> int:
    first_option = next((i for i, text in enumerate(arguments) if text.startswith("-")), len(arguments))
    versions, pytest_arguments = arguments[:first_option], arguments[first_option:]
    known = {release.version: release for release in RELEASES}
    if unknown := set(versions) - set(known):
        raise SystemExit(f"versions: expected some of {', '.join(known)}, got {', '.join(sorted(unknown))}")

    results = []
    for version in versions or known:
        results.append(run(known[version], pytest_arguments))
        if not pytest_arguments:  # else the rows would tell of a part of the tests
            PAGE.write_text(with_rows(PAGE.read_text(), results, list(known)))
    print("\n".join(result.row() for result in results))
    return 0 if all(result.good for result in results) else 1


def run(release: Release, pytest_arguments: Sequence[str]) -> Result:
    """Build the release's environment and run the tests in it."""
    print(f"\n=== megatron-core {release.version}", flush=True)
    today = date.today().isoformat()
    try:
        python = build(release)
    except CannotBuild as error:
        return Result(
            release.version, release.python, "", today, notes=(f"not built: {error}",), complete=False
        )
    return run_tests(python, release.version, today, pytest_arguments)


def run_tests(python: Path, version: str, today: str, pytest_arguments: Sequence[str]) -> Result:
    junit = python.parents[1] / "junit.xml"
    junit.unlink(missing_ok=True)
    program = (
        "import platform; from importlib.metadata import version; "
        "print(platform.python_version(), version('torch'), version('megatron-core'))"
    )
    answer = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    python_version, torch_version, megatron_version = answer.stdout.split()
    assert megatron_version == version, f"{python} imports megatron-core {megatron_version}"
    status = subprocess.run(
        [python, "-m", "pytest", "tests/megatron", "-q", f"--junitxml={junit}", *pytest_arguments],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ},
        check=False,
    ).returncode
    result = Result(version, python_version, torch_version, today)
    if not junit.is_file():
        return replace(result, notes=(f"pytest ended with {status} and no report",), complete=False)
    passed, failed, skipped, notes = read_junit(junit)
    if status > 1:  # 0: all passed, 1: some failed; the rest are interruptions, usage and internal errors
        notes = (f"pytest ended with {status}", *notes)
    return replace(
        result, passed=passed, failed=failed, skipped=skipped, notes=notes, complete=status in (0, 1)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

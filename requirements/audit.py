"""Ask the advisory services about the pinned packages, by pip-audit.

    python requirements/audit.py PIP_AUDIT FILE...

Exits with 0 where nothing is known against them, 1 where something is, 2 where there was no answer: a service
that cannot be reached is not a clean bill.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


class NoAnswer(Exception):
    """pip-audit ended without a report; the message is one sentence."""


def known_against(pip_audit: str, pins: Path) -> list[str]:
    """A line for each advisory that names one of the pinned versions.

    Raises:
        NoAnswer: pip-audit is missing, or reported nothing, or left a package out.
    """
    # Every line is exact, so that nothing has to be resolved, downloaded or installed.
    command = [pip_audit, "--requirement", str(pins), "--disable-pip", "--no-deps", "--format", "json"]
    try:
        ran = subprocess.run([*command, "--progress-spinner", "off"], capture_output=True, text=True)
    except OSError as error:
        raise NoAnswer(f"{pip_audit} cannot be run ({error.strerror})") from None
    try:
        packages = json.loads(ran.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (ran.stderr.strip() or "it said nothing").splitlines()[-1]
        raise NoAnswer(
            f"pip-audit gave no report on {pins}, most likely because it cannot reach the advisory service "
            f"from here; its last line: {last}"
        ) from None
    skipped = [package for package in packages if "skip_reason" in package]
    if skipped or not packages:
        why = f"; {skipped[0]['name']}: {skipped[0]['skip_reason']}" if skipped else ""
        raise NoAnswer(
            f"pip-audit got an answer about {len(packages) - len(skipped)} of {len(packages)} packages of "
            f"{pins}, most likely because the advisory service is out of reach{why}"
        )
    return [
        f"{package['name']} {package['version']}: {each['id']}, "
        f"mended in {', '.join(each['fix_versions']) or 'no release yet'}"
        for package in packages
        for each in package["vulns"]
    ]


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    found = 0
    for pins in map(Path, arguments[1:]):
        try:
            advisories = known_against(arguments[0], pins)
        except NoAnswer as problem:
            print(f"NOT AUDITED: {problem}.", file=sys.stderr)
            return 2
        print(f"{pins}: {len(advisories)} known", *advisories, sep="\n  ")
        found += len(advisories)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Write down the exact versions of an environment, as constraints for pip.

    python requirements/pins.py        requirements/python3.X.txt: what the extras for development need
    python requirements/pins.py verl   requirements/verl.txt: what this environment holds itself

Nothing is downloaded: the versions are those that are installed.
"""

from __future__ import annotations

import platform
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HERE = Path(__file__).resolve().parent
PROJECT = "mcore-entropy"
EXTRAS = ("cli", "demo", "dev", "docs")
# The CUDA libraries: torch names their versions itself, and not every build of torch has them.
LEFT_TO_TORCH = ("cuda-", "nvidia-")


class Missing(Exception):
    """A package is needed and not installed; the message is one sentence."""


def pyproject() -> dict[str, Any]:
    """The [project] table."""
    import tomllib  # Python 3.11

    table = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert isinstance(table, dict)
    return table


def needed(extras: Iterable[str], project: dict[str, Any]) -> list[Requirement]:
    """What the project needs with these extras, on this Python and platform; its own extras are resolved."""
    found = [Requirement(text) for text in project["dependencies"]]
    optional = project["optional-dependencies"]
    waiting, seen = [extra for extra in extras if extra in optional], set[str]()
    while waiting:
        extra = waiting.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for requirement in map(Requirement, optional[extra]):
            if canonicalize_name(requirement.name) == PROJECT:
                waiting.extend(requirement.extras)
            elif applies(requirement, ()):
                found.append(requirement)
    return found


def applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    """Whether the requirement's marker holds here, of a package that is wanted with `extras`."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def closure(roots: Iterable[Requirement]) -> dict[str, str]:
    """Name and version of every package that `roots` need, and that those need in turn.

    Raises:
        Missing: one of them is not installed.
    """
    waiting: list[tuple[Requirement, str]] = [(root, PROJECT) for root in roots]
    versions: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement, whose = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen or name.startswith(LEFT_TO_TORCH):
            continue
        seen.add((name, extras))
        try:
            found = distribution(name)
        except PackageNotFoundError:
            raise Missing(
                f"{name}, which {whose} needs, is not installed: "
                f"pip install --editable '.[{','.join(EXTRAS)}]' and run this again"
            ) from None
        versions[name] = public_version(found)
        for further in map(Requirement, found.requires or ()):
            if applies(further, extras):
                waiting.append((further, name))
    return versions


def public_version(found: Distribution) -> str:
    """Without the build's label: 2.13.0 of 2.13.0+cpu, which pip takes for 2.13.0 as well."""
    return Version(found.version).public


def own_packages() -> dict[str, str]:
    """What is installed in this environment's own folder, not what it sees of another's."""
    folder = sysconfig.get_path("purelib")
    found = {canonicalize_name(each.name): public_version(each) for each in distributions(path=[folder])}
    return {name: version for name, version in found.items() if name not in ("pip", "setuptools")}


def read(path: Path) -> dict[str, str]:
    """Name and version of each line of a file of pins."""
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return dict(line.split("==") for line in lines if line)


def write(path: Path, versions: dict[str, str], command: str) -> None:
    python = f"Python {platform.python_version()} on {platform.system()}"
    heading = f"# Written by `{command}` from an environment of {python}: not by hand.\n"
    lines = [f"{name}=={version}\n" for name, version in sorted(versions.items())]
    path.write_text(heading + "".join(lines), encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    if list(arguments) not in ([], ["verl"]):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        if arguments:
            path, versions, command = HERE / "verl.txt", own_packages(), "make pins-verl"
        else:
            path = HERE / f"python{sys.version_info[0]}.{sys.version_info[1]}.txt"
            versions, command = closure(needed(EXTRAS, pyproject())), "make pins"
    except Missing as missing:
        print(f"{missing}.", file=sys.stderr)
        return 1
    write(path, versions, command)
    print(f"{path.relative_to(HERE.parent)}: {len(versions)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""One environment for each version of megatron-core.

torch and the test tools, which are large, lie once in an environment for each version of Python. A release's
own environment is small: this package, one megatron-core and what that requires, and a .pth file which puts
the large one's packages behind its own. Nothing but torch and the tools is shared between releases.

    .venv-compat-py3.11     torch and the tools
    .venv-compat-0.13.1     megatron-core 0.13.1; .venv-compat-0.13.1/bin/python -m pytest tests/megatron
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# torch as in the lanes of .ci/run. A release that requires another numpy gets its own.
TORCH = {"3.11": "torch==2.13.0", "3.12": "torch==2.14.1"}
TOOLS = ("numpy", "pytest>=8.2", "pytest-timeout>=2.3", "hypothesis>=6.100")


@dataclass(frozen=True)
class Release:
    """A version of megatron-core and the Python to run it on."""

    version: str
    python: str


# The newest patch release of every minor version that is supported.
RELEASES = (
    Release("0.13.1", "3.11"),
    Release("0.14.0", "3.11"),
    Release("0.15.3", "3.11"),
    Release("0.16.1", "3.11"),
    Release("0.17.1", "3.12"),  # from here on Python 3.12 is required
    Release("0.18.2", "3.12"),
    Release("0.19.2", "3.12"),
)


class CannotBuild(Exception):
    """An environment could not be made; the message says at which step."""


def build(release: Release) -> Path:
    """The Python of the release's environment, which is made unless it is there as it should be.

    Raises:
        CannotBuild: no such Python, or pip could not install something.
    """
    base = ROOT / f".venv-compat-py{release.python}"
    base_wants = [TORCH[release.python], *TOOLS]
    if not _is_built(base, base_wants):
        _create(base, _find_python(release.python))
        _install(base, base_wants)

    own = ROOT / f".venv-compat-{release.version}"
    own_wants = ["--editable", ".[megatron]", f"megatron-core=={release.version}"]
    requirements, _, _ = (ROOT / "pyproject.toml").read_text().partition("\n[tool.")
    recipe = [*base_wants, *own_wants, requirements]
    if not _is_built(own, recipe):
        _create(own, base / "bin/python", "--without-pip")
        (_packages(own) / "shared.pth").write_text(f"{_packages(base)}\n")  # pip is there, too
        _install(own, own_wants, recipe)
    return own / "bin/python"


def _is_built(environment: Path, recipe: list[str]) -> bool:
    stamp = environment / "recipe"
    return stamp.is_file() and stamp.read_text() == "\n".join(recipe)


def _create(environment: Path, python: Path, *options: str) -> None:
    shutil.rmtree(environment, ignore_errors=True)
    _call([python, "-m", "venv", *options, environment])


def _install(environment: Path, wants: list[str], recipe: list[str] | None = None) -> None:
    pip = [environment / "bin/python", "-m", "pip", "--disable-pip-version-check", "--no-input"]
    # Compiled here: every rank of every test imports all of it, and may not be allowed to write bytecode.
    _call([*pip, "install", "--quiet", "--compile", *wants])
    (environment / "recipe").write_text("\n".join(recipe or wants))


def _call(command: list[str | Path]) -> None:
    try:
        subprocess.run(command, check=True, cwd=ROOT)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotBuild(" ".join(map(str, command[1:]))) from error


def _packages(environment: Path) -> Path:
    return next((environment / "lib").glob("python*")) / "site-packages"


def _find_python(minor: str) -> Path:
    """The running interpreter, one on PATH, or one of pyenv's, active or not."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    of_pyenv = sorted(pyenv.glob(f"{minor}.*/bin/python"), reverse=True)
    candidates = [sys.executable, f"python{minor}", *of_pyenv]
    program = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2], sys.executable)"
    for candidate in candidates:
        # A pyenv shim is on PATH even for versions that are not active: only running it tells.
        try:
            answer = subprocess.run([candidate, "-c", program], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        found, executable = answer.stdout.strip().split(" ", 1)
        if found == minor:
            return Path(executable)
    raise CannotBuild(f"no Python {minor} found")

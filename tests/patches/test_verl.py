"""The patched verl, a copy of the release that is installed: with our head and without it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patches import apply
from tests.adapters.verl_cases import NEEDS_VERL

VERSIONS = apply.targets()["verl"]
SPEC = importlib.util.find_spec("verl")
if SPEC is None or SPEC.origin is None:
    pytest.skip(NEEDS_VERL, allow_module_level=True)
INSTALLED = Path(SPEC.origin).parents[1]
try:
    apply.version_of(INSTALLED, VERSIONS)
except apply.Refused as refusal:
    pytest.skip(f"no patch for it: {refusal}", allow_module_level=True)

# What each name of `REPLACEMENTS` is, once every module that can be imported here was, without any switch.
PROGRAM = """
import importlib, sys
import verl
assert verl.__file__.startswith(sys.argv[1])
from mcore_entropy.adapters.verl_replacements import REPLACEMENTS
for each in REPLACEMENTS:
    try:
        found = importlib.import_module(each.module)
    except ModuleNotFoundError as error:
        assert error.name.split(".")[0] == "megatron", error
        continue
    for part in each.name.split("."):
        found = getattr(found, part)
    print("is", each.module, each.name, found.__module__)
from verl.workers.engine.fsdp import transformer_impl
print("is", "user", "logprobs_from_logits", transformer_impl.logprobs_from_logits.__module__)
"""


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("patched")
    shutil.copytree(INSTALLED / "verl", folder / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    apply.run("revert", folder, VERSIONS)
    apply.run("apply", folder, VERSIONS)
    return folder


def owners(folder: Path, setting: str) -> list[str]:
    """The module of every replaced name."""
    paths = os.pathsep.join([str(folder), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        env={**os.environ, "PYTHONPATH": paths, "VERL_MCORE_ENTROPY": setting},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    found = [line.split()[-1] for line in run.stdout.splitlines() if line.startswith("is ")]
    assert len(found) >= 9  # the names that need no Megatron
    return found


def test_on_every_name_is_ours_where_it_is_used(patched: Path) -> None:
    assert [name for name in owners(patched, "1") if not name.startswith("mcore_entropy.")] == []


def test_off_every_name_is_stocks(patched: Path) -> None:
    assert [name for name in owners(patched, "0") if name.startswith("mcore_entropy.")] == []


def test_it_comes_out_again(patched: Path, tmp_path: Path) -> None:
    files = apply.version_of(patched, VERSIONS)[0].files
    for file in files:
        copy = tmp_path / file.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(patched / file.path, copy)
        compile(copy.read_bytes(), file.path, "exec")
    apply.run("revert", tmp_path, VERSIONS)
    for file in files:
        assert apply.blob_hash((tmp_path / file.path).read_bytes()) == file.base

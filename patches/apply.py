"""Patch a checkout, take the patch out again, or say where the checkout stands.

    python patches/apply.py apply|revert|check CHECKOUT [--target megatron_lm]

patches/TARGET/VERSION/target.json names the files that a version's patches change, with the git blob hash of
each before and after. Only a tree whose files have those hashes is touched, all of its files or none. A patch
is insertions without context, so that it holds no line of its target.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

PATCHES = Path(__file__).resolve().parent
HUNK = re.compile(rb"@@ -(\d+),0 \+(\d+)(?:,(\d+))? @@")


class Refused(Exception):
    """The checkout is not what the patches are for; the message is one line."""


@dataclass(frozen=True)
class PatchedFile:
    """A file of the target, its patch, and its blob hashes before and after."""

    path: str
    patch: Path
    base: str
    patched: str

    def state(self, checkout: Path) -> str:
        """Where the file in `checkout` stands: "base", "patched" or its unknown hash; "missing"."""
        path = checkout / self.path
        if not path.is_file():
            return "missing"
        found = blob_hash(path.read_bytes())
        return {self.base: "base", self.patched: "patched"}.get(found, found)

    def has_crlf_of_base(self, checkout: Path) -> bool:
        """Whether the file is the base but for the ends of its lines."""
        content = (checkout / self.path).read_bytes()
        return blob_hash(content.replace(b"\r\n", b"\n")) == self.base

    def applied_to(self, base: bytes) -> bytes:
        """`base` with the patch's lines."""
        lines = base.splitlines(keepends=True)
        for after, inserted in reversed(hunks(self.patch)):
            lines[after:after] = inserted
        return self._checked(b"".join(lines), self.patched)

    def reverted_from(self, patched: bytes) -> bytes:
        """`patched` without the patch's lines."""
        lines = patched.splitlines(keepends=True)
        for after, inserted in hunks(self.patch):  # in order: what is above is taken out already
            del lines[after : after + len(inserted)]
        return self._checked(b"".join(lines), self.base)

    def _checked(self, content: bytes, expected: str) -> bytes:
        if blob_hash(content) != expected:
            raise Refused(f"{self.patch}: expected it to give {expected}, got {blob_hash(content)}")
        return content


@dataclass(frozen=True)
class Version:
    """The patches of one version of a target."""

    name: str
    releases: tuple[str, ...]
    files: tuple[PatchedFile, ...]

    @staticmethod
    def read(folder: Path) -> Version:
        manifest = json.loads((folder / "target.json").read_text(encoding="utf-8"))
        files = [
            PatchedFile(
                inside(entry["path"]), folder / inside(entry["patch"]), entry["base"], entry["patched"]
            )
            for entry in manifest["files"]
        ]
        return Version(folder.name, tuple(manifest["releases"]), tuple(files))


def inside(path: str) -> str:
    """The manifest's path, which stays in the folder that it is relative to.

    Raises:
        Refused: it is absolute, or leads out.
    """
    for flavour in (PurePosixPath(path), PureWindowsPath(path)):
        if flavour.anchor or ".." in flavour.parts or not flavour.parts:
            raise Refused(f"target.json: expected a path inside its folder, got {path!r}")
    return path


def blob_hash(content: bytes) -> str:
    """What ``git hash-object`` gives."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def hunks(patch: Path) -> list[tuple[int, list[bytes]]]:
    """For each hunk the line of the base after which it inserts, and the lines."""
    found: list[tuple[int, list[bytes]]] = []
    for number, line in enumerate(patch.read_bytes().splitlines(keepends=True), 1):
        heading = HUNK.fullmatch(line.rstrip(b"\n"))
        if heading:
            found.append((int(heading[1]), []))
        elif found and line.startswith(b"+"):
            found[-1][1].append(line[1:])
        elif found or not line.startswith((b"--- ", b"+++ ")):
            raise Refused(f"{patch}:{number}: expected an insertion without context")
    return found


def version_of(checkout: Path, versions: Sequence[Version]) -> tuple[Version, list[str]]:
    """The version that the checkout is of, patched or not, and the state of each of its files.

    Raises:
        Refused: no version's files are all there, each with its hash before or after.
    """
    if not checkout.is_dir():
        raise Refused(f"{checkout}: expected a folder, got {'a file' if checkout.exists() else 'nothing'}")
    nearest: tuple[int, Version, list[str]] | None = None
    for version in versions:
        states = [file.state(checkout) for file in version.files]
        known = sum(state in ("base", "patched") for state in states)
        if known == len(states):
            return version, states
        if nearest is None or known > nearest[0]:
            nearest = known, version, states
    assert nearest is not None
    known, version, states = nearest
    file, found = next(
        (file, state)
        for file, state in zip(version.files, states, strict=True)
        if state not in ("base", "patched")
    )
    # Of a tree that no version knows, any may have been meant.
    meant = [version] if known else versions
    expected = ", ".join(
        f"{other.base} ({' '.join(each.releases)})"
        for each in meant
        for other in each.files
        if other.path == file.path
    )
    cause = "another version, or a change to the file"
    if found != "missing" and file.has_crlf_of_base(checkout):
        cause = "its lines end in CRLF, and must in LF"
    raise Refused(f"{file.path}: expected {expected}, got {found}; {cause}")


def file_of(checkout: Path, file: PatchedFile) -> Path:
    """What is to be changed: a link is followed, and stays."""
    return (checkout / file.path).resolve()


def replace_all(contents: dict[Path, bytes]) -> None:
    """Write every file under another name first, then rename: all of them change, or none."""
    drafts = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in contents}
    before = {path: path.read_bytes() for path in contents}
    replaced: list[Path] = []
    try:
        for path, draft in drafts.items():
            draft.write_bytes(contents[path])
            shutil.copymode(path, draft)
        for path, draft in drafts.items():
            os.replace(draft, path)
            replaced.append(path)
    except BaseException:
        for path in replaced:
            path.write_bytes(before[path])
        raise
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)


def run(action: str, checkout: Path, versions: Sequence[Version]) -> str:
    """Does it and says what was done.

    Raises:
        Refused: the checkout is not one of `versions`, or is half patched where that does not do.
    """
    version, states = version_of(checkout, versions)
    what = f"{version.name} in {checkout}"
    patched = [file for file, state in zip(version.files, states, strict=True) if state == "patched"]
    partially = 0 < len(patched) < len(version.files)
    if partially and action != "revert":
        names = ", ".join(file.path for file in patched)
        raise Refused(f"{what}: partially patched ({names} of {len(states)} files); revert it first")
    if action == "check":
        return f"{what}: {'patched' if patched else 'not patched'}"
    if action == "apply":
        if patched:
            return f"{what}: patched already"
        replace_all({(p := file_of(checkout, f)): f.applied_to(p.read_bytes()) for f in version.files})
        return f"{what}: patched {', '.join(file.path for file in version.files)}"
    if not patched:
        return f"{what}: not patched, nothing to revert"
    replace_all({(p := file_of(checkout, f)): f.reverted_from(p.read_bytes()) for f in patched})
    return f"{what}: reverted {', '.join(file.path for file in patched)}"


def targets() -> dict[str, list[Version]]:
    """All targets that have patches here, with their versions."""
    found: dict[str, list[Version]] = {}
    for manifest in sorted(PATCHES.glob("*/*/target.json")):
        found.setdefault(manifest.parents[1].name, []).append(Version.read(manifest.parent))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        known = targets()
    except Refused as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return 1
    parser = argparse.ArgumentParser(description="Patch a checkout, undo it, or say where it stands.")
    parser.add_argument("action", choices=("apply", "revert", "check"))
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--target", choices=known, default="megatron_lm")
    args = parser.parse_args(arguments)
    try:
        print(run(args.action, args.checkout, known[args.target]))
    except (Refused, OSError) as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

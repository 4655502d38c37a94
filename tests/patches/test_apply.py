"""`patches/apply.py` on trees made up here, the form of the patches that ship, and a real checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from patches import apply

FIRST = b"one\ntwo\nthree\n"
SECOND = b"a\r\nb\n"
FIRST_PATCHED = b"zero\none\ntwo\ntwo and\na half\nthree\nfour\n"
SECOND_PATCHED = b"a\r\nb\nc\n"
FIRST_PATCH = """\
--- a/first.py
+++ b/first.py
@@ -0,0 +1 @@
+zero
@@ -2,0 +4,2 @@
+two and
+a half
@@ -3,0 +7 @@
+four
"""
SECOND_PATCH = "--- a/deep/second.py\n+++ b/deep/second.py\n@@ -2,0 +3 @@\n+c\n"


def git_hash(content: bytes) -> str:
    return subprocess.run(
        ["git", "hash-object", "--stdin"], input=content, capture_output=True, check=True
    ).stdout.decode().strip()  # fmt: skip


@pytest.fixture
def versions(tmp_path: Path) -> list[apply.Version]:
    """Version v2 of a target with two files; v1 had other text in the first, and its own patch."""
    files = {
        "v1": [("first.py", FIRST_PATCH, FIRST + b"old\n", FIRST_PATCHED + b"old\n")],
        "v2": [
            ("first.py", FIRST_PATCH, FIRST, FIRST_PATCHED),
            ("deep/second.py", SECOND_PATCH, SECOND, SECOND_PATCHED),
        ],
    }
    for version, entries in files.items():
        folder = tmp_path / "patches" / version
        folder.mkdir(parents=True)
        listed = []
        for path, patch, base, patched in entries:
            name = f"{Path(path).stem}.patch"
            (folder / name).write_text(patch)
            listed.append({"path": path, "patch": name, "base": git_hash(base), "patched": git_hash(patched)})
        (folder / "target.json").write_text(json.dumps({"releases": [version], "files": listed}))
    return [apply.Version.read(tmp_path / "patches" / version) for version in files]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "deep").mkdir(parents=True)
    (folder / "first.py").write_bytes(FIRST)
    (folder / "first.py").chmod(0o755)
    (folder / "deep" / "second.py").write_bytes(SECOND)
    return folder


def contents(checkout: Path) -> tuple[bytes, bytes]:
    files = sorted(str(path.relative_to(checkout)) for path in checkout.rglob("*") if path.is_file())
    assert files == ["deep/second.py", "first.py"], "nothing else is left in the tree"
    return (checkout / "first.py").read_bytes(), (checkout / "deep" / "second.py").read_bytes()


def test_apply_and_revert(versions: Sequence[apply.Version], checkout: Path) -> None:
    assert apply.run("check", checkout, versions).endswith(": not patched")
    assert apply.run("apply", checkout, versions).endswith(": patched first.py, deep/second.py")
    assert contents(checkout) == (FIRST_PATCHED, SECOND_PATCHED)
    assert (checkout / "first.py").stat().st_mode & 0o777 == 0o755
    assert apply.run("check", checkout, versions).endswith(": patched")
    assert apply.run("apply", checkout, versions).endswith(": patched already")
    assert contents(checkout) == (FIRST_PATCHED, SECOND_PATCHED)
    assert apply.run("revert", checkout, versions).endswith(": reverted first.py, deep/second.py")
    assert contents(checkout) == (FIRST, SECOND)
    assert apply.run("revert", checkout, versions).endswith(": not patched, nothing to revert")


def test_git_applies_the_same(versions: Sequence[apply.Version], checkout: Path) -> None:
    for file in versions[1].files:
        subprocess.run(["git", "apply", "--unidiff-zero", str(file.patch)], cwd=checkout, check=True)
    assert contents(checkout) == (FIRST_PATCHED, SECOND_PATCHED)


def test_the_older_version_is_found(versions: Sequence[apply.Version], checkout: Path) -> None:
    (checkout / "first.py").write_bytes(FIRST + b"old\n")
    assert apply.run("apply", checkout, versions) == f"v1 in {checkout}: patched first.py"
    assert contents(checkout) == (FIRST_PATCHED + b"old\n", SECOND)


@pytest.mark.parametrize("action", ["apply", "revert", "check"])
def test_a_wrong_base_is_refused_with_its_hashes(
    action: str, versions: Sequence[apply.Version], checkout: Path
) -> None:
    (checkout / "first.py").write_bytes(FIRST + b"mine\n")
    with pytest.raises(apply.Refused) as refusal:
        apply.run(action, checkout, versions)
    line, found = str(refusal.value), git_hash(FIRST + b"mine\n")
    # The second file is version 2's, so that is what was meant.
    assert line.startswith(f"first.py: expected {git_hash(FIRST)} (v2), got {found}; ")
    assert "\n" not in line
    assert contents(checkout) == (FIRST + b"mine\n", SECOND)


def test_what_no_version_knows_names_every_version(versions: Sequence[apply.Version], checkout: Path) -> None:
    (checkout / "first.py").write_bytes(b"")
    (checkout / "deep" / "second.py").unlink()
    with pytest.raises(apply.Refused, match=r"first.py: expected \w+ \(v1\), \w+ \(v2\), got"):
        apply.run("apply", checkout, versions)
    (checkout / "first.py").unlink()
    with pytest.raises(apply.Refused, match=r"first.py: expected .* got missing"):
        apply.run("apply", checkout, versions)
    with pytest.raises(apply.Refused, match="expected a folder, got nothing"):
        apply.run("apply", checkout / "absent", versions)


def test_line_ends_are_named_as_the_cause(versions: Sequence[apply.Version], checkout: Path) -> None:
    (checkout / "first.py").write_bytes(FIRST.replace(b"\n", b"\r\n"))
    with pytest.raises(apply.Refused, match=r"first.py: expected .*; its lines end in CRLF"):
        apply.run("apply", checkout, versions)


def test_a_link_is_followed_and_stays(versions: Sequence[apply.Version], checkout: Path) -> None:
    elsewhere = checkout.parent / "elsewhere.py"
    (checkout / "first.py").rename(elsewhere)
    (checkout / "first.py").symlink_to(elsewhere)
    apply.run("apply", checkout, versions)
    assert elsewhere.read_bytes() == FIRST_PATCHED and (checkout / "first.py").is_symlink()
    apply.run("revert", checkout, versions)
    assert elsewhere.read_bytes() == FIRST and (checkout / "first.py").is_symlink()


def test_what_the_file_system_refuses_is_one_line(
    versions: Sequence[apply.Version],
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "first.py")

    monkeypatch.setattr(apply, "targets", lambda: {"megatron_lm": versions})
    monkeypatch.setattr(apply.os, "replace", refuse)
    assert apply.main(["apply", str(checkout)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("refused: ") and "Permission denied" in lines[0]
    assert contents(checkout) == (FIRST, SECOND)


def test_a_change_after_patching_is_refused(versions: Sequence[apply.Version], checkout: Path) -> None:
    apply.run("apply", checkout, versions)
    (checkout / "deep" / "second.py").write_bytes(SECOND_PATCHED + b"mine\n")
    with pytest.raises(apply.Refused, match=r"deep/second\.py: expected"):
        apply.run("revert", checkout, versions)
    assert contents(checkout) == (FIRST_PATCHED, SECOND_PATCHED + b"mine\n")


def test_a_half_patched_tree_is_told_and_can_be_reverted(
    versions: Sequence[apply.Version], checkout: Path
) -> None:
    (checkout / "first.py").write_bytes(FIRST_PATCHED)
    for action in ("apply", "check"):
        with pytest.raises(apply.Refused, match=r"partially patched \(first.py of 2 files\); revert it"):
            apply.run(action, checkout, versions)
    assert apply.run("revert", checkout, versions).endswith(": reverted first.py")
    assert contents(checkout) == (FIRST, SECOND)


def test_all_files_change_or_none(
    versions: Sequence[apply.Version], checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, calls = os.replace, []

    def second_fails(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError("disk full")
        replace(source, target)

    monkeypatch.setattr(os, "replace", second_fails)
    with pytest.raises(OSError, match="disk full"):
        apply.run("apply", checkout, versions)
    assert len(calls) == 2 and contents(checkout) == (FIRST, SECOND)


def test_a_patch_that_does_not_give_its_hash_writes_nothing(
    versions: Sequence[apply.Version], checkout: Path
) -> None:
    versions[1].files[1].patch.write_text(SECOND_PATCH.replace("+c", "+d"))
    with pytest.raises(apply.Refused, match=r"second.patch: expected it to give"):
        apply.run("apply", checkout, versions)
    assert contents(checkout) == (FIRST, SECOND)


def test_exit_codes_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert apply.main(["check", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("refused: pretrain_gpt.py: expected ")
    assert printed.err.count("\n") == 1


SHIPPED = [
    pytest.param(file, version, id=f"{target}-{version.name}-{file.patch.name}")
    for target, versions in apply.targets().items()
    for version in versions
    for file in version.files
]


@pytest.mark.parametrize(("file", "version"), SHIPPED)
def test_shipped_patches_hold_no_line_of_their_target(
    file: apply.PatchedFile, version: apply.Version
) -> None:
    """Two file lines, then hunks that only insert, where their headings say, as many lines as these say."""
    first, second, *rest = file.patch.read_bytes().splitlines()
    assert [first, second] == [f"--- a/{file.path}".encode(), f"+++ b/{file.path}".encode()]
    counts, inserted = [], 0
    for line in rest:
        heading = apply.HUNK.fullmatch(line)  # "fullmatch": no words of the target after the second @@
        if heading:
            after, at, count = (int(group) if group else 1 for group in heading.groups())
            assert at == after + 1 + inserted
            counts.append(count)
            inserted += count
        else:
            assert line.startswith(b"+")
    assert [len(lines) for _, lines in apply.hunks(file.patch)] == counts
    assert len(file.base) == len(file.patched) == 40 and version.releases


@pytest.mark.parametrize("line", [b" context\n", b"-removed\n", b"@@ -1,0 +2 @@ def heading():\n", b"\n"])
def test_other_forms_are_refused(line: bytes, tmp_path: Path) -> None:
    patch = tmp_path / "some.patch"
    patch.write_bytes(b"--- a/x\n+++ b/x\n@@ -1,0 +2 @@\n+new\n" + line)
    with pytest.raises(apply.Refused, match=r"some.patch:5: expected an insertion without context"):
        apply.hunks(patch)


@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="needs MEGATRON_LM, a checkout of Megatron-LM")
@pytest.mark.parametrize("target", ["megatron_lm", "megatron_rl"])
def test_a_real_checkout(target: str, tmp_path: Path) -> None:
    """The shipped patches give valid Python that the target's version takes, and come out again."""
    versions = apply.targets()[target]
    source = Path(os.environ["MEGATRON_LM"])
    try:
        version, _ = apply.version_of(source, versions)
    except apply.Refused as refusal:
        pytest.skip(f"no patch for it: {refusal}")
    for file in version.files:
        (tmp_path / file.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / file.path, tmp_path / file.path)
    apply.run("revert", tmp_path, versions)
    before = {file.path: (tmp_path / file.path).read_bytes() for file in version.files}
    apply.run("apply", tmp_path, versions)
    for file in version.files:
        text = (tmp_path / file.path).read_bytes()
        compile(text, file.path, "exec")
        assert text != before[file.path]
    apply.run("revert", tmp_path, versions)
    assert before == {file.path: (tmp_path / file.path).read_bytes() for file in version.files}

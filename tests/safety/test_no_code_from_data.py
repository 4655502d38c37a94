"""Data stays data: no call that runs what it reads, and inputs that try are refused before they run."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from patches import apply

ROOT = Path(__file__).parents[2]
FOLDERS = ("mcore_entropy", "examples", "patches", "requirements")

# Calls that run code from what they are given. A dotted name matches at its end, as in x.torch.load.
RUNS_CODE = {
    *("eval", "exec", "compile", "__import__", "runpy.run_path", "runpy.run_module"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open"),
    *("dill.load", "dill.loads", "cloudpickle.load", "cloudpickle.loads", "joblib.load"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.hub.load", "torch.jit.load", "torch.package"),
    *(
        "os.system",
        "os.popen",
        "subprocess.getoutput",
        "subprocess.getstatusoutput",
        "torch.load",
        "numpy.load",
    ),
    # These unpickle what another rank sends.
    *(
        "broadcast_object_list",
        "all_gather_object",
        "gather_object",
        "scatter_object_list",
        "recv_object_list",
    ),
}
# The calls that stay, each with its reason. A call that is gone has to leave the list.
ALLOWED = {
    (
        "mcore_entropy/functional/agreement.py",
        "dist.all_gather_object",
    ): "between the ranks of one job, by request",
    ("examples/launch.py", "dist.broadcast_object_list"): "between the ranks of one job",
    ("examples/corpus.py", "torch.load"): "weights_only=True",
    (
        "examples/megatron_lm/run_on_cpu.py",
        "runpy.run_path",
    ): "the program that the command line asks it to run",
}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def spelled_out(tree: ast.AST) -> dict[str, str]:
    """Local names that stand for others: `from pickle import loads as l` makes l stand for pickle.loads."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.update({each.asname or each.name: f"{node.module}.{each.name}" for each in node.names})
        elif isinstance(node, ast.Import):
            names.update({each.asname: each.name for each in node.names if each.asname})
    return names


def dangers(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of every call that runs code from data, and of every one through a shell."""
    tree = ast.parse(source)
    names = spelled_out(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        written = dotted(node.func)
        first, dot, rest = written.partition(".")
        called = names.get(first, first) + dot + rest
        keywords = {each.arg: each.value for each in node.keywords if each.arg}
        bare = called if "." not in called else None
        hit = bare in RUNS_CODE or any(
            "." in each and f".{called}".endswith(f".{each}") for each in RUNS_CODE
        )
        hit = hit or called.rpartition(".")[2] in {each for each in RUNS_CODE if "_object" in each}
        shell = "shell" in keywords and ast.unparse(keywords["shell"]) != "False"
        if hit or shell or "trust_remote_code" in keywords or "allow_pickle" in keywords:
            yield node.lineno, written


def python_files() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def test_no_call_runs_what_it_reads() -> None:
    found = {}
    for path in python_files():
        where = path.relative_to(ROOT).as_posix()
        for line, name in dangers(path.read_text(encoding="utf-8")):
            found[where, name] = f"{where}:{line}: {name}"
    assert len(python_files()) > 80
    assert not [text for place, text in found.items() if place not in ALLOWED]
    assert not ALLOWED.keys() - found.keys(), "these calls are gone: take them off the list"


def test_every_torch_load_is_weights_only() -> None:
    loads = []
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and dotted(node.func) == "torch.load":
                keywords = {each.arg: ast.unparse(each.value) for each in node.keywords}
                loads.append(keywords.get("weights_only"))
    assert loads and set(loads) == {"True"}


def test_lines_that_patches_insert_run_nothing_either() -> None:
    inserted = [
        line[1:].strip()
        for patch in (ROOT / "patches").glob("*/*/*.patch")
        for line in patch.read_text(encoding="utf-8").splitlines()
        if line.startswith("+") and not line.startswith("+++")
    ]
    assert len(inserted) > 50
    words = (
        "eval(",
        "exec(",
        "pickle",
        "os.system",
        "subprocess",
        "shell=",
        "torch.load",
        "urlopen",
        "requests.",
    )
    assert not [line for line in inserted if any(word in line for word in words)]


@pytest.mark.parametrize(
    "source",
    [
        "eval(text)",
        "import pickle\npickle.loads(b)",
        "from pickle import loads as read\nread(b)",
        "import torch as t\nt.load(path)",
        "import subprocess\nsubprocess.run(line, shell=True)",
        "import subprocess\nsubprocess.run(line, shell=by_shell)",
        "import yaml\nyaml.load(f)",
        "import os\nos.system(line)",
        "from torch.distributed import all_gather_object\nall_gather_object(a, b)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_the_scan_finds(source: str) -> None:
    assert list(dangers(source))


@pytest.mark.parametrize(
    "source", ["re.compile(p)", "model.eval()", "json.loads(t)", "torch.compile(f)", "run(a, shell=False)"]
)
def test_the_scan_leaves_alone(source: str) -> None:
    assert not list(dangers(source))


# --- inputs that try --------------------------------------------------------------------------------


class Malicious:
    """Its unpickling makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("corpus")


def kept_folder(corpus: ModuleType, text: str, cache: Path) -> Path:
    digest = hashlib.sha256(f"1 300 {corpus.END_OF_TEXT}".encode() + text.encode() + b"\0").hexdigest()
    return cache / digest[:24]


@pytest.mark.parametrize("form", ["torch.save", "plain pickle"])
def test_a_malicious_file_in_the_cache_is_refused(corpus: ModuleType, form: str, tmp_path: Path) -> None:
    document, mark = tmp_path / "text.txt", tmp_path / "ran"
    document.write_text("some words, some more words\n" * 50)
    load = lambda: corpus.load([str(document)], vocab_size=300, max_mib=1, cache=tmp_path / "cache")  # noqa: E731
    expected = load().tokens
    tokens = kept_folder(corpus, document.read_text(), tmp_path / "cache") / "tokens.pt"
    assert tokens.is_file(), "the example keeps its tokens elsewhere now"
    if form == "torch.save":
        torch.save({"tokens": expected, "more": Malicious(mark)}, tokens)
    else:
        tokens.write_bytes(pickle.dumps(Malicious(mark)))
    with pytest.raises(pickle.UnpicklingError):
        load()
    assert not mark.exists(), "the pickle ran"
    with contextlib.suppress(RuntimeError):  # no torch file, it finds afterwards
        torch.load(tokens, weights_only=False)
    assert mark.exists(), "the pickle would not have run either way"


def test_a_tokenizer_file_is_json(corpus: ModuleType, tmp_path: Path) -> None:
    tokenizer_json, _ = corpus.tokenize(["some words"], 300)
    assert json.loads(tokenizer_json)["model"]["type"] == "BPE"
    from tokenizers import Tokenizer

    mark, path = tmp_path / "ran", tmp_path / "tokenizer.json"
    path.write_bytes(pickle.dumps(Malicious(mark)))
    with pytest.raises(Exception, match=r"UTF-8|expected|stream"):
        Tokenizer.from_file(str(path))
    assert not mark.exists()


def test_names_that_verl_s_switch_imports_come_from_our_own_table() -> None:
    """VERL_MCORE_ENTROPY is a switch, not a name: nothing that a user sets reaches import_module."""
    names = set()
    for path in (ROOT / "mcore_entropy").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and dotted(node.func).endswith("import_module"):
                names.add((path.name, ast.unparse(node.args[0])))
    assert names == {
        ("npu.py", "'torch_npu'"),
        ("verl_switch.py", "'verl'"),
        ("verl_switch.py", "name"),  # _imported: REPLACEMENTS' modules
        ("verl_replacements.py", "f'mcore_entropy.adapters.{module}'"),  # REPLACEMENTS' too
        ("doctor.py", "'megatron.core.models.gpt'"),
    }


@pytest.mark.parametrize(
    "path",
    [
        "../outside.py",
        "a/../../outside.py",
        "/etc/outside.py",
        "C:/outside.py",
        "..\\outside.py",
        "\\\\host\\x",
        "",
    ],
)
@pytest.mark.parametrize("field", ["path", "patch"])
def test_a_manifest_that_leads_out_of_its_target_is_refused(field: str, path: str, tmp_path: Path) -> None:
    entry = {"path": "inside.py", "patch": "inside.patch", "base": "0", "patched": "1", field: path}
    (tmp_path / "target.json").write_text(json.dumps({"releases": ["v1"], "files": [entry]}))
    with pytest.raises(apply.Refused, match="expected a path inside its folder"):
        apply.Version.read(tmp_path)


def test_a_path_inside_is_taken(tmp_path: Path) -> None:
    entry = {"path": "deep/in..side.py", "patch": "x.patch", "base": "0", "patched": "1"}
    (tmp_path / "target.json").write_text(json.dumps({"releases": ["v1"], "files": [entry]}))
    assert apply.Version.read(tmp_path).files[0].path == "deep/in..side.py"


def test_the_command_refuses_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "patches" / "megatron_lm" / "v1"
    folder.mkdir(parents=True)
    entry = {"path": "../outside.py", "patch": "x.patch", "base": "0", "patched": "1"}
    (folder / "target.json").write_text(json.dumps({"releases": ["v1"], "files": [entry]}))
    monkeypatch.setattr(apply, "PATCHES", tmp_path / "patches")
    assert apply.main(["check", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("refused: target.json: expected a path inside")

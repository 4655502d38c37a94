"""Docstrings of public names: what they have to say, and an example each, which is run."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

import mcore_entropy
from mcore_entropy import rl

ROOT = Path(__file__).parents[2]

# Records of results: they raise nothing and compute nothing.
RECORDS = {"TokenStatistics", "EntropyStatistics"}
# Our own autograd Functions are behind these: what they save is ours to say.
SAVES = {
    "VocabParallelEntropy",
    "linear_log_probs_and_entropy",
    "vocab_parallel_entropy",
    "vocab_parallel_entropy_with_chunking",
    "vocab_parallel_log_probs_and_entropy",
}
NUMBERS = ("fp32", "fp64", "dtype", "int32", "int64", "bool", "float", "nats")
# A docstring may say "as in" one of these.
REFERRED = ("vocab_parallel_entropy", "sequence_mean", "token_mean", "context_parallel_shard")
GROUPS = {"tp_group", "cp_group", "groups"}

# Their examples need ranks, or a model: a test runs them. Module, and the test's file.
RUN_BY_A_TEST = {
    "next_token_targets_of_shard": ("mcore_entropy.rl", "tests/distributed/test_rl.py"),
    "EntropyAwareOutputLayer": ("mcore_entropy", "tests/megatron/test_swap.py"),
    "swap_output_layer": ("mcore_entropy", "tests/megatron/test_swap.py"),
    "EntropyLoss": ("mcore_entropy.megatron.loss", "tests/megatron/test_loss.py"),
    "swap_lm_head": ("mcore_entropy.adapters.huggingface", "tests/adapters/test_huggingface.py"),
    "register_architecture": ("mcore_entropy.adapters.huggingface", "tests/adapters/test_architectures.py"),
    "known_architectures": ("mcore_entropy.adapters.huggingface", "tests/adapters/test_architectures.py"),
    "dtensor_entropy": ("mcore_entropy.adapters.dtensor", "tests/distributed/test_dtensor.py"),
    "dtensor_log_probs_and_entropy": ("mcore_entropy.adapters.dtensor", "tests/distributed/test_dtensor.py"),
    "dtensor_linear_log_probs_and_entropy": (
        "mcore_entropy.adapters.dtensor",
        "tests/distributed/test_dtensor.py",
    ),
    "wrap_fsdp1": ("mcore_entropy.adapters.fsdp", "tests/distributed/test_fsdp.py"),
    "wrap_fsdp2": ("mcore_entropy.adapters.fsdp", "tests/distributed/test_fsdp.py"),
    "set_prefetch": ("mcore_entropy.adapters.fsdp", "tests/distributed/test_fsdp_prefetch.py"),
    "entropy_from_logits": (
        "mcore_entropy.adapters.entropy_from_logits",
        "tests/adapters/test_entropy_from_logits.py",
    ),
    "switch_verl": ("mcore_entropy.adapters.verl_switch", "tests/adapters/test_verl_switch.py"),
}
WITH_DOCTEST = {
    name: getattr(module, name)
    for module in (mcore_entropy, rl)
    for name in module.__all__
    if name not in RUN_BY_A_TEST
}


def own_docstring(value: Any) -> str:
    """Not the signature that `dataclass` makes up, nor a parent's."""
    text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    return text or ""


def missing(name: str, value: Any) -> list[str]:
    """What the docstring of a public name has to say and does not."""
    text = own_docstring(value)
    lacks = []
    if len(text.partition("\n")[0]) < 10:
        lacks.append("a first line")
    is_options = inspect.isclass(value) and name not in SAVES
    parameters = set(inspect.signature(value).parameters) if inspect.isfunction(value) else set()
    refers = any(f"`{other}`" in text for other in REFERRED if other != name)
    if not is_options and not refers and "[" not in text and "scalar" not in text:
        lacks.append("shapes")
    if not is_options and not refers and not any(word in text for word in NUMBERS):
        lacks.append("dtypes")
    raises_none = name in RECORDS or name == "VocabParallelEntropy"
    if not raises_none and "ValueError" not in text and "raises" not in text:
        lacks.append("errors")
    if (parameters & GROUPS or name in SAVES) and "ollectives" not in text:
        lacks.append("collectives")
    if name in SAVES and "saved" not in text.lower():
        lacks.append("what is saved for backward")
    return lacks


@pytest.mark.parametrize("name", [*WITH_DOCTEST, "next_token_targets_of_shard"])
def test_a_docstring_says(name: str) -> None:
    value = WITH_DOCTEST.get(name) or getattr(rl, name)
    assert missing(name, value) == []


def test_the_check_finds_what_is_missing() -> None:
    def vocab_parallel_entropy(logits: object, tp_group: object = None) -> None:
        """Entropy of something."""

    assert missing("vocab_parallel_entropy", vocab_parallel_entropy) == [
        *("shapes", "dtypes", "errors", "collectives", "what is saved for backward"),
    ]
    vocab_parallel_entropy.__doc__ = None
    assert "a first line" in missing("vocab_parallel_entropy", vocab_parallel_entropy)


@pytest.mark.parametrize("name", WITH_DOCTEST)
def test_its_examples_run(name: str) -> None:
    value = WITH_DOCTEST[name]
    names = dict(vars(importlib.import_module(value.__module__)))
    names["torch"] = importlib.import_module("torch")
    found = doctest.DocTestParser().get_doctest(own_docstring(value), names, name, None, None)
    assert any(name in example.source for example in found.examples), f"no example calls {name}"
    failures: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(found, out=failures.append)
    assert results.failed == 0, "".join(failures)


@pytest.mark.parametrize("name", RUN_BY_A_TEST)
def test_the_test_that_runs_it_calls_it(name: str) -> None:
    module, file = RUN_BY_A_TEST[name]
    source = (ROOT / module.replace(".", "/")).with_suffix(".py")
    if source.exists():
        assert name in source.read_text(encoding="utf-8")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}  # the name of a type
    assert name in used, f"{file} does not use {name}"
    assert any(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in ast.walk(tree))

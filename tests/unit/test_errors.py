"""Every bad input is a ValueError that says what was expected, what came, and the likely cause.

Each case lists words that the message has to hold: the argument's name, the expected and the received.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import mcore_entropy as me

V, H = 11, 8
LOGITS = torch.randn(4, 6, V)
HIDDEN, WEIGHT = torch.randn(4, 6, H), torch.randn(V, H)
TARGET = torch.zeros(4, 6, dtype=torch.long)
ROWS = torch.ones(4, 6)
META = torch.device("meta")


def says(*words: str) -> str:
    """A pattern for `match=` that finds all words in any order."""
    return "(?is)^" + "".join(f"(?=.*{re.escape(word)})" for word in words)


def entropy(**changes: Any) -> object:
    return me.vocab_parallel_entropy(**({"vocab_parallel_logits": LOGITS} | changes))


def chunked(**changes: Any) -> object:
    return me.vocab_parallel_entropy_with_chunking(**({"vocab_parallel_logits": LOGITS} | changes))


def both(**changes: Any) -> object:
    given = {"vocab_parallel_logits": LOGITS, "target": TARGET} | changes
    return me.vocab_parallel_log_probs_and_entropy(**given)


def linear(**changes: Any) -> object:
    given = {"hidden": HIDDEN, "weight": WEIGHT, "target": TARGET} | changes
    return me.linear_log_probs_and_entropy(**given)


ALL = (entropy, chunked, both, linear)
WITH_TARGET = (both, linear)
WITH_CHUNKS = (chunked, both, linear)
NOT_LINEAR = (entropy, chunked, both)


def _target_with(value: int) -> torch.Tensor:
    target = TARGET.clone()
    target[3, 2] = value
    return target


# functions, changed arguments, words in the message
CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[str, ...]]] = {
    # shapes
    "target shape": (WITH_TARGET, {"target": TARGET[:, :5]}, ("target", "4, 6", "4, 5")),
    "target transposed": (WITH_TARGET, {"target": TARGET.t()}, ("target", "4, 6", "6, 4")),
    "target flat": (WITH_TARGET, {"target": TARGET.flatten()}, ("target", "4, 6", "24")),
    "mask shape": (ALL, {"mask": ROWS[:3].bool()}, ("mask", "4, 6", "3, 6")),
    "mask that would broadcast": (ALL, {"mask": ROWS[:1].bool()}, ("mask", "4, 6", "1, 6")),
    "temperature shape": (ALL, {"temperature": ROWS[:, :2]}, ("temperature", "4, 6", "4, 2")),
    "logits without dimensions": (
        NOT_LINEAR,
        {"vocab_parallel_logits": torch.tensor(1.0)},
        ("logits", "shape"),
    ),
    "weight of another hidden size": (
        (linear,),
        {"weight": torch.randn(V, H + 1)},
        ("weight", "hidden", str(H), str(H + 1)),
    ),
    "weight of one dimension": ((linear,), {"weight": WEIGHT[0]}, ("weight", "shape", f"({H},)")),
    "weight of three dimensions": (
        (linear,),
        {"weight": WEIGHT[None]},
        ("weight", "shape", f"(1, {V}, {H})"),
    ),
    "bias shape": ((linear,), {"bias": torch.zeros(V + 1)}, ("bias", str(V), str(V + 1))),
    "bias of two dimensions": ((linear,), {"bias": torch.zeros(1, V)}, ("bias", f"1, {V}")),
    # dtypes
    "float target": (WITH_TARGET, {"target": TARGET.float()}, ("target", "int", "float32")),
    "bool target": (WITH_TARGET, {"target": TARGET.bool()}, ("target", "int", "bool")),
    "float mask": (ALL, {"mask": ROWS}, ("mask", "bool", "float32")),
    "integer mask": (ALL, {"mask": ROWS.long()}, ("mask", "bool", "int64")),
    "integer logits": (
        NOT_LINEAR,
        {"vocab_parallel_logits": LOGITS.long()},
        ("logits", "float", "int64"),
    ),
    "complex logits": (
        NOT_LINEAR,
        {"vocab_parallel_logits": LOGITS.to(torch.complex64)},
        ("logits", "float", "complex64"),
    ),
    "integer hidden": (
        (linear,),
        {"hidden": HIDDEN.long(), "weight": WEIGHT.long()},
        ("hidden", "int64"),
    ),
    "hidden and weight differ": (
        (linear,),
        {"weight": WEIGHT.bfloat16()},
        ("weight", "hidden", "float32", "bfloat16"),
    ),
    "integer bias": ((linear,), {"bias": torch.zeros(V).long()}, ("bias", "float", "int64")),
    # devices
    "target elsewhere": (WITH_TARGET, {"target": TARGET.to(META)}, ("target", "cpu", "meta")),
    "mask elsewhere": (ALL, {"mask": ROWS.bool().to(META)}, ("mask", "cpu", "meta")),
    "temperature elsewhere": (ALL, {"temperature": ROWS.to(META)}, ("temperature", "cpu", "meta")),
    "weight elsewhere": ((linear,), {"weight": WEIGHT.to(META)}, ("weight", "cpu", "meta")),
    "bias elsewhere": ((linear,), {"bias": torch.zeros(V, device=META)}, ("bias", "cpu", "meta")),
    # vocabulary
    "vocab_size too large": (ALL, {"vocab_size": V + 1}, ("vocab_size", str(V), str(V + 1))),
    "vocab_size zero": (ALL, {"vocab_size": 0}, ("vocab_size", "0")),
    "vocab_size negative": (ALL, {"vocab_size": -3}, ("vocab_size", "-3")),
    "vocab_size no int": (ALL, {"vocab_size": 10.0}, ("vocab_size", "int", "10.0")),
    "vocab_start_index alone": (ALL, {"vocab_start_index": 0}, ("vocab_start_index", "vocab_size")),
    "vocab_start_index negative": (
        ALL,
        {"vocab_start_index": -1, "vocab_size": V},
        ("vocab_start_index", "-1"),
    ),
    # numbers
    "temperature zero": (ALL, {"temperature": 0.0}, ("temperature", "0")),
    "temperature int zero": (ALL, {"temperature": 0}, ("temperature", "0")),
    "temperature negative": (ALL, {"temperature": -0.5}, ("temperature", "-0.5")),
    "temperature nan": (ALL, {"temperature": float("nan")}, ("temperature", "nan")),
    "temperature no number": (ALL, {"temperature": "warm"}, ("temperature", "number", "warm")),
    "temperature with gradient": (
        ALL,
        {"temperature": ROWS.clone().requires_grad_()},
        ("temperature", "gradient"),
    ),
    "chunk_size zero": (WITH_CHUNKS, {"chunk_size": 0}, ("chunk_size", "0")),
    "chunk_size negative": (WITH_CHUNKS, {"chunk_size": -1}, ("chunk_size", "-1")),
    "chunk_size float": (WITH_CHUNKS, {"chunk_size": 2.0}, ("chunk_size", "2.0")),
    # choices
    "unknown metric": (
        WITH_TARGET,
        {"metrics": ("kurtosis",)},
        ("metric", "kurtosis", "varentropy"),
    ),
    "tp_group of another kind": (ALL, {"tp_group": "tensor"}, ("tp_group", "ProcessGroup", "tensor")),
    "tp_group a number": (ALL, {"tp_group": 2}, ("tp_group", "ProcessGroup", "2")),
    # targets: found on the CPU, where looking costs nothing
    "target at the end": (WITH_TARGET, {"target": _target_with(V)}, ("target", str(V))),
    "target far beyond": (WITH_TARGET, {"target": _target_with(2**40)}, ("target", str(2**40))),
    "target negative": (
        WITH_TARGET,
        {"target": _target_with(-1)},
        ("target", "-1", "ignore_index"),
    ),
    "target -100 without being ignored": (
        WITH_TARGET,
        {"target": _target_with(-100), "ignore_index": -1},
        ("target", "-100", "ignore_index"),
    ),
    "target in the padding": (
        WITH_TARGET,
        {"target": _target_with(V - 2), "vocab_size": V - 2},
        ("target", f"[0, {V - 2})", f"got {V - 2}"),
    ),
}
RUNS = [
    pytest.param(function, changes, words, id=f"{function.__name__}: {name}")
    for name, (functions, changes, words) in CASES.items()
    for function in functions
]


@pytest.mark.parametrize(("function", "changes", "words"), RUNS)
def test_bad_input(function: Any, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=says(*words)):
        function(**changes)


@pytest.mark.parametrize("function", ALL)
def test_the_same_call_without_the_mistake_works(function: Any) -> None:
    """Otherwise the cases above might fail for another reason."""
    function()
    rows = {"mask": ROWS.bool(), "temperature": ROWS, "vocab_size": V, "vocab_start_index": 0}
    function(**rows)
    if function in WITH_CHUNKS:
        function(chunk_size=2)
    if function is linear:
        linear(bias=torch.zeros(V), transform=me.LogitTransform(softcap=5.0), sequence_parallel=False)
    if function in WITH_TARGET:
        function(target=_target_with(V - 1))
        function(target=_target_with(-1), ignore_index=-1)


@pytest.mark.parametrize(
    ("record", "changes", "words"),
    [
        (me.Execution, {"backend": "abacus"}, ("backend", "abacus", "auto")),
        (me.Execution, {"workspace_mib": -1}, ("workspace_mib", "-1")),
        (me.Execution, {"logits_budget_mib": -1}, ("logits_budget_mib", "-1")),
        (me.Execution, {"compact_rows": 1}, ("compact_rows", "1")),
        (me.Execution, {"deterministic": None}, ("deterministic", "None")),
        (me.LogitTransform, {"softcap": 0.0}, ("softcap", "0")),
        (me.LogitTransform, {"softcap": -5.0}, ("softcap", "-5")),
        (me.LogitTransform, {"scale": float("nan")}, ("scale", "nan")),
    ],
)
def test_bad_settings(record: Any, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    def use() -> None:
        settings = record(**changes)
        linear(**{"execution" if record is me.Execution else "transform": settings})

    with pytest.raises(ValueError, match=says(*words)):
        use()


@pytest.mark.parametrize(
    ("function", "changes", "words"),
    [
        (linear, {"transform": lambda x: x}, ("transform", "LogitTransform")),
        (linear, {"execution": {"backend": "auto"}}, ("execution", "Execution", "backend")),
        (entropy, {"execution": "triton"}, ("execution", "Execution", "triton")),
    ],
)
def test_settings_of_another_kind(function: Any, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=says(*words)):
        function(**changes)


def test_hidden_and_weight_may_differ_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        linear(weight=WEIGHT.bfloat16())


@pytest.mark.parametrize("function", ALL)
def test_options_are_keyword_only(function: Any) -> None:
    positional = {entropy: 1, chunked: 2, both: 2, linear: 3}[function]
    public = {
        entropy: me.vocab_parallel_entropy,
        chunked: me.vocab_parallel_entropy_with_chunking,
        both: me.vocab_parallel_log_probs_and_entropy,
        linear: me.linear_log_probs_and_entropy,
    }[function]
    given = {
        entropy: (LOGITS,),
        chunked: (LOGITS, 4),
        both: (LOGITS, TARGET),
        linear: (HIDDEN, WEIGHT, TARGET),
    }
    assert len(given[function]) == positional
    with pytest.raises(TypeError, match="positional"):
        public(*given[function], None)


HEAD = torch.ones(3, 2), torch.ones(5, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: me.linear_log_probs_and_entropy(*HEAD, None), "target: expected a tensor"),
        (lambda: me.vocab_parallel_log_probs_and_entropy(LOGITS, None), "target: expected a tensor"),
        (lambda: me.vocab_parallel_entropy(LOGITS[..., :0]), "expected a vocabulary of at least one"),
        (lambda: me.vocab_parallel_entropy(LOGITS, temperature=1e-46), "temperature: expected a positive"),
        (lambda: me.vocab_parallel_entropy(LOGITS, mask=ROWS), r"pass loss_mask\.bool\(\)"),
        (lambda: me.LogitTransform(scale=-1.0), "positive, finite scale"),
        (lambda: me.LogitTransform(scale="a"), "positive, finite scale"),
        (lambda: me.LogitTransform(softcap=float("inf")), "positive, finite softcap"),
    ],
)
def test_more_bad_values(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_autocast_makes_no_pair_of_fp64_and_fp32() -> None:
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match="weight: expected hidden's dtype"),
    ):
        me.linear_log_probs_and_entropy(torch.ones(3, 2), torch.ones(5, 2).double(), torch.zeros(3).long())


def test_hidden_states_have_a_size() -> None:
    with pytest.raises(ValueError, match="hidden: expected"):
        me.linear_log_probs_and_entropy(torch.ones(3, 0), torch.ones(5, 0), torch.zeros(3).long())

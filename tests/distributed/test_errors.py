"""Bad input on several ranks: everybody raises, before any collective, or the run would hang.

What shared metadata shows raises always; what differs between ranks is found by MCORE_ENTROPY_CHECKS=1.
Each test has a time limit, so that a rank left waiting is a failure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mcore_entropy as me
from tests.ranks import run_ranks
from tests.unit.cases import NAN

V, H, S, B = 10, 4, 6, 2  # columns of each rank, hidden size, sequence, batch
LIMIT = 60.0


def _given(form: str) -> dict[str, Any]:
    """Right arguments, on whatever rank this is."""
    generator = torch.Generator().manual_seed(0)
    rank = dist.get_rank()
    given: dict[str, Any] = {"tp_group": dist.group.WORLD}
    logits = torch.randn(S, B, 2 * V, generator=generator)
    if form == "linear":
        hidden, weight = (torch.randn(*shape, generator=generator) for shape in ((S, B, H), (2 * V, H)))
        given |= {"hidden": hidden.requires_grad_(), "weight": weight.chunk(2)[rank].clone().requires_grad_()}
    else:
        given["vocab_parallel_logits"] = logits.chunk(2, -1)[rank].clone().requires_grad_()
    if form in ("linear", "both"):
        given["target"] = torch.arange(S * B).reshape(S, B)
    return given


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "entropy": me.vocab_parallel_entropy,
    "chunks": me.vocab_parallel_entropy_with_chunking,
    "both": me.vocab_parallel_log_probs_and_entropy,
    "linear": me.linear_log_probs_and_entropy,
}


def _attempt(form: str, changes: dict[str, Any], upstream: dict[str, Tensor] | None = None) -> str:
    """What forward and backward say: the message of a ValueError, or "fine"."""
    try:
        results = FUNCTIONS[form](**(_given(form) | changes))
        named = {"entropy": results} if isinstance(results, Tensor) else vars(results)
        values = {name: named[name] for name in ("log_probs", "entropy") if name in named}
        grads = {name: torch.ones_like(value) for name, value in values.items()} | (upstream or {})
        torch.autograd.backward(list(values.values()), [grads[name] for name in values])
    except ValueError as error:
        return str(error)
    return "fine"


def attempts(cases: list[tuple[str, list[dict[str, Any]]]], checks: bool) -> list[str]:
    """Module level, for `run_ranks`. A case: the form and the changed arguments of each rank."""
    messages = []
    with mock.patch.dict(os.environ, {"MCORE_ENTROPY_CHECKS": "1"} if checks else {}):
        for form, by_rank in cases:
            changes = dict(by_rank[dist.get_rank()])
            upstream = changes.pop("upstream", None)
            messages.append(_attempt(form, changes, upstream))
            dist.barrier()  # a rank that waits in a collective of the library never gets here
    return messages


def says(words: tuple[str, ...], message: str) -> bool:
    return all(re.search(re.escape(word), message, re.IGNORECASE) for word in words)


# --- metadata that all ranks share ---

ROWS = torch.ones(S, B)
TARGET = torch.arange(S * B).reshape(S, B)
EVERY = tuple(FUNCTIONS)
SHARED: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[str, ...]]] = {
    "target shape": (("both", "linear"), {"target": TARGET.t()}, ("target", "6, 2", "2, 6")),
    "target dtype": (("both", "linear"), {"target": ROWS}, ("target", "int", "float32")),
    "target out of range": (("both", "linear"), {"target": TARGET + 10}, ("target", "20")),
    "target in the padding": (("both", "linear"), {"vocab_size": 11}, ("target", "11")),
    "mask shape": (EVERY, {"mask": ROWS[0].bool()}, ("mask", "6, 2")),
    "mask dtype": (EVERY, {"mask": ROWS}, ("mask", "bool", "float32")),
    "temperature shape": (EVERY, {"temperature": ROWS[:, 0]}, ("temperature", "6, 2")),
    "temperature zero": (EVERY, {"temperature": 0.0}, ("temperature", "0")),
    "vocab_size too large": (EVERY, {"vocab_size": 21}, ("vocab_size", "20", "21")),
    "vocab_start_index alone": (
        EVERY,
        {"vocab_start_index": 0},
        ("vocab_start_index", "vocab_size"),
    ),
    "chunk_size": (("chunks", "both", "linear"), {"chunk_size": 0}, ("chunk_size", "0")),
    "metrics": (("both", "linear"), {"metrics": ("mode",)}, ("metric", "mode")),
    "tp_group": (EVERY, {"tp_group": "tp"}, ("tp_group", "tp")),
    "hidden size": (("linear",), {"weight": torch.ones(V, H + 1)}, ("weight", "4", "5")),
    "dtypes": (("linear",), {"weight": torch.ones(V, H).double()}, ("weight", "float32", "float64")),
    "full hidden under sequence parallelism": (
        ("linear",),
        {"sequence_parallel": True},
        ("sequence", "12, 2", "6, 2"),
    ),
    "hidden's shard without sequence parallelism": (
        ("linear",),
        {"hidden": torch.ones(S // 2, B, H)},
        ("target", "3, 2", "6, 2", "sequence_parallel"),
    ),
}


def test_shared_metadata_raises_on_all_ranks() -> None:
    cases, expected = [], []
    for name, (forms, changes, words) in SHARED.items():
        for form in forms:
            cases.append((form, [changes, changes]))
            expected.append((f"{form}: {name}", words))
    ranks = run_ranks(2, attempts, cases, False, timeout=LIMIT)
    wrong = [
        f"{name}, rank {rank}: {message!r} does not say {words}"
        for (name, words), *messages in zip(expected, *ranks, strict=True)
        for rank, message in enumerate(messages)
        if not says(words, message)
    ]
    assert not wrong, "\n".join(wrong)


# --- what differs between ranks ---


def _changed(x: Tensor, value: float | bool) -> Tensor:
    changed = x.clone()
    changed[3, 1] = value
    return changed


MASK = ROWS.bool()
DIFFERENT: dict[str, tuple[tuple[str, ...], list[dict[str, Any]], str]] = {
    "mask": (EVERY, [{"mask": MASK}, {"mask": _changed(MASK, False)}], "mask"),
    "mask on one rank": (EVERY, [{"mask": MASK}, {}], "mask"),
    "target": (("both", "linear"), [{"target": TARGET}, {"target": _changed(TARGET, 0)}], "target"),
    "ignored target": (("both", "linear"), [{"target": _changed(TARGET, -100)}, {}], "target"),
    "temperature number": (EVERY, [{"temperature": 1.0}, {"temperature": 0.6}], "temperature"),
    "temperature tensor": (
        EVERY,
        [{"temperature": ROWS}, {"temperature": _changed(ROWS, 0.5)}],
        "temperature",
    ),
    "temperature tensor and number": (EVERY, [{"temperature": ROWS}, {}], "temperature"),
    "gradient of log_probs": (
        ("both", "linear"),
        [{"upstream": {"log_probs": ROWS}}, {"upstream": {"log_probs": _changed(ROWS, 0)}}],
        "log_probs",
    ),
    "gradient of entropy": (
        EVERY,
        [{"upstream": {"entropy": ROWS}}, {"upstream": {"entropy": _changed(ROWS, 1.0000001)}}],
        "entropy",
    ),
    "overlap": (
        EVERY,
        [{"vocab_start_index": start, "vocab_size": 2 * V} for start in (0, V - 1)],
        "vocab_start_index",
    ),
    "gap": (
        EVERY,
        [{"vocab_start_index": start, "vocab_size": 2 * V} for start in (0, V + 1)],
        "vocab_start_index",
    ),
    "too few columns in all": (
        EVERY,
        [{"vocab_start_index": start, "vocab_size": 2 * V + 1} for start in (0, V)],
        "vocab_size",
    ),
    "vocab_size": (EVERY, [{"vocab_size": 2 * V}, {"vocab_size": 2 * V - 1}], "vocab_size"),
    "ignore_index": (("both", "linear"), [{}, {"ignore_index": -1}], "ignore_index"),
    "chunk_size": (("chunks", "both", "linear"), [{"chunk_size": 3}, {"chunk_size": 4}], "chunk_size"),
    "entropy": (("both", "linear"), [{}, {"entropy": False}], "entropy"),
    "bad metric on one rank": (("both", "linear"), [{}, {"metrics": ("mode",)}], "metrics"),
    "bad entropy on one rank": (("both", "linear"), [{"entropy": None}, {}], "entropy"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_checks_name_what_differs_on_all_ranks(name: str) -> None:
    forms, by_rank, word = DIFFERENT[name]
    ranks = run_ranks(2, attempts, [(form, by_rank) for form in forms], True, timeout=LIMIT)
    for form, *messages in zip(forms, *ranks, strict=True):
        for rank, message in enumerate(messages):
            assert says((word,), message), f"{form}, rank {rank}: {message!r} does not name {word}"


def autocast_on_rank_one() -> str:
    with (
        mock.patch.dict(os.environ, {"MCORE_ENTROPY_CHECKS": "1"}),
        torch.autocast("cpu", torch.bfloat16, enabled=dist.get_rank() == 1),
    ):
        return _attempt("linear", {})


def test_checks_name_autocast_on_one_rank() -> None:
    assert all(says(("autocast",), message) for message in run_ranks(2, autocast_on_rank_one, timeout=LIMIT))


def test_checks_let_agreement_pass() -> None:
    """No false alarm: also with NaN, which is not equal to itself, ignored targets and uneven shards."""
    upstream = {"entropy": _changed(ROWS, NAN)}
    same: list[dict[str, Any]] = [
        {},
        {"mask": _changed(MASK, False), "temperature": _changed(ROWS, NAN), "vocab_size": 2 * V - 1},
        {"temperature": 0.6, "upstream": upstream},
    ]
    cases = [(form, [changes, changes]) for form in FUNCTIONS for changes in same]
    starts = [{"vocab_start_index": start, "vocab_size": 2 * V} for start in (0, V)]
    cases += [(form, starts) for form in FUNCTIONS]
    for target in (_changed(TARGET, -100), torch.full_like(TARGET, -100)):
        cases += [(form, [{"target": target}] * 2) for form in ("both", "linear")]
    for messages in run_ranks(2, attempts, cases, True, timeout=LIMIT):
        assert messages == ["fine"] * len(cases)


def test_checks_are_off_by_default() -> None:
    """They cost a collective: a difference passes unseen, as long as it does not change shapes."""
    _, by_rank, _ = DIFFERENT["mask"]
    cases = [(form, by_rank) for form in FUNCTIONS]
    with mock.patch.dict(os.environ):
        os.environ.pop("MCORE_ENTROPY_CHECKS", None)
        for messages in run_ranks(2, attempts, cases, False, timeout=LIMIT):
            assert messages == ["fine"] * len(cases)

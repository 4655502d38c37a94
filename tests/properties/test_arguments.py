"""Drawn bad arguments, one to three in a call: a ValueError that says what was expected, and nothing else.

Every value that is drawn for an argument is bad by itself, whatever the others are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import Phase, given
from hypothesis import strategies as st
from torch import Tensor

import mcore_entropy as me
from tests.properties.profile import examples

ROWS, V, H = (3, 2), 7, 4
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
OTHERS = (torch.complex64, torch.float8_e4m3fn, torch.uint16)
HUGE = 10**400  # beyond every float, and every integer of a tensor


class Anything:
    """No number, no tensor, and nothing can be done with it."""

    def __repr__(self) -> str:
        return "Anything()"


def logits() -> Tensor:
    return torch.linspace(-1, 1, 6 * V).reshape(*ROWS, V)


def target() -> Tensor:
    return torch.arange(6).reshape(ROWS)


def objects(*but: type) -> st.SearchStrategy[Any]:
    """What is no tensor and of none of these types."""
    drawn = st.one_of(
        st.booleans(),
        st.integers(),
        st.floats(),
        st.complex_numbers(),
        st.text(max_size=3),
        st.binary(max_size=3),
        st.lists(st.integers(), max_size=2),
        st.sampled_from([None, HUGE, Anything(), Anything, torch.float32, range(3), {"a": 1}, (1.0,), {"x"}]),
    )
    return drawn.filter(lambda x: type(x) not in but)


@st.composite
def tensors(
    draw: st.DrawFn,
    right: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    fits: Callable[[tuple[int, ...]], bool] = lambda shape: False,
) -> Tensor:
    """A tensor of another shape, dtype, device or layout than the right one; more shapes may fit."""
    x = torch.ones(right, dtype=dtypes[0])
    # Floats alone, without a device to agree with, may be on "meta": shapes are inferred there.
    what = draw(
        st.sampled_from(["shape", "dtype", "sparse", "nested", *(["device"] if len(right) < 3 else [])])
    )
    if what == "shape":
        shapes = st.lists(st.integers(0, 8), max_size=4).map(tuple)
        return torch.ones(draw(shapes.filter(lambda s: s != right and not fits(s))), dtype=dtypes[0])
    if what == "dtype":
        wrong = [d for d in (*FLOATS, *INTEGERS, torch.bool, *OTHERS) if d not in dtypes]
        return x.to(draw(st.sampled_from(wrong)))
    if what == "device":
        return x.to("meta")
    return x.to_sparse() if what == "sparse" else torch.nested.nested_tensor([x, x], layout=torch.jagged)


@st.composite
def out_of_range(draw: st.DrawFn) -> Tensor:
    x = target()
    wrong = st.integers(-(2**63), -1) | st.integers(V, 2**63 - 1)
    x[draw(st.integers(0, 2)), draw(st.integers(0, 1))] = draw(wrong.filter(lambda y: y != -100))
    return x


def numbers(good: Callable[[Any], bool], *more: Any) -> st.SearchStrategy[Any]:
    """Ints, huge ones too, and floats for which `good` does not hold."""
    drawn = st.integers() | st.floats() | st.sampled_from([HUGE, -HUGE, *more])
    return drawn.filter(lambda x: not good(x))


TINY, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
no_int = objects(int, type(None))
BAD: dict[str, st.SearchStrategy[Any]] = {
    "vocab_parallel_logits": objects() | tensors((*ROWS, V), FLOATS, lambda s: bool(s) and s[-1] > 0),
    "hidden": objects() | tensors((*ROWS, H), (torch.float32,)),  # the target's shape is another, then
    "weight": objects() | tensors((V, H), (torch.float32,), lambda s: len(s) == 2 and s[1] == H),
    "bias": objects(type(None)) | tensors((V,), FLOATS),
    "target": objects() | tensors(ROWS, INTEGERS) | out_of_range(),
    "mask": objects(type(None)) | tensors(ROWS, (torch.bool,)),
    "temperature": objects(int, float)
    | tensors(ROWS, FLOATS, lambda s: s == ())
    | numbers(lambda x: TINY <= x <= LARGEST)
    | st.just(torch.ones(ROWS, requires_grad=True)),
    "vocab_size": no_int | numbers(lambda x: type(x) is int and 0 < x <= V),
    "vocab_start_index": no_int | numbers(lambda x: type(x) is int and x == 0),
    "chunk_size": no_int | numbers(lambda x: type(x) is int and x > 0),
    "tp_group": objects(type(None)),
    "execution": objects(type(None)),
    "ignore_index": objects(int) | st.sampled_from([HUGE, -HUGE, 2**63, -(2**63) - 1]),
    "entropy": objects(bool),
    "metrics": objects(tuple, list, range).filter(lambda x: not _empty(x))
    | st.lists(objects(), min_size=1, max_size=2)
    | st.just(("max_prob", "mode")),
    "transform": objects(type(None)),
    "sequence_parallel": objects(bool),
}
ENTROPY = (
    "vocab_parallel_logits",
    "mask",
    "temperature",
    "vocab_size",
    "vocab_start_index",
    "tp_group",
    "execution",
)
BOTH = (*ENTROPY, "target", "chunk_size", "ignore_index", "entropy", "metrics")
HEAD = (*BOTH[1:], "hidden", "weight", "bias", "transform", "sequence_parallel")
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "entropy": (me.vocab_parallel_entropy, ENTROPY),
    "chunks": (me.vocab_parallel_entropy_with_chunking, (*ENTROPY, "chunk_size")),
    "both": (me.vocab_parallel_log_probs_and_entropy, BOTH),
    "linear": (me.linear_log_probs_and_entropy, HEAD),
}


def _empty(x: object) -> bool:
    return isinstance(x, (list, tuple)) and not x


def right(form: str) -> dict[str, Any]:
    if form == "linear":
        return {"hidden": torch.ones(*ROWS, H), "weight": torch.ones(V, H), "target": target()}
    return {"vocab_parallel_logits": logits()} | ({"target": target()} if form == "both" else {})


@st.composite
def mistakes(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    form = draw(st.sampled_from(list(FUNCTIONS)))
    names = draw(st.lists(st.sampled_from(FUNCTIONS[form][1]), min_size=1, max_size=3, unique=True))
    return form, {name: draw(BAD[name]) for name in names}


@examples(300, Phase.shrink)
@given(mistakes())
def test_bad_arguments_are_value_errors(mistake: tuple[str, dict[str, Any]]) -> None:
    form, changes = mistake
    function, _ = FUNCTIONS[form]
    with pytest.raises(ValueError, match="expected"):
        function(**(right(form) | changes))


@pytest.mark.parametrize("form", FUNCTIONS)
def test_without_the_mistake_the_call_works(form: str) -> None:
    """Or every call above might fail for another reason."""
    FUNCTIONS[form][0](**right(form))


@examples(100, Phase.shrink)
@given(st.data())
def test_bad_settings_are_value_errors(data: st.DataObject) -> None:
    record, bad = data.draw(
        st.sampled_from(
            [
                (me.Execution, {"workspace_mib": no_int | numbers(lambda x: type(x) is int and x > 0)}),
                (me.Execution, {"logits_budget_mib": objects(int) | st.integers(max_value=-1)}),
                (me.Execution, {"compact_rows": objects(bool)}),
                (me.Execution, {"backend": objects(str)}),
                (me.LogitTransform, {"scale": objects(int, float) | numbers(lambda x: 0 < x <= LARGEST)}),
                (
                    me.LogitTransform,
                    {"softcap": objects(int, float, type(None)) | numbers(lambda x: 0 < x <= LARGEST)},
                ),
            ]
        )
    )
    changes = {name: data.draw(values) for name, values in bad.items()}
    hypothesis.note(f"{changes}")
    with pytest.raises(ValueError, match="expected"):
        record(**changes)

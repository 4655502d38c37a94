"""The head's backward in its two orders: chunk by chunk of tokens, and slice by slice of columns.

Legend: N tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

import weakref

import pytest
import torch

import mcore_entropy as me
from mcore_entropy.functional import head_gradients
from mcore_entropy.functional.head_gradients import HeadGradients, Pass
from mcore_entropy.functional.linear_passes import default_chunk_size
from tests.unit.cases import check_linear, dtype_name, make_linear, make_target

half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Of each backward, the rows of each chunk of each pass."""
    seen: list[list[int]] = []
    run = HeadGradients._run

    def watch(self: HeadGradients, of: Pass) -> object:
        seen.append([rows.count for rows in of.chunks])
        return run(self, of)

    monkeypatch.setattr(HeadGradients, "_run", watch)
    return seen


@half
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("workspace", [None, 1])
def test_fewer_tokens_than_columns_go_by_columns(
    dtype: torch.dtype, masked: bool, workspace: int | None, passes: list[list[int]]
) -> None:
    hidden, weight, bias = make_linear(dtype, rows=100, columns=2000)
    mask = torch.arange(100) % 4 != 0 if masked else None
    execution = me.Execution(workspace_mib=workspace)
    check_linear(
        hidden, weight, make_target((100,), 2000), bias=bias, mask=mask, chunk_size=40, execution=execution
    )
    assert passes == [[30, 30, 15] if masked else [40, 40, 20]]


@half
@pytest.mark.parametrize("masked", [False, True])
def test_more_tokens_than_columns_go_by_tokens(
    dtype: torch.dtype, masked: bool, passes: list[list[int]]
) -> None:
    hidden, weight, bias = make_linear(dtype, rows=300, columns=77)
    mask = torch.arange(300) % 4 != 0 if masked else None
    check_linear(hidden, weight, make_target((300,), 77), bias=bias, mask=mask, chunk_size=120)
    assert passes == ([[90], [90], [45]] if masked else [[120], [120], [60]])


def test_an_fp32_weight_is_its_own_sum(passes: list[list[int]]) -> None:
    hidden, weight, _ = make_linear(torch.float32, rows=100, columns=2000)
    check_linear(hidden, weight, make_target((100,), 2000), chunk_size=40)
    assert passes == [[40], [40], [20]]


def test_a_chunk_of_more_rows_than_a_tile_holds(passes: list[list[int]]) -> None:
    hidden, weight, bias = make_linear(torch.float32, rows=5000, columns=77)
    check_linear(hidden, weight, make_target((5000,), 77), bias=bias, chunk_size=5000)
    assert passes == [[5000]]


def test_a_first_pass_prepared_for_all_rows_is_dropped_when_some_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the second chunk only: the first is used as it was prepared."""
    made: list[int] = []

    class Counted(Pass):
        def __init__(self, *arguments: object) -> None:
            made.append(1)
            super().__init__(*arguments)

    monkeypatch.setattr(head_gradients, "Pass", Counted)
    hidden, weight, _ = make_linear(torch.float32, rows=80)
    for left_out, passes_made in ((50, 2), (10, 3)):
        made.clear()
        mask = torch.arange(80) != left_out
        check_linear(hidden, weight, make_target((80,), 517), mask=mask, chunk_size=40)
        assert len(made) == passes_made


def test_a_pass_is_freed_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Pass]] = []

    class Watched(Pass):
        def __init__(self, *arguments: object) -> None:
            assert all(other() is None for other in alive)
            alive.append(weakref.ref(self))
            super().__init__(*arguments)

    monkeypatch.setattr(head_gradients, "Pass", Watched)
    hidden, weight, _ = make_linear(torch.float32, rows=80)
    check_linear(hidden, weight, make_target((80,), 517), chunk_size=20)
    assert len(alive) == 4


def test_default_chunks() -> None:
    assert default_chunk_size(torch.device("cpu")) == 2048
    assert default_chunk_size(torch.device("cuda")) == 8192

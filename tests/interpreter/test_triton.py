"""What only the Triton backend does, in Triton's interpreter: `make interpreter` sets TRITON_INTERPRET=1.

The interpreter rounds to bf16 by cutting bits off: fp16 stands for half precision here, and the accuracy of
bf16 is judged on the GPU (tests/gpu). Legend: N tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_entropy as me
from tests.comparison import assert_same_bits
from tests.unit.cases import check_linear, check_logits, make_linear, make_logits, make_target, make_upstream

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "needs TRITON_INTERPRET=1 from the start, as make interpreter has it", allow_module_level=True
    )
pytest.importorskip("triton", reason="needs triton: pip install 'mcore-entropy[triton]'")

from mcore_entropy import backends
from mcore_entropy.backends.triton import head_statistics, machine, operands
from mcore_entropy.backends.triton.slices import column_slices
from tests.interpreter.products import products_in_order

ROWS, COLUMNS, WIDTH = 70, 300, 40
TRITON = me.Execution(backend="triton")


def inputs(dtype: torch.dtype = torch.float16, width: int = WIDTH) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, bias = make_linear(dtype, rows=ROWS, columns=COLUMNS, width=width)
    return hidden, weight, bias, make_target((ROWS,), COLUMNS)


def gradients(hidden: Tensor, weight: Tensor, target: Tensor, **keywords: Any) -> list[Tensor]:
    leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
    result = me.linear_log_probs_and_entropy(*leaves, target, **keywords)
    values = [result.log_probs, result.entropy]
    return [
        *(v.detach() for v in values),
        *torch.autograd.grad(values, leaves, make_upstream((ROWS,), hidden.dtype)),
    ]


@pytest.fixture(params=["descriptors", "pointers"])
def _way_to_load(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pointers":
        older = dataclasses.replace(machine.machine(torch.device("cpu")), tma=False)
        for module in (operands, head_statistics):
            monkeypatch.setattr(module, "machine", lambda _: older)


@pytest.fixture
def _products_in_order() -> Iterator[None]:
    with products_in_order():
        yield


def test_it_is_chosen() -> None:
    assert backends.select(me.Execution(), torch.device("cpu"), torch.float16).name == "triton"
    assert backends.select(me.Execution(), torch.device("cpu"), torch.float64).name == "torch"


@pytest.mark.usefixtures("_way_to_load")
@pytest.mark.parametrize("width", [1, 31, 32, 40, 100])
@pytest.mark.parametrize("budget", [0, 1])
def test_head(width: int, budget: int) -> None:
    """H below, at and above one step; aligned for descriptors (a multiple of 8) or not."""
    hidden, weight, bias, target = inputs(width=width)
    execution = me.Execution(backend="triton", logits_budget_mib=budget)
    check_linear(
        hidden, weight, target, bias=bias, softcap=5.0, temperature=0.7, mask=torch.arange(ROWS) % 3 != 0,
        chunk_size=32, execution=execution, metrics=("sum_pi_squared", "varentropy", "max_prob"),
    )  # fmt: skip


@pytest.mark.parametrize("budget_tiles", [1, 2, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_kept_logits(budget_tiles: int, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tiles as the budget holds are kept, and the others computed again; some, or all (5 tiles)."""
    hidden, weight, bias, target = inputs()
    mask = torch.arange(ROWS) % 3 != 0 if masked else None
    kept_columns = []
    kept_logits = head_statistics.kept_logits

    def limited(tokens: int, columns: int, hidden: Tensor, budget: int) -> Any:
        width = machine.statistics_tile(machine.machine(hidden.device)).columns
        kept = kept_logits(tokens, columns, hidden, budget_tiles * tokens * (2 * width + 4))
        kept_columns.append(kept.columns)
        return kept

    monkeypatch.setattr(head_statistics, "kept_logits", limited)
    execution = me.Execution(backend="triton", logits_budget_mib=1)
    check_linear(
        hidden,
        weight,
        target,
        bias=bias,
        softcap=5.0,
        temperature=0.7,
        mask=mask,
        chunk_size=32,
        execution=execution,
    )
    assert kept_columns == [min(budget_tiles * 64, COLUMNS)]


@pytest.mark.parametrize("budget", [0, 1])
def test_dead_rows_whose_logits_are_nan(budget: int) -> None:
    """Without compaction they are computed; their gradient is 0, and reaches nobody else."""
    hidden, weight, bias, target = inputs()
    mask = torch.arange(ROWS) % 3 != 0
    hidden[0], hidden[3] = torch.nan, torch.inf
    temperature = torch.where(torch.arange(ROWS) == 6, 0.0, 0.7)
    execution = me.Execution(backend="triton", logits_budget_mib=budget, compact_rows=False)
    _, found = check_linear(
        hidden, weight, target, bias=bias, mask=mask, temperature=temperature, execution=execution
    )
    assert not found["hidden"][~mask].any()


@pytest.mark.parametrize("budget", [0, 1])
def test_a_tile_that_is_minus_infinity(budget: int) -> None:
    """Beside logits that are far below 0 themselves."""
    hidden, weight, bias, target = inputs()
    bias = torch.full_like(bias, -20.0)
    bias[:64] = -torch.inf
    execution = me.Execution(backend="triton", logits_budget_mib=budget)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    result = me.linear_log_probs_and_entropy(
        *leaves, target.clamp(min=64), bias=bias, temperature=1e-3, execution=execution
    )
    (result.log_probs.sum() + result.entropy.sum()).backward()
    assert all(bool(x.grad.isfinite().all()) for x in leaves)
    assert not leaves[1].grad[:64].any()


def test_given_logits_keep_none() -> None:
    with pytest.raises(ValueError, match="expected 0 for logits that exist already"):
        me.vocab_parallel_entropy(torch.zeros(2, 5).half(), execution=me.Execution(logits_budget_mib=1))


def test_one_column() -> None:
    """The target's logit is summed in another order than the tile's: 8 ulp of z, and never above 0."""
    hidden, weight, _ = make_linear(torch.float16, columns=1)
    result = me.linear_log_probs_and_entropy(hidden, weight, torch.zeros(24, dtype=torch.long))
    z = (hidden.double() @ weight.double().t()).abs().max()
    assert not result.entropy.any()
    assert bool((result.log_probs <= 0).all())
    assert bool((result.log_probs.abs() <= 8 * 2**-23 * z).all())


def test_nothing_is_kept_without_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _, target = inputs()
    monkeypatch.setattr(head_statistics, "kept_logits", lambda *_: pytest.fail("logits were kept"))
    with torch.no_grad():
        me.linear_log_probs_and_entropy(
            hidden.requires_grad_(), weight, target, execution=me.Execution(logits_budget_mib=100)
        )


def test_fp32_keeps_no_logits() -> None:
    hidden, weight, _, target = inputs(torch.float32)
    with pytest.raises(ValueError, match="logits_budget_mib: expected 0 for fp32"):
        me.linear_log_probs_and_entropy(hidden, weight, target, execution=me.Execution(logits_budget_mib=1))


@pytest.mark.parametrize("depth", [1, 97, 10**6])
def test_programs_of_any_length(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile a program, a few, all: every tile is computed once, with the same bits."""
    hidden, weight, _, target = inputs()
    expected = gradients(hidden, weight, target, execution=TRITON)
    monkeypatch.setattr(operands, "_PROGRAM_DEPTH", depth)
    for ours, other in zip(gradients(hidden, weight, target, execution=TRITON), expected, strict=True):
        assert_same_bits(ours, other)


@pytest.mark.usefixtures("_way_to_load", "_products_in_order")
def test_same_bits_under_any_split() -> None:
    hidden, weight, _, target = inputs()

    def values(rows: Tensor | slice, **keywords: Any) -> list[Tensor]:
        result = me.linear_log_probs_and_entropy(
            hidden[rows], weight, target[rows], execution=TRITON, **keywords
        )
        return [result.log_probs, result.entropy]

    whole = values(slice(None))
    mask = torch.arange(ROWS) % 3 != 0
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    for index, name in enumerate(("log_probs", "entropy")):
        assert_same_bits(values(slice(None), chunk_size=7)[index], whole[index], f"{name} in chunks")
        assert_same_bits(values(slice(3, 20))[index], whole[index][3:20], f"{name} of some rows")
        assert_same_bits(values(order)[index], whole[index][order], f"{name} in another order")
        masked = values(slice(None), mask=mask)[index]
        assert_same_bits(masked[mask], whole[index][mask], f"{name} with a mask")


@pytest.mark.parametrize("columns", [1, 5, 4095, 4096, 4097, 9000])
def test_rows_wider_than_a_block(columns: int) -> None:
    x = make_logits(columns, torch.float32, rows=4)
    check_logits(
        "log-probs and entropy", x, make_target((4,), columns), execution=TRITON,
        metrics=("sum_pi_squared", "varentropy", "max_prob"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "hidden_size", "columns"),
    [(8192, 4096, 131072), (32768, 2048, 151936), (1, 7, 5), (2048, 4096, 65536), (131072, 4096, 152064)],
)
def test_slices_cover_the_columns_within_the_workspace(rows: int, hidden_size: int, columns: int) -> None:
    device = machine.Machine(multiprocessors=132, tma=True, large_tiles=True)
    at_most = 256 * 2**20 // 2 // rows
    slices = column_slices(0, columns, at_most, rows, hidden_size, device)
    assert slices[0].start == 0 and slices[-1].stop == columns
    assert all(a.stop == b.start and a.stop % 256 == 0 for a, b in itertools.pairwise(slices))
    assert max(s.stop - s.start for s in slices) <= max(at_most, 256)

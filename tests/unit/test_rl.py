"""mcore_entropy.rl on one rank; tests/distributed/test_rl.py has several.

Legend: T tokens of a row, b sequences of s tokens.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_entropy.rl import (
    context_parallel_shard,
    context_parallel_unshard,
    cu_seqlens_of_shard,
    entropy_statistics,
    next_token_targets,
    next_token_targets_of_shard,
    packed_sequence_mean,
    sequence_mean,
    token_count,
    token_mean,
)
from tests.unit.cases import DTYPES, NAN, dtype_name
from tests.unit.rl_cases import (
    assert_mean,
    make_values,
    sequence_mean_truth,
    targets_truth,
    token_mean_truth,
)

LAYOUTS = ("zigzag", "contiguous")
# Bounds of packed sequences of 48 tokens; "cut": lengths that are multiples of 8, for four ranks' zigzag.
BOUNDS = {
    "one": [0, 48],
    "several": [0, 5, 6, 30, 48],
    "with empty ones": [0, 0, 0, 7, 7, 48, 48],
    "cut": [0, 8, 32, 48],
    "cut, with empty ones": [0, 0, 16, 16, 16, 40, 48, 48],
}


def gradient_of(mean: Tensor, values: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(mean, values)
    return gradient


# --- means ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("share", [0.6, 1.0, 0.0])
def test_token_mean(dtype: torch.dtype, share: float) -> None:
    values, mask = make_values((4, 6, 2), dtype, share)
    values = values.transpose(0, 1).requires_grad_()
    mask = mask.transpose(0, 1)
    mean = token_mean(values, mask)
    assert_mean(mean, gradient_of(mean, values), token_mean_truth(values, mask), values.detach(), mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("share", [0.6, 0.0])
def test_sequence_mean(dtype: torch.dtype, share: float) -> None:
    values, mask = make_values((5, 7), dtype, share)
    values[3], mask[3] = NAN, False
    bounds = list(range(0, 36, 7))
    truth = sequence_mean_truth(values.flatten(), mask.flatten(), bounds)
    values.requires_grad_()
    mean = sequence_mean(values, mask)
    gradient = gradient_of(mean, values).flatten()
    assert_mean(mean, gradient, truth, values.detach().flatten(), mask.flatten())


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=dtype_name)
def test_packed_sequence_mean(dtype: torch.dtype, bounds: list[int], index_dtype: torch.dtype) -> None:
    values, mask = make_values((48,), dtype)
    mask[:6] = False
    truth = sequence_mean_truth(values, mask, bounds)
    values.requires_grad_()
    cu_seqlens = torch.tensor(bounds, dtype=index_dtype)
    for shape in ((48,), (1, 48)):
        mean = packed_sequence_mean(values.view(shape), mask.view(shape), cu_seqlens)
        assert_mean(mean, gradient_of(mean, values), truth, values.detach(), mask)


def test_by_hand() -> None:
    values = torch.tensor([[1.0, 1.0, 1.0, 1.0], [5.0, NAN, NAN, NAN], [NAN, NAN, NAN, NAN]])
    mask = ~values.isnan()
    assert float(token_mean(values, mask)) == pytest.approx(9 / 5)
    assert float(sequence_mean(values, mask)) == 3.0
    packed = packed_sequence_mean(values.flatten(), mask.flatten(), torch.tensor([0, 4, 8, 12]))
    assert float(packed) == 3.0


def test_infinity_and_nan_among_the_true_tokens() -> None:
    values = torch.tensor([1.0, float("inf"), NAN])
    for needs_gradient in (False, True):
        values.requires_grad_(needs_gradient)
        assert float(token_mean(values, torch.tensor([True, True, False])).detach()) == float("inf")
        assert bool(token_mean(values, torch.tensor([True, False, True])).isnan())


def test_micro_batches_add_up_to_the_mean_of_all() -> None:
    values, mask = make_values((6, 8), torch.float64)
    mask[0], mask[1, 2:] = False, False
    values = values.nan_to_num(0.0, 0.0, 0.0).requires_grad_()
    tokens = token_count(mask)
    assert tokens.dtype == torch.int64 and int(tokens) == int(mask.sum())
    rows = [slice(0, 1), slice(1, 2), slice(2, 6)]
    flat = (values.detach().flatten(), mask.flatten())
    cases: list[tuple[Any, Any, tuple[Tensor, Tensor]]] = [
        (token_mean, tokens, token_mean_truth(*flat)),
        (token_mean, int(tokens), token_mean_truth(*flat)),
        (sequence_mean, 5, sequence_mean_truth(*flat, list(range(0, 49, 8)))),
    ]
    for function, count, truth in cases:
        parts = [function(values[part], mask[part], count=count) for part in rows]
        mean = torch.stack(parts).sum()
        assert_mean(mean, gradient_of(mean, values).flatten(), truth, *flat, name=function.__name__)


def test_a_count_of_nothing_is_seen() -> None:
    """It would have been taken for 1, and the sum of all tokens for their mean."""
    values, mask = make_values((4, 6), torch.float64, 1.0)
    for count in (0, torch.tensor(0)):
        assert not token_mean(values, mask, count=count).isfinite()
        nothing = token_mean(values.clone().requires_grad_(), torch.zeros_like(mask), count=count)
        assert float(nothing.detach()) == 0.0


def test_ranks_averaged_scales_the_gradient_alone() -> None:
    values, mask = make_values((4, 6), torch.float64)
    values.requires_grad_()
    cu_seqlens = torch.tensor([0, 4, 24])
    for function in (
        token_mean,
        sequence_mean,
        lambda v, m, **keywords: packed_sequence_mean(v.view(-1), m.view(-1), cu_seqlens, **keywords),
    ):
        one, eight = function(values, mask), function(values, mask, ranks_averaged=8)
        assert torch.equal(one.detach(), eight.detach())
        assert torch.equal(8 * gradient_of(one, values), gradient_of(eight, values))


def test_second_derivatives_and_inputs() -> None:
    values, mask = make_values((3, 4), torch.float64)
    before = values.clone()
    values.requires_grad_()
    kept = mask.double()
    torch.autograd.gradgradcheck(
        lambda v: token_mean(torch.where(mask, v, 0.0).square(), mask) * kept.sum(),
        torch.randn(3, 4, dtype=torch.float64, requires_grad=True),
    )
    token_mean(values, mask, ranks_averaged=2).backward()
    torch.testing.assert_close(values.detach(), before, rtol=0, atol=0, equal_nan=True)


def test_a_compiled_mean_is_eager_s() -> None:
    values, mask = make_values((4, 6), torch.float32)
    values.requires_grad_()
    found = []
    for function in (token_mean, torch.compile(token_mean, fullgraph=True, backend="aot_eager")):
        mean = function(values, mask, ranks_averaged=2)
        found.append((mean.detach(), gradient_of(mean, values)))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


# --- statistics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_entropy_statistics(dtype: torch.dtype) -> None:
    entropy, mask = make_values((4, 6), dtype)
    entropy.requires_grad_()
    kept = entropy.detach()[mask].double().tolist()
    for threshold in (1.0, torch.tensor(1.0), kept[0], 1e9):
        found = entropy_statistics(entropy, mask, threshold=threshold)
        high = sum(value > float(threshold) for value in kept) / len(kept)
        close = dict(rtol=0.0, atol=8 * torch.finfo(found.mean.dtype).eps * max(map(abs, kept)))
        torch.testing.assert_close(float(found.mean), sum(kept) / len(kept), **close)
        torch.testing.assert_close(float(found.share_above), high, **close)
        assert int(found.tokens) == len(kept)
        assert not (found.mean.requires_grad or found.share_above.requires_grad)
    nothing = entropy_statistics(entropy, torch.zeros_like(mask), threshold=0.5)
    assert [float(nothing.mean), float(nothing.share_above), float(nothing.tokens)] == [0.0, 0.0, 0.0]


def test_a_negative_threshold_counts_no_masked_token() -> None:
    found = entropy_statistics(torch.ones(4), torch.arange(4) < 1, threshold=-1.0)
    assert float(found.share_above) == 1.0


# --- targets --------------------------------------------------------------------------------------


def distinct(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Tokens that are all different: one out of place is seen."""
    size = torch.Size(shape).numel()
    return (torch.arange(size).view(shape) + 1).to(dtype)


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=dtype_name)
@pytest.mark.parametrize("shape", [(48,), (1, 48)])
def test_packed_targets(bounds: list[int], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tokens = distinct(*shape, dtype=dtype)
    padding = torch.arange(48).remainder(11).ge(2).view(shape)
    for mask in (None, padding):
        found = next_token_targets(tokens, mask=mask, cu_seqlens=torch.tensor(bounds))
        torch.testing.assert_close(found, targets_truth(tokens, bounds, mask), rtol=0, atol=0)


def test_padded_targets() -> None:
    tokens = distinct(4, 6)
    assert next_token_targets(tokens)[0].tolist() == [2, 3, 4, 5, 6, -100]
    # Padding on the right, on the left, on both sides; a row of nothing else.
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0], [0] * 6]).bool()
    found = next_token_targets(tokens, mask=mask, ignore_index=-1)
    assert found.tolist() == [
        [2, 3, 4, -1, -1, -1],
        [-1, -1, 10, 11, 12, -1],
        [-1, 15, 16, 17, -1, -1],
        [-1] * 6,
    ]
    assert torch.equal(tokens, distinct(4, 6))
    lengths = torch.tensor([4, 6, 0, 1])
    by_length = next_token_targets(tokens, mask=torch.arange(6) < lengths[:, None])
    assert (by_length != -100).sum(1).tolist() == [3, 5, 0, 0]


def test_what_belongs_to_the_tokens_moves_with_them() -> None:
    response = torch.tensor([[0, 0, 1, 1, 0], [0, 1, 1, 1, 1]]).bool()
    moved = next_token_targets(response, ignore_index=False)
    assert moved.tolist() == [[False, True, True, False, False], [True, True, True, True, False]]
    advantages = torch.tensor([[0.0, 2.5, 2.5]])
    assert next_token_targets(advantages, ignore_index=0).tolist() == [[2.5, 2.5, 0.0]]


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (1,), (2, 1)])
def test_targets_of_next_to_nothing(shape: tuple[int, ...]) -> None:
    found = next_token_targets(torch.zeros(shape, dtype=torch.int64))
    assert found.shape == shape
    assert bool((found[..., -1:] == -100).all())


# --- shards ---------------------------------------------------------------------------------------


def test_the_two_layouts() -> None:
    tokens = torch.arange(16)
    cu_seqlens = torch.tensor([0, 4, 4, 16])

    def shards(layout: Any, bounds: Tensor | None) -> list[list[int]]:
        return [
            context_parallel_shard(tokens, layout, rank, 2, cu_seqlens=bounds).tolist() for rank in (0, 1)
        ]

    assert shards("zigzag", None) == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
    assert shards("zigzag", cu_seqlens) == [[0, 3, 4, 5, 6, 13, 14, 15], [1, 2, 7, 8, 9, 10, 11, 12]]
    assert shards("contiguous", cu_seqlens) == [list(range(8)), list(range(8, 16))]
    ends = [cu_seqlens_of_shard(cu_seqlens, layout, 1, 2).tolist() for layout in LAYOUTS]  # type: ignore[arg-type]
    assert ends == [[0, 2, 2, 8], [0, 0, 0, 8]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("bounds", [None, *(b for name, b in BOUNDS.items() if name.startswith("cut"))])
def test_shards_of_all_ranks_are_the_whole(layout: Any, size: int, bounds: list[int] | None) -> None:
    whole = distinct(2, 48, 3).double().requires_grad_()
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    shards = [context_parallel_shard(whole, layout, r, size, 1, cu_seqlens=cu_seqlens) for r in range(size)]
    assert all(shard.shape == (2, 48 // size, 3) for shard in shards)
    assert torch.equal(context_parallel_unshard(shards, layout, 1, cu_seqlens=cu_seqlens), whole)
    (gradient,) = torch.autograd.grad(shards[-1].sum(), whole)
    assert float(gradient.sum()) == shards[-1].numel() and float(gradient.max()) == 1
    if bounds is not None:
        # Each sequence's part of a shard holds tokens of that sequence.
        for rank, shard in enumerate(shards):
            own = cu_seqlens_of_shard(torch.tensor(bounds), layout, rank, size).tolist()
            for i, (first, last) in enumerate(pairwise(own)):
                part = shard[0, first:last, 0]
                assert set(part.tolist()) <= set(whole[0, bounds[i] : bounds[i + 1], 0].tolist())
            assert own[0] == 0 and own[-1] == 48 // size


# --- errors ---------------------------------------------------------------------------------------

X, M = torch.ones(4, 6), torch.ones(4, 6, dtype=torch.bool)
ERRORS: dict[str, tuple[Any, str]] = {
    "float mask": (lambda: token_mean(X, X), r"mask: expected dtype bool.*mask\.bool\(\)"),
    "mask of another shape": (lambda: token_mean(X, M[:1]), r"mask: expected the shape of values, \(4, 6\)"),
    "integer values": (lambda: token_mean(M.long(), M), "values: expected dtype"),
    "groups": (lambda: token_mean(X, M, groups=None), "groups: expected a tuple"),  # type: ignore[arg-type]
    "no group": (lambda: token_mean(X, M, groups=(None,)), "groups: expected a .*ProcessGroup.*got None"),
    "ranks averaged": (lambda: token_mean(X, M, ranks_averaged=0), "ranks_averaged: expected a positive int"),
    "count of a mask": (lambda: token_mean(X, M, count=M.sum(1)), "count: expected one number"),
    "count of a bool": (lambda: token_mean(X, M, count=M[0, 0]), "count: expected one number, got .*bool"),
    "negative tensor of a count": (
        lambda: token_mean(X, M, count=torch.tensor(-3)),
        "count: expected a number of tokens or sequences, got -3",
    ),
    "negative count": (lambda: sequence_mean(X, M, count=-1), "count: expected a number"),
    "count's mask": (lambda: token_count(X), "mask: expected dtype bool"),
    "packed as padded": (
        lambda: sequence_mean(X[0], M[0]),
        r"values: expected \[b, s\].*packed_sequence_mean",
    ),
    "padded as packed": (
        lambda: packed_sequence_mean(X, M, torch.tensor([0, 24])),
        r"values: expected \[T\] or \[1, T\].*sequence_mean",
    ),
    "cp group": (lambda: sequence_mean(X, M, cp_group=1), "cp_group: expected"),  # type: ignore[arg-type]
    "bounds that end early": (
        lambda: packed_sequence_mean(X[0], M[0], torch.tensor([0, 5])),
        r"cu_seqlens: expected bounds that rise from 0 to 6.*got \[0, 5\]; padding",
    ),
    "falling bounds": (
        lambda: next_token_targets(X[0], cu_seqlens=torch.tensor([0, 4, 2, 6])),
        "cu_seqlens: expected bounds that rise",
    ),
    "bounds with a batch": (
        lambda: next_token_targets(X[0], cu_seqlens=torch.tensor([[0, 6]])),
        r"cu_seqlens: expected shape \[sequences \+ 1\].*cu_seqlens\[0\]",
    ),
    "float bounds": (
        lambda: next_token_targets(X[0], cu_seqlens=torch.tensor([0.0, 6.0])),
        "cu_seqlens: expected dtype",
    ),
    "entropy's mask": (lambda: entropy_statistics(X, X, threshold=1.0), "mask: expected dtype bool"),
    "entropy is None": (
        lambda: entropy_statistics(None, M, threshold=1.0),  # type: ignore[arg-type]
        "entropy: expected a tensor, got NoneType",
    ),
    "thresholds": (
        lambda: entropy_statistics(X, M, threshold=X),
        r"threshold: expected one number of nats, got shape \(4, 6\)",
    ),
    "threshold is NaN": (lambda: entropy_statistics(X, M, threshold=NAN), "threshold: expected a number"),
    "threshold is bool": (lambda: entropy_statistics(X, M, threshold=True), "threshold: expected a number"),
    "threshold is None": (
        lambda: entropy_statistics(X, M, threshold=None),  # type: ignore[arg-type]
        "threshold: expected a number",
    ),
    "tokens that hold no -100": (
        lambda: next_token_targets(X.to(torch.uint8)),
        r"ignore_index: expected a number that tokens of torch.uint8 can hold, got -100; tokens.long\(\)",
    ),
    "ignore_index between integers": (
        lambda: next_token_targets(X.long(), ignore_index=2.5),
        "ignore_index: expected a number that tokens of torch.int64 can hold, got 2.5",
    ),
    "ignore_index is NaN among integers": (
        lambda: next_token_targets(X.long(), ignore_index=NAN),
        "ignore_index: expected a number that tokens of torch.int64 can hold, got nan",
    ),
    "ignore_index is None": (
        lambda: next_token_targets(X, ignore_index=None),  # type: ignore[arg-type]
        "ignore_index: expected a number, got None",
    ),
    "mask of targets": (lambda: next_token_targets(X, mask=M[0]), "mask: expected the shape of tokens"),
    "ignore_index of a mask": (lambda: next_token_targets(M), "ignore_index: expected False or True"),
    "a scalar": (lambda: next_token_targets(X.sum()), r"tokens: expected a tensor \[\*, T\]"),
    "no cp group": (
        lambda: next_token_targets_of_shard(X, layout="zigzag", cp_group=None),  # type: ignore[arg-type]
        "cp_group: expected",
    ),
    "no such layout": (
        lambda: context_parallel_shard(X, "ring", 0, 2),  # type: ignore[arg-type]
        "layout: expected 'zigzag' or 'contiguous', got 'ring'",
    ),
    "no such layout's bounds": (
        lambda: cu_seqlens_of_shard(torch.tensor([0, 4]), "ring", 0, 2),  # type: ignore[arg-type]
        "layout: expected",
    ),
    "a shard's bounds that do not divide": (
        lambda: cu_seqlens_of_shard(torch.tensor([0, 5, 12]), "zigzag", 0, 2),
        "cu_seqlens: expected lengths that are multiples of 4, got 5",
    ),
    "a row's bounds that do not divide": (
        lambda: cu_seqlens_of_shard(torch.tensor([0, 4, 9]), "contiguous", 0, 2),
        "cu_seqlens: expected a row of a multiple of 2 tokens .* got 9; pad it",
    ),
    "a shard's falling bounds": (
        lambda: cu_seqlens_of_shard(torch.tensor([0, 8, 4, 16]), "contiguous", 0, 2),
        "cu_seqlens: expected bounds that rise from 0 to the number of tokens, got",
    ),
    "a shard of no rank": (
        lambda: cu_seqlens_of_shard(torch.tensor([0, 8]), "contiguous", -1, 2),
        "rank: expected one of 2 ranks, from 0, got -1",
    ),
    "a shard of no size": (
        lambda: cu_seqlens_of_shard(torch.tensor([0, 8]), "zigzag", 0, -2),
        "size: expected a positive int",
    ),
    "a rank that is bool": (lambda: context_parallel_shard(X, "contiguous", True, 2), "rank: expected one"),
    "no such dim": (lambda: context_parallel_shard(X, "contiguous", 0, 2, 2), "tensor: expected one with T"),
    "no such rank": (lambda: context_parallel_shard(X, "contiguous", 2, 2), "rank: expected one of 2"),
    "size": (lambda: context_parallel_shard(X, "contiguous", 0, 0), "size: expected a positive int"),
    "a row that does not divide": (
        lambda: context_parallel_shard(X, "zigzag", 0, 2),
        "tokens: expected a row of a multiple of 4 .* got 6; pad it",
    ),
    "a sequence that does not divide": (
        lambda: context_parallel_shard(
            X[:, :4].flatten(), "zigzag", 0, 2, cu_seqlens=torch.tensor([0, 6, 16])
        ),
        "cu_seqlens: expected lengths that are multiples of 4, got 6.*cu_seqlens_padded",
    ),
    "uneven shards": (
        lambda: context_parallel_unshard([X, X[:, :3]], "contiguous"),
        "shards: expected one shape",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    call, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        call()

"""mcore_entropy.rl on 2 and 4 ranks against truths of one process's whole data.

Legend: R context-parallel ranks, D data-parallel ranks, T tokens of a row, n packed sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mcore_entropy.rl import (
    EntropyStatistics,
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
from tests.comparison import assert_same_bits
from tests.distributed.test_collectives import Collective, watching
from tests.ranks import run_ranks
from tests.unit.cases import DTYPES, NAN, dtype_name
from tests.unit.rl_cases import (
    assert_mean,
    make_values,
    sequence_mean_truth,
    targets_truth,
    token_mean_truth,
)

LAYOUTS = ("zigzag", "contiguous")
AVERAGED = 8  # any number: the gradient is compared with that many times the truth's


def differentiated(function: Callable[..., Tensor], values: Tensor, *args: Any, **keywords: Any) -> Any:
    """A mean and the gradient of this rank's values."""
    values = values.clone().requires_grad_()
    mean = function(values, *args, **keywords)
    mean.backward()
    return mean.detach(), values.grad


def check(
    answers: list[tuple[Tensor, Tensor]],
    whole_gradient: Tensor,
    truth: tuple[Tensor, Tensor],
    values: Tensor,
    mask: Tensor,
) -> None:
    for rank, (mean, _) in enumerate(answers[1:], 1):
        assert_same_bits(mean, answers[0][0], f"mean on ranks 0 and {rank}")
    scaled = (truth[0], AVERAGED * truth[1])
    assert_mean(answers[0][0], whole_gradient, scaled, values, mask)


# --- data parallel --------------------------------------------------------------------------------

# Tokens of each rank's share of 48, and the ranks that have no True token.
SPLITS: dict[str, tuple[tuple[int, int], tuple[int, ...]]] = {
    "even": ((24, 24), ()),
    "uneven": ((41, 7), ()),
    "one has no tokens": ((0, 48), ()),
    "one has no True token": ((20, 28), (1,)),
    "none has a True token": ((20, 28), (0, 1)),
}


def make_split(split: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values, mask = make_values((48,), dtype)
    for part, silent in zip(mask.split(SPLITS[split][0]), (0, 1), strict=True):
        if silent in SPLITS[split][1]:
            part.fill_(False)
    return torch.where(mask, values, NAN), mask


def token_means(split: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values, mask = (x.split(SPLITS[split][0])[dist.get_rank()] for x in make_split(split, dtype))
    world = dist.group.WORLD
    return differentiated(token_mean, values, mask, groups=(world,), ranks_averaged=AVERAGED)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_token_mean(split: str, dtype: torch.dtype) -> None:
    answers = run_ranks(2, token_means, split, dtype)
    values, mask = make_split(split, dtype)
    gradient = torch.cat([gradient for _, gradient in answers])
    check(answers, gradient, token_mean_truth(values, mask), values, mask)


# Bounds of sequences; ranks get them from and up to a sequence.
SEQUENCES, FIRST_OF_RANK = (0, 3, 3, 20, 24, 32, 40, 48), {"uneven": (0, 2, 7), "one has none": (0, 0, 7)}


def packed_means(split: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rank, (values, mask) = dist.get_rank(), make_values((48,), dtype)
    first, last = FIRST_OF_RANK[split][rank : rank + 2]
    bounds = torch.tensor(SEQUENCES[first : last + 1])
    part, bounds = slice(int(bounds[0]), int(bounds[-1])), bounds - bounds[0]
    world = dist.group.WORLD
    return differentiated(
        packed_sequence_mean, values[part], mask[part], bounds, groups=(world,), ranks_averaged=AVERAGED
    )


@pytest.mark.parametrize("split", FIRST_OF_RANK)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_packed_sequence_mean(split: str, dtype: torch.dtype) -> None:
    answers = run_ranks(2, packed_means, split, dtype)
    values, mask = make_values((48,), dtype)
    gradient = torch.cat([gradient for _, gradient in answers])
    check(answers, gradient, sequence_mean_truth(values, mask, SEQUENCES), values, mask)


# --- context parallel, and both -------------------------------------------------------------------

# Bounds of packed sequences of 48 tokens whose lengths are multiples of 8.
PACKED = ((0, 8, 32, 48), (0, 0, 16, 16, 40, 48, 48))


@dataclass(frozen=True)
class Batch:
    """What D data-parallel ranks have: [b, T] of each, or packed [T] with bounds of each."""

    data_parallel: int
    context_parallel: int
    layout: Any
    packed: bool

    def values(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[D, b, T], b being 1 for packed ones; data-parallel ranks have different numbers of True tokens."""
        values, mask = make_values((self.data_parallel, 1 if self.packed else 3, 48), dtype)
        mask[0, 0, 8:] = False
        mask[-1, -1] = torch.arange(48) < 11
        return torch.where(mask, values.nan_to_num(0.5, 0.5, 0.5), NAN), mask

    def bounds(self, replica: int) -> list[int]:
        """Of the sequences of a replica's flattened values."""
        return list(PACKED[replica]) if self.packed else [0, 48, 96, 144]


def sequence_means(batch: Batch, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    mesh = init_device_mesh("cpu", (batch.data_parallel, batch.context_parallel), mesh_dim_names=("dp", "cp"))
    replica, rank = mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
    dp_group, cp_group = mesh.get_group("dp"), mesh.get_group("cp")
    cu_seqlens = torch.tensor(batch.bounds(replica)) if batch.packed else None
    size = batch.context_parallel
    values, mask = (
        context_parallel_shard(x[replica], batch.layout, rank, size, cu_seqlens=cu_seqlens)
        for x in batch.values(dtype)
    )
    keywords = dict(cp_group=cp_group, groups=(dp_group,), ranks_averaged=AVERAGED)
    if cu_seqlens is None:
        by_sequence = differentiated(sequence_mean, values, mask, **keywords)
    else:
        own = cu_seqlens_of_shard(cu_seqlens, batch.layout, rank, size)
        by_sequence = differentiated(packed_sequence_mean, values, mask, own, **keywords)
    both = (dp_group, cp_group)
    by_token = differentiated(token_mean, values, mask, groups=both, ranks_averaged=AVERAGED)
    return {"sequences": by_sequence, "tokens": by_token}


def check_batch(batch: Batch, dtype: torch.dtype) -> None:
    answers = run_ranks(batch.data_parallel * batch.context_parallel, sequence_means, batch, dtype)
    values, mask = batch.values(dtype)
    bounds = [0]
    for replica in range(batch.data_parallel):
        bounds += [bounds[-1] + bound for bound in batch.bounds(replica)[1:]]
    truths = {
        "sequences": sequence_mean_truth(values.flatten(), mask.flatten(), bounds),
        "tokens": token_mean_truth(values.flatten(), mask.flatten()),
    }
    for name, truth in truths.items():
        gradients = []
        for replica in range(batch.data_parallel):
            first = replica * batch.context_parallel
            own = [answer[name][1] for answer in answers[first : first + batch.context_parallel]]
            cu_seqlens = torch.tensor(batch.bounds(replica)) if batch.packed else None
            gradients.append(context_parallel_unshard(own, batch.layout, cu_seqlens=cu_seqlens))
        whole = torch.stack(gradients).flatten()
        check([answer[name] for answer in answers], whole, truth, values.flatten(), mask.flatten())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=dtype_name)
def test_means_over_context_parallel_ranks(layout: str, packed: bool, dtype: torch.dtype) -> None:
    check_batch(Batch(1, 2, layout, packed), dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_means_over_data_and_context_parallel_ranks(layout: str, packed: bool) -> None:
    check_batch(Batch(2, 2, layout, packed), torch.float32)


# --- the framework's average of gradients ---------------------------------------------------------


def model_gradient(wrapper: str, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A model's gradient over two micro-batches of each rank; without a rank, of all tokens at once."""
    x = torch.randn(sum(lengths), 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    model: Any = nn.Linear(5, 1).double()
    parameters = list(model.parameters())
    if wrapper == "none":
        loss = torch.stack([value for row in x for value in model(row).square()]).mean()
        loss.backward()
        return loss.detach(), parameters[0].grad
    if wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model)
        parameters = list(model.parameters())
    first = 2 * dist.get_rank()
    batches, world = x.split(lengths)[first : first + 2], dist.group.WORLD
    masks = [torch.ones(len(batch), 1, dtype=torch.bool) for batch in batches]
    count = token_count(torch.cat(masks), groups=(world,))
    losses = []
    for batch, mask in zip(batches, masks, strict=True):
        values = model(batch).square()
        loss = token_mean(values, mask, count=count, groups=(world,), ranks_averaged=dist.get_world_size())
        loss.backward()
        losses.append(loss.detach())
    gradient: Any = parameters[0].grad
    return torch.stack(losses).sum(), gradient.full_tensor() if wrapper == "fsdp" else gradient


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_averaged_gradients_are_one_process_s(wrapper: str) -> None:
    lengths = (3, 11, 1, 20)
    truth = model_gradient("none", lengths)
    for loss, gradient in run_ranks(2, model_gradient, wrapper, lengths):
        torch.testing.assert_close(loss, truth[0], rtol=1e-13, atol=0)
        torch.testing.assert_close(gradient, truth[1], rtol=1e-13, atol=1e-15)


# --- statistics -----------------------------------------------------------------------------------


def statistics(split: str) -> EntropyStatistics:
    values, mask = (x.split(SPLITS[split][0])[dist.get_rank()] for x in make_split(split, torch.float32))
    return entropy_statistics(values.requires_grad_(), mask, threshold=1.25, groups=(dist.group.WORLD,))


@pytest.mark.parametrize("split", SPLITS)
def test_entropy_statistics(split: str) -> None:
    values, mask = make_split(split, torch.float32)
    kept = values[mask].double().tolist()
    mean = sum(kept) / max(len(kept), 1)
    high = sum(value > 1.25 for value in kept) / max(len(kept), 1)
    answers = run_ranks(2, statistics, split)
    for found in answers:
        for name in ("mean", "share_above", "tokens"):
            assert_same_bits(getattr(found, name), getattr(answers[0], name), name)
    assert float(answers[0].mean) == pytest.approx(mean, rel=1e-6)
    assert float(answers[0].share_above) == pytest.approx(high, rel=1e-6)
    assert int(answers[0].tokens) == len(kept)


# --- targets --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Tokens [*, T], all different, with a mask or without."""

    shape: tuple[int, ...]
    bounds: tuple[int, ...] | None = None
    masked: bool = False
    dtype: torch.dtype = torch.int64

    def tokens(self) -> Tensor:
        size = torch.Size(self.shape).numel()
        return (torch.arange(size).view(self.shape) + 1).to(self.dtype)

    def mask(self) -> Tensor | None:
        if not self.masked:
            return None
        return torch.rand(self.shape, generator=torch.Generator().manual_seed(5)) < 0.7


# The shortest chunk has one token. The last of PACKED has empty sequences, which have no first token.
ROWS = [
    *(Row(shape, None, masked) for shape in ((48,), (3, 48), (2, 8)) for masked in (False, True)),
    *(Row((48,), bounds, masked) for bounds in PACKED for masked in (False, True)),
    Row((1, 48), PACKED[0], True, torch.int32),
    Row((2, 3, 16)),
    Row((0, 16)),
    Row((2, 0)),
]
# Bounds that only the contiguous layout can cut: within chunks, at their borders, one after the other.
UNCUT = [Row((48,), bounds, True) for bounds in ((0, 5, 24, 48), (0, 1, 2, 12, 13, 36, 48), (0, 23, 48))]


def targets(layout: Any, rows: list[Row]) -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for row in rows:
        cu_seqlens = None if row.bounds is None else torch.tensor(row.bounds)
        tokens, mask = (
            None if x is None else context_parallel_shard(x, layout, rank, size, cu_seqlens=cu_seqlens)
            for x in (row.tokens(), row.mask())
        )
        assert tokens is not None
        before = tokens.clone()
        found.append(
            next_token_targets_of_shard(
                tokens, layout=layout, cp_group=dist.group.WORLD, mask=mask, cu_seqlens=cu_seqlens
            )
        )
        assert torch.equal(tokens, before)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, 4])
def test_targets_of_shards_are_those_of_the_whole(layout: Any, size: int) -> None:
    rows = ROWS + (UNCUT if layout == "contiguous" else [])
    answers = run_ranks(size, targets, layout, rows)
    for number, row in enumerate(rows):
        cu_seqlens = None if row.bounds is None else torch.tensor(row.bounds)
        shards = [answer[number] for answer in answers]
        whole = context_parallel_unshard(shards, layout, cu_seqlens=cu_seqlens)
        truth = targets_truth(row.tokens(), row.bounds or (0, row.shape[-1]), row.mask())
        torch.testing.assert_close(whole, truth, rtol=0, atol=0, msg=lambda text, row=row: f"{row}: {text}")


def moved_masks(layout: Any) -> bool:
    rank, group = dist.get_rank(), dist.group.WORLD
    response = torch.rand(2, 16, generator=torch.Generator().manual_seed(1)) < 0.5
    shard = context_parallel_shard(response, layout, rank, 2)
    moved = next_token_targets_of_shard(shard, layout=layout, cp_group=group, ignore_index=False)
    whole = next_token_targets(response, ignore_index=False)
    return torch.equal(moved, context_parallel_shard(whole, layout, rank, 2))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mask_moves_across_shards(layout: str) -> None:
    assert run_ranks(2, moved_masks, layout) == [True, True]


# --- collectives and errors -----------------------------------------------------------------------


def collectives() -> dict[str, list[Collective]]:
    world, (values, mask) = dist.group.WORLD, make_values((3, 8), torch.float32)
    values.requires_grad_()
    seen = {}
    for name, function in {
        "token_mean": lambda: token_mean(values, mask, groups=(world,)),
        "sequence_mean": lambda: sequence_mean(values, mask, cp_group=world),
        "sequence_mean, data parallel": lambda: sequence_mean(values, mask, groups=(world,)),
        "statistics": lambda: entropy_statistics(values, mask, threshold=1.0, groups=(world,)).mean,
        "zigzag": lambda: next_token_targets_of_shard(values.detach(), layout="zigzag", cp_group=world),
    }.items():
        with watching() as seen[name]:
            result = function()
            if result.requires_grad:
                result.backward()
        seen[name] = list(seen[name])
    return seen


def test_collectives_are_those_documented() -> None:
    for seen in run_ranks(2, collectives):
        assert seen == {
            "token_mean": [Collective("sum", 2)],
            "sequence_mean": [Collective("sum", 6)],
            "sequence_mean, data parallel": [Collective("sum", 2)],
            "statistics": [Collective("sum", 3)],
            "zigzag": [Collective("gather", 12)],  # two chunks of three rows on two ranks
        }


def wrong_groups() -> list[str]:
    other = dist.new_group([0])  # for rank 1 no group
    x, mask = torch.ones(4), torch.ones(4, dtype=torch.bool)
    messages = []
    for groups in (dist.group.WORLD, (other,)):
        try:
            token_mean(x, mask, groups=groups)  # type: ignore[arg-type]
        except ValueError as error:
            messages.append(str(error))
    return messages


def overlapping_groups() -> tuple[list[str], Tensor]:
    """Of two by two ranks: messages, and a count over groups that have one rank in common."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    dp, cp, world = mesh.get_group("dp"), mesh.get_group("cp"), dist.group.WORLD
    x, mask = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    calls: list[Callable[[], object]] = [
        lambda: token_mean(x, mask, groups=(world, cp)),
        lambda: token_mean(x, mask, groups=(dp, dp, cp)),
        lambda: token_count(mask, groups=(world, cp)),
        lambda: sequence_mean(x, mask, cp_group=cp, groups=(world,)),
        lambda: entropy_statistics(x, mask, threshold=1.0, groups=(dp, world)),
    ]
    messages = []
    for call in calls:
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages, token_count(mask, groups=(dp, cp))


def test_groups_that_share_more_than_this_rank_are_named() -> None:
    """Their ranks' tokens would be counted twice, and the gradient be half as large."""
    for messages, count in run_ranks(4, overlapping_groups):
        assert len(messages) == 5
        assert all("share this rank alone" in message for message in messages)
        assert "[0, 1, 2, 3]" in messages[0]
        assert int(count) == 24


def test_wrong_groups_are_named() -> None:
    first, second = run_ranks(2, wrong_groups)
    assert len(first) == 1 and len(second) == 2
    assert first[0].startswith("groups: expected a tuple") and "(group,)" in first[0]
    assert "placeholder" in second[1]

"""How many collectives there are, of what kind and size, and that no value decides about it.

A dispatch mode sees every collective whatever it is called through; a wrapper around
`torch.distributed.all_reduce` adds whether it is a MAX or a SUM, which the mode cannot read.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.distributed.cases import HIDDEN, Case, N, build, call, shard
from tests.ranks import run_ranks

EVEN = (129, 129)
CHUNKS = 5  # of 5 tokens (24 in all); under sequence parallelism 12 tokens a rank are cut alike


@dataclass(frozen=True)
class Collective:
    kind: str  # "max", "sum", "gather", "scatter", or the operator's name
    numbers: int  # of the largest tensor, on this rank


KINDS = {
    "_allgather_base_": "gather",
    "all_gather_into_tensor": "gather",
    "all_gather_into_tensor_out": "gather",
    "_reduce_scatter_base_": "scatter",
    "reduce_scatter_tensor": "scatter",
    "reduce_scatter_tensor_out": "scatter",
}


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []
        self.reduction = "all_reduce not through torch.distributed"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")
        if "c10d" in name[0] and "wait_tensor" not in name[1] and "_wrap_tensor" not in name[1]:
            kind = KINDS.get(name[1], name[1])
            if name[1].startswith(("allreduce", "all_reduce")):
                kind = args[1] if isinstance(args[1], str) else self.reduction
            sizes = [x.numel() for x in tree_leaves(args) if isinstance(x, Tensor)]
            self.seen.append(Collective(kind, max(sizes, default=0)))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def watching() -> Iterator[list[Collective]]:
    real, watch = dist.all_reduce, _Watch()

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        watch.reduction = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max"}.get(op, str(op))
        return real(tensor, op, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", all_reduce), watch:
        yield watch.seen


def record(cases: list[tuple[Case, dict[str, Any]]]) -> list[dict[str, list[Collective]]]:
    """On each rank: the collectives of forward and backward. Module level, for `run_ranks`.

    Besides a call's options: "frozen" tensors by name, rows of "zero upstream" gradient.
    """
    answers = []
    for case, changes in cases:
        changes = dict(changes)
        frozen, zero = changes.pop("frozen", ()), changes.pop("zero upstream", None)
        group = changes.pop("tp_group", dist.group.WORLD)
        whole = build(case)
        rank = dist.get_rank()
        parts = shard(case, whole, rank)
        for name in frozen:
            parts[name].requires_grad_(False)
        with watching() as forward:
            log_probs, entropy, _ = call(case, parts, whole, rank, group, **changes)
        values = [value for value in (log_probs, entropy) if value is not None]
        grads = [torch.ones_like(value) for value in values]
        if zero is not None:
            for g in grads:
                g.view(-1)[zero] = 0
        with watching() as backward:
            torch.autograd.backward(values, grads)
        answers.append({"forward": list(forward), "backward": list(backward)})
    return answers


def recorded(*cases: tuple[Case, dict[str, Any]]) -> list[dict[str, list[Collective]]]:
    """What rank 0 saw; the other rank saw the same."""
    ranks = run_ranks(2, record, list(cases))
    assert ranks[0] == ranks[1]
    return ranks[0]


def kinds(seen: list[Collective]) -> Counter[str]:
    return Counter(c.kind for c in seen)


LOGITS = Case(EVEN, chunk_size=5)
HEAD = Case(EVEN, "linear", chunk_size=5)
SEQUENCE_PARALLEL = replace(HEAD, sequence_parallel=True, chunk_size=8)  # 4 tokens of each rank's 12


def test_watching_sees_every_kind() -> None:
    ranks = run_ranks(2, every_kind)
    for seen in ranks:
        assert [c.kind for c in seen] == ["max", "sum", "gather", "scatter", "max", "sum", "broadcast_"]
        assert [c.numbers for c in seen] == [4, 4, 8, 4, 4, 4, 4]


def every_kind() -> list[Collective]:
    from torch.distributed import _functional_collectives as functional

    x, twice, half = torch.ones(4), torch.ones(8), torch.ones(2)
    with watching() as seen:
        dist.all_reduce(x, dist.ReduceOp.MAX)
        dist.all_reduce(x, async_op=True).wait()
        dist.all_gather_into_tensor(twice, x)
        dist.reduce_scatter_tensor(half, x)
        functional.wait_tensor(functional.all_reduce(x, "max", dist.group.WORLD))
        functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))
        dist.broadcast(x, 0)
    return list(seen)


@pytest.mark.parametrize("form", ["entropy", "chunks", "both"])
def test_logits_reduce_twice_a_chunk_and_never_in_backward(form: str) -> None:
    case = replace(LOGITS, form=form)
    variants: list[dict[str, Any]] = [{}]
    if form == "both":
        variants += [{"entropy": False}, {"metrics": ("varentropy", "max_prob", "sum_pi_squared")}]
    for seen in recorded(*((case, changes) for changes in variants)):
        chunks = 1 if form == "entropy" else CHUNKS
        assert set(kinds(seen["forward"])) <= {"max", "sum"}
        if form != "entropy":  # which cuts tokens as it likes
            assert kinds(seen["forward"])["max"] <= chunks
            assert kinds(seen["forward"])["sum"] <= chunks
        # Seven numbers a token at most: never a vocabulary.
        assert sum(c.numbers for c in seen["forward"]) <= 7 * N
        assert seen["backward"] == []


def test_entropy_not_asked_for_is_not_sent() -> None:
    with_entropy, without = recorded((LOGITS, {}), (LOGITS, {"entropy": False}))
    sent = [sum(c.numbers for c in seen["forward"]) for seen in (with_entropy, without)]
    assert sent[1] <= sent[0] - N


def test_head_reduces_the_hidden_gradient_once() -> None:
    plain, without, frozen_weight, frozen_hidden = recorded(
        (HEAD, {}),
        (HEAD, {"entropy": False}),
        (HEAD, {"frozen": ("weight",)}),
        (HEAD, {"frozen": ("hidden",)}),
    )
    for seen in (plain, without, frozen_weight, frozen_hidden):
        assert set(kinds(seen["forward"])) <= {"max", "sum"}
        assert max(kinds(seen["forward"]).values()) <= CHUNKS
        assert sum(c.numbers for c in seen["forward"]) <= 4 * N
    for seen in (plain, without, frozen_weight):
        assert set(kinds(seen["backward"])) == {"sum"}
        assert len(seen["backward"]) <= CHUNKS
        assert sum(c.numbers for c in seen["backward"]) == N * HIDDEN
    assert frozen_hidden["backward"] == []


def test_sequence_parallel_head_gathers_hidden_and_scatters_its_gradient() -> None:
    chunks = 3
    plain, frozen_weight, frozen_hidden = recorded(
        (SEQUENCE_PARALLEL, {}),
        (SEQUENCE_PARALLEL, {"frozen": ("weight",)}),
        (SEQUENCE_PARALLEL, {"frozen": ("hidden",)}),
    )
    for seen in (plain, frozen_weight, frozen_hidden):
        forward, backward = kinds(seen["forward"]), kinds(seen["backward"])
        assert set(forward) == {"gather", "max", "sum"}
        assert max(forward.values()) <= chunks
        # Gathered again, not kept.
        assert set(backward) == ({"gather"} if seen is frozen_hidden else {"gather", "scatter"})
        assert max(backward.values()) <= chunks
        for part in seen.values():
            assert sum(c.numbers for c in part if c.kind == "gather") == N * HIDDEN
        assert sum(c.numbers for c in seen["backward"] if c.kind == "scatter") in (0, N * HIDDEN)


@pytest.mark.parametrize(
    "base", [LOGITS, HEAD, SEQUENCE_PARALLEL], ids=["logits", "head", "sequence parallel"]
)
def test_no_value_changes_the_collectives(base: Case) -> None:
    cases = [(replace(base, mask=mask), {}) for mask in ("all", "no row", "half", "one row")]
    cases += [(replace(base, mask="half", compact_rows=False), {})]
    cases += [(replace(base, target=target), {}) for target in ("ignored", "borders")]
    cases += [(base, {"zero upstream": rows}) for rows in (slice(0, N), slice(3, 17))]
    cases += [(replace(base, spread=100.0), {}), (replace(base, special="bad rows"), {})]
    plain, *others = recorded((base, {}), *cases)
    for case, seen in zip(cases, others, strict=True):
        assert seen == plain, case


@pytest.mark.parametrize("chunk_size", [1, 3, N, 1000])
def test_chunks_of_the_size_asked_for(chunk_size: int) -> None:
    (seen,) = recorded((replace(LOGITS, chunk_size=chunk_size), {}))
    chunks = -(-N // chunk_size)
    assert kinds(seen["forward"])["sum"] == kinds(seen["forward"])["max"] == chunks
    assert max(c.numbers for c in seen["forward"]) <= 5 * min(chunk_size, N)


def test_no_group_means_no_collective() -> None:
    """Megatron is not initialised here, so the shard is taken for the whole vocabulary."""
    case = Case((258, 258), target="borders", vocab_size=258)
    (seen,) = recorded((case, {"tp_group": None}))
    assert seen == {"forward": [], "backward": []}

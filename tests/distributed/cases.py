"""Cases for several ranks: every process builds the same whole tensors from the seed and takes its shard.

Legend: N tokens (24 = 6 of a sequence × 4), V vocabulary over all ranks, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mcore_entropy as me
from tests.comparison import assert_same_bits
from tests.conftest import poisoned_buffers
from tests.unit.cases import INF, NAN, leaf, make_linear, make_logits, make_target, make_upstream

SEQUENCE, BATCH, HIDDEN = 8, 3, 16
N = SEQUENCE * BATCH


@dataclass(frozen=True)
class Case:
    """One call. `shards`: columns of each rank; uneven ones are called with vocab_start_index."""

    shards: tuple[int, ...]
    form: str = "both"  # "entropy", "chunks", "both" or "linear"
    dtype: torch.dtype = torch.float32
    vocab_size: int | None = None
    layout: str = "sb"  # or "N", or "sb view of bs"
    temperature: str | float = 1.0  # or "per token"
    mask: str = "none"  # "all", "no row", "half", "one row"
    target: str = "random"  # or "borders" of the shards, or "ignored"
    special: str = "none"  # see `_spoil`
    offset: float = 0.0
    spread: float = 3.0
    chunk_size: int | None = None
    sequence_parallel: bool = False
    bias: bool = False
    softcap: float | None = None
    metrics: tuple[str, ...] = ()
    compact_rows: bool = True
    group: tuple[int, ...] | None = None  # ranks of the tensor-parallel group, None: all

    @property
    def columns(self) -> int:
        return sum(self.shards)

    @property
    def starts(self) -> list[int]:
        return [0, *accumulate(self.shards)][: len(self.shards)]

    @property
    def uneven(self) -> bool:
        return len(set(self.shards)) > 1


@dataclass
class Whole:
    """The unsharded tensors of a case."""

    inputs: dict[str, Tensor]  # "logits", or "hidden", "weight" and "bias"
    target: Tensor
    options: dict[str, Any]
    upstream: tuple[Tensor, Tensor]


def _arrange(x: Tensor, layout: str) -> Tensor:
    if layout == "N":
        return x
    if layout == "sb":
        return x.reshape(SEQUENCE, BATCH, *x.shape[1:])
    return x.reshape(BATCH, SEQUENCE, *x.shape[1:]).transpose(0, 1)


def _spoil(rows: Tensor, special: str) -> None:
    """Change rows of logits or hidden, [N, last], in place."""
    if special == "bad rows":
        rows[[0, 13], 2], rows[20, -1] = NAN, INF
    elif special == "-inf":
        dead = torch.rand(rows.shape, generator=torch.Generator().manual_seed(9)) < 0.5
        rows[dead] = -INF
        rows[5] = -INF  # everywhere, on every rank
        rows[7, 1:] = -INF  # everywhere but in the first column: nothing is alive on the other ranks
        rows[8, :-1] = -INF
    elif special == "one rank dead":
        rows[:, : rows.shape[1] // 2] = -INF


def build(case: Case) -> Whole:
    keep = case.vocab_size or case.columns
    if case.form == "linear":
        hidden, weight, bias = make_linear(
            case.dtype, rows=N, columns=case.columns, width=HIDDEN, spread=case.spread
        )
        _spoil(hidden, case.special)
        inputs = {"hidden": hidden, "weight": weight} | ({"bias": bias} if case.bias else {})
        rows = hidden
    else:
        rows = make_logits(case.columns, case.dtype, rows=N, spread=case.spread, offset=case.offset)
        _spoil(rows, case.special)
        inputs = {"logits": rows}
    target = make_target((N,), keep)
    if case.target == "borders":
        edges = [e for start in case.starts for e in (start - 1, start)] + [keep - 1]
        edges = [e for e in edges if 0 <= e < keep]
        target = torch.tensor(edges).repeat(N)[:N]
    elif case.target == "ignored":
        target = target.index_fill(0, torch.arange(0, N, 2), -100)
    options: dict[str, Any] = {"vocab_size": case.vocab_size or (keep if case.uneven else None)}
    if case.mask != "none":
        count = torch.arange(N)
        masks = {"all": count >= 0, "no row": count < 0, "half": count % 2 == 0, "one row": count == 13}
        mask = masks[case.mask]
        rows[~mask] = NAN
        options["mask"] = _arrange(mask, case.layout)
    options["temperature"] = case.temperature
    if case.temperature == "per token":
        options["temperature"] = _arrange(torch.linspace(0.6, 1.5, N), case.layout)
    name = "hidden" if case.form == "linear" else "logits"
    inputs[name] = _arrange(inputs[name], case.layout)
    target = _arrange(target, case.layout)
    return Whole(inputs, target, options, make_upstream(target.shape, case.dtype))


def shard(case: Case, whole: Whole, rank: int) -> dict[str, Tensor]:
    """This rank's part of the inputs, as leaves."""
    columns = slice(case.starts[rank], case.starts[rank] + case.shards[rank])
    parts = {}
    for name, x in whole.inputs.items():
        if name == "logits":
            x = x[..., columns]
        elif name != "hidden":
            x = x[columns]
        elif case.sequence_parallel:
            x = x.chunk(len(case.shards))[rank]
        parts[name] = leaf(x)
    return parts


def call(case: Case, parts: dict[str, Tensor], whole: Whole, rank: int, group: Any, **changes: Any) -> Any:
    """(log_probs or None, entropy, metrics) on this rank."""
    options = whole.options | {"tp_group": group}
    if case.uneven:
        options["vocab_start_index"] = case.starts[rank]
    if case.form != "entropy" and case.chunk_size is not None:
        options["chunk_size"] = case.chunk_size
    options["execution"] = me.Execution(compact_rows=case.compact_rows)
    options |= changes
    if case.form == "entropy":
        return None, me.vocab_parallel_entropy(parts["logits"], **options), {}
    if case.form == "chunks":
        return None, me.vocab_parallel_entropy_with_chunking(parts["logits"], **options), {}
    options = {"metrics": case.metrics} | options
    if case.form == "both":
        both = me.vocab_parallel_log_probs_and_entropy(parts["logits"], whole.target, **options)
    else:
        both = me.linear_log_probs_and_entropy(
            parts["hidden"],
            parts["weight"],
            whole.target,
            bias=parts.get("bias"),
            transform=None if case.softcap is None else me.LogitTransform(softcap=case.softcap),
            sequence_parallel=case.sequence_parallel,
            **options,
        )
    return both.log_probs, both.entropy, both.metrics


def run(cases: list[Case]) -> list[dict[str, Any]]:
    """On each rank: results and gradients of all cases. Module level, for `run_ranks`."""
    answers, groups = [], {}
    for ranks in sorted({case.group for case in cases if case.group is not None}):
        groups[ranks] = dist.new_group(list(ranks))  # everybody creates every group
    for case in cases:
        if case.group is not None and dist.get_rank() not in case.group:
            answers.append({})
            continue
        group = dist.group.WORLD if case.group is None else groups[case.group]
        rank = dist.get_rank(group)
        whole = build(case)
        with poisoned_buffers():
            parts = shard(case, whole, rank)
            before = {name: x.detach().clone() for name, x in parts.items()}
            log_probs, entropy, metrics = call(case, parts, whole, rank, group)
            pairs = [
                (v, g) for v, g in zip((log_probs, entropy), whole.upstream, strict=True) if v is not None
            ]
            found = torch.autograd.grad([v for v, _ in pairs], list(parts.values()), [g for _, g in pairs])
        for name, x in parts.items():
            assert_same_bits(x.detach(), before[name], f"{name} after forward and backward")
        answer = {
            "entropy": entropy.detach(),
            **metrics,
            **{f"d {n}": g for n, g in zip(parts, found, strict=True)},
        }
        if log_probs is not None:
            answer["log_probs"] = log_probs.detach()
        answers.append(answer)
    return answers

"""The tensors of a case, and the call: the same on every rank, from the case's seed.

Legend: N tokens, V vocabulary over all ranks, H hidden size; "whole" is unsharded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import mcore_entropy as me
from tests.comparison import assert_same_bits
from tests.properties.case import Case

INF, NAN = float("inf"), float("nan")


@dataclass
class Whole:
    """What all ranks together are given; `upstream` holds None where there is no gradient."""

    inputs: dict[str, Tensor]  # "logits", or "hidden", "weight" and "bias"
    target: Tensor
    mask: Tensor | None
    temperature: float | Tensor
    upstream: tuple[Tensor | None, Tensor | None]


def dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def out_dtype(case: Case) -> torch.dtype:
    return torch.float64 if case.dtype == "float64" else torch.float32


def strided(x: Tensor, layout: str) -> Tensor:
    """The numbers of `x` [*, last] with other strides; what lies around a view is NaN or a largest number."""
    if layout == "one row expanded" and x.dim() > 1 and x.shape[0]:
        return x[:1].clone().expand_as(x)
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -2 if x.dim() > 2 else -1).contiguous().transpose(0, -2 if x.dim() > 2 else -1)
    if layout == "column major":
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    around = NAN if x.is_floating_point() else True if x.dtype == torch.bool else torch.iinfo(x.dtype).max
    if layout == "offset view":
        larger = x.new_full((*x.shape[:-1], x.shape[-1] + 3), around)
        larger[..., 3:] = x
        return larger[..., 3:]
    if layout == "every other column":
        larger = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), around)
        larger[..., ::2] = x
        return larger[..., ::2]
    return x.clone()


def per_token(x: Tensor, layout: str) -> Tensor:
    """The same for [*]; expanding one row would change the numbers."""
    return x.clone() if layout == "one row expanded" else strided(x[..., None], layout)[..., 0]


def _logit_row(kind: str, x: Tensor, dtype: torch.dtype, g: torch.Generator) -> Tensor:
    """`x`: normal numbers [V], fp64."""
    some = torch.rand(x.shape, generator=g) < 0.4
    at = int(torch.randint(0, len(x), (1,), generator=g))
    only = torch.arange(len(x)) == at
    if kind == "wide":
        return x * 30
    if kind == "offset":
        return x + (500 if x[0] > 0 else -500)
    if kind == "flat":
        return torch.full_like(x, float(x[0]) * 10)
    if kind == "close":
        return 3 + x * 1e-3
    if kind == "peaked":
        return torch.where(only, x + 40, x)
    if kind == "ties":
        return torch.where(some, 1.5, -2.25)
    if kind == "tiny":
        return x * 1e-30
    if kind == "extreme":
        step = 2.0 ** (100 if dtype in (torch.float32, torch.float64, torch.bfloat16) and x[0] > 0 else 13)
        return torch.where(some, 0.0, torch.where(x > 0, step, -step))
    if kind == "some -inf":
        return torch.where(some & ~only, -INF, x)
    if kind == "one alive":
        return torch.where(only, x, -INF)
    if kind == "lowest":
        # In fp64 that of fp32: the truth, fp64 itself, squares it.
        return torch.where(some & ~only, max(torch.finfo(dtype).min, torch.finfo(torch.float32).min), x)
    if kind == "all -inf":
        return torch.full_like(x, -INF)
    if kind == "one nan":
        return torch.where(only, NAN, x)
    if kind == "one +inf":
        return torch.where(only, INF, x)
    if kind == "nan and -inf":
        return torch.where(only, NAN, -INF)
    assert kind == "plain", kind
    return x * 3


def _hidden_row(kind: str, x: Tensor, g: torch.Generator) -> Tensor:
    """`x`: normal numbers [H], fp64."""
    if kind in ("plain", "wide", "zero", "tiny"):
        return x * {"plain": 1.0, "wide": 20.0, "zero": 0.0, "tiny": 1e-20}[kind]
    at = int(torch.randint(0, len(x), (1,), generator=g))
    return torch.where(torch.arange(len(x)) == at, float(kind.removeprefix("one ")), x)


def build(case: Case) -> Whole:
    g = torch.Generator().manual_seed(case.seed)
    dtype, count = dtype_of(case.dtype), torch.Size(case.lead).numel()

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    inputs: dict[str, Tensor] = {}
    if case.form == "linear":
        rows = [_hidden_row(case.rows[i % len(case.rows)], normal(case.width), g) for i in range(count)]
        name, last = "hidden", case.width
        weight = (normal(case.columns, case.width) * 3 * case.width**-0.5).to(dtype)
        weight[case.counted :] = NAN  # they do not count
        inputs["weight"] = weight
        if case.bias != "none":
            bias = normal(case.columns) + (500 if case.bias == "offset" else 0)
            if case.bias == "some -inf":
                bias[torch.rand(case.columns, generator=g) < 0.3] = -INF
            inputs["bias"] = bias.to(dtype_of(case.bias_dtype or case.dtype))
            inputs["bias"][case.counted :] = INF
    else:
        rows = [
            _logit_row(case.rows[i % len(case.rows)], normal(case.columns), dtype, g) for i in range(count)
        ]
        name, last = "logits", case.columns
    x = (torch.stack(rows) if rows else torch.zeros(0, last)).to(dtype)
    if name == "logits":
        x[:, case.counted :] = NAN
    x = x.reshape(*case.lead, last)
    if case.layout == "one row expanded" and case.lead and count:
        x = x[:1].expand_as(x).clone()
    target, mask = _target(case, x, inputs, g), None
    if case.mask != "none":
        likelihood = {"all True": 1.1, "all False": -1.0}.get(case.mask, 0.6)
        mask = torch.rand(case.lead, generator=g) < likelihood
        if case.mask == "expanded" and case.lead and count:
            mask = mask[:1].clone().expand_as(mask)
        else:
            mask = per_token(mask, case.other_layout)
        target[~mask] = torch.iinfo(target.dtype).max
        if case.layout != "one row expanded":
            x[~mask] = torch.tensor([NAN, INF, -INF, 1e4], dtype=dtype).repeat(last)[:last]
    inputs = {name: x} | inputs
    temperature = _temperature(case, mask, g)
    upstream = tuple(
        _upstream(kind, normal(*case.lead).to(out_dtype(case)) * case.upstream_scale)
        for kind in case.upstream
    )
    return Whole(inputs, per_token(target, case.other_layout), mask, temperature, upstream)


def _target(case: Case, x: Tensor, inputs: dict[str, Tensor], g: torch.Generator) -> Tensor:
    count, dtype = torch.Size(case.lead).numel(), dtype_of(case.target_dtype)
    target = torch.randint(0, case.counted, (count,), generator=g)
    scores = x.reshape(count, x.shape[-1]).double()
    if "weight" in inputs:
        scores = torch.nan_to_num(scores) @ inputs["weight"].double().T + inputs.get("bias", 0.0)
    least = torch.nan_to_num(scores[:, : case.counted], nan=0.0).argmin(-1)
    ignorable = torch.iinfo(dtype).min <= case.ignore_index
    for i in range(count):
        kind = case.targets[i % len(case.targets)]
        if kind == "first":
            target[i] = 0
        elif kind == "last":
            target[i] = case.counted - 1
        elif kind == "least likely":
            target[i] = least[i]
        elif kind == "ignored" and ignorable:
            target[i] = case.ignore_index
    return target.reshape(case.lead).to(dtype)


def _temperature(case: Case, mask: Tensor | None, g: torch.Generator) -> float | Tensor:
    if isinstance(case.temperature, float):
        return case.temperature
    if case.temperature == "0-dim":
        return torch.tensor(0.8)
    values = 0.5 + 1.5 * torch.rand(case.lead, generator=g)
    if case.temperature == "powers of two":
        values = 2.0 ** torch.randint(-2, 3, case.lead, generator=g)
    elif case.temperature == "with bad ones":
        bad = torch.tensor([0.0, -1.0, NAN])[torch.randint(0, 3, case.lead, generator=g)]
        values = torch.where(torch.rand(case.lead, generator=g) < 0.3, bad, values)
    elif case.temperature == "of another dtype":
        values = values.to(torch.bfloat16 if case.seed % 2 else torch.float64)
    if mask is not None:
        values = torch.where(mask, values, 0.0)
    return per_token(values, case.other_layout)


def _upstream(kind: str, x: Tensor) -> Tensor | None:
    if kind == "none":
        return None
    if kind == "zero":
        return torch.zeros_like(x)
    if kind == "some zero":
        return torch.where(x.abs() < x.abs().mean(), 0.0, x)
    if kind == "one expanded":  # what .sum() sends back
        return x.reshape(-1)[:1].clone().reshape(()).expand_as(x) if x.numel() else x
    if kind == "row expanded" and x.dim() and x.numel():
        return x[:1].clone().expand_as(x)
    return x


def starts(case: Case) -> list[int]:
    return [0, *accumulate(case.shards)][: len(case.shards)]


def shard(case: Case, whole: Whole, rank: int) -> dict[str, Tensor]:
    """This rank's part of the inputs, as leaves with the case's strides."""
    columns = slice(starts(case)[rank], starts(case)[rank] + case.shards[rank])
    parts = {}
    for name, x in whole.inputs.items():
        layout = case.layout if name in ("logits", "hidden") else case.other_layout
        if name == "logits":
            x = x[..., columns]
        elif name != "hidden":
            x = x[columns]
            layout = "contiguous" if layout == "one row expanded" else layout
        elif case.sequence_parallel and len(case.shards) > 1:
            x = x.chunk(len(case.shards))[rank]
        x = per_token(x, layout) if name == "bias" else strided(x, layout)
        parts[name] = x.detach().requires_grad_(name in case.trained)
    return parts


def call(case: Case, parts: dict[str, Tensor], whole: Whole, rank: int, group: Any) -> dict[str, Any]:
    """Outputs by name, entropy None where it was not asked for."""
    options: dict[str, Any] = {
        "mask": whole.mask,
        "temperature": whole.temperature,
        "vocab_size": case.vocab_size,
        "vocab_start_index": starts(case)[rank] if case.explicit_shards else None,
        "tp_group": group,
        "execution": me.Execution(workspace_mib=case.workspace, compact_rows=case.compact_rows),
    }
    if case.form == "entropy":
        return {"entropy": me.vocab_parallel_entropy(parts["logits"], **options)}
    if case.form == "chunks":
        chunks = {} if case.chunk_size is None else {"chunk_size": case.chunk_size}
        return {"entropy": me.vocab_parallel_entropy_with_chunking(parts["logits"], **chunks, **options)}
    options |= {
        "ignore_index": case.ignore_index,
        "chunk_size": case.chunk_size,
        "entropy": case.entropy,
        "metrics": case.metrics,
    }
    if case.form == "both":
        found = me.vocab_parallel_log_probs_and_entropy(parts["logits"], whole.target, **options)
    else:
        transform = me.LogitTransform(case.scale, case.softcap)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            found = me.linear_log_probs_and_entropy(
                parts["hidden"],
                parts["weight"],
                whole.target,
                bias=parts.get("bias"),
                transform=None if transform == me.LogitTransform() else transform,
                sequence_parallel=case.sequence_parallel,
                **options,
            )
    assert tuple(found.metrics) == case.metrics
    return {"log_probs": found.log_probs, "entropy": found.entropy, **found.metrics}


def _storage(x: Tensor) -> Tensor:
    """Every byte that a tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).clone()


def answers(case: Case, rank: int = 0, group: Any = None) -> dict[str, Tensor]:
    """Outputs by name and gradients as "d name"; what needs no truth to be judged is judged here."""
    whole = build(case)
    parts = shard(case, whole, rank)
    given = [*parts.values(), whole.target, whole.mask, whole.temperature, *whole.upstream]
    tensors = [x for x in given if isinstance(x, Tensor)]
    before = [_storage(x) for x in tensors]
    outputs = call(case, parts, whole, rank, group)
    leaves = {name: x for name, x in parts.items() if x.requires_grad}
    assert (outputs["entropy"] is None) == (not case.entropy)
    for name, value in outputs.items():
        if value is not None:
            assert value.requires_grad == (bool(leaves) and name in ("log_probs", "entropy")), name
    pairs = [
        (outputs[name], upstream)
        for name, upstream in zip(("log_probs", "entropy"), whole.upstream, strict=True)
        if outputs.get(name) is not None and upstream is not None
    ]
    found = {name: x.detach() for name, x in outputs.items() if x is not None}
    if leaves and pairs:
        values, upstream = zip(*pairs, strict=True)
        first = torch.autograd.grad(values, list(leaves.values()), upstream, retain_graph=True)
        again = torch.autograd.grad(values, list(leaves.values()), upstream)
        for name, gradient, second in zip(leaves, first, again, strict=True):
            assert_same_bits(gradient, second, f"gradient of {name}, the second time")
            found[f"d {name}"] = gradient
    for x, bytes_before in zip(tensors, before, strict=True):
        assert torch.equal(_storage(x), bytes_before), "an input was changed"
    return found


def answers_of_batch(batch: list[Case], checks: bool) -> list[dict[str, Tensor]]:
    """Those of this rank. The checks of agreement, where they are on, must find nothing to complain about."""
    with mock.patch.dict(os.environ, MCORE_ENTROPY_CHECKS="1" if checks else "0"):
        return [answers(case, dist.get_rank(), dist.group.WORLD) for case in batch]

"""What the unit tests run on: layouts, upstream gradients, and one comparison for each form of the library.

Legend: N tokens (24 = 4 sequences of 6), V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mcore_entropy as me
from tests import reference as ref

N, BATCH, SEQUENCE = 24, 4, 6
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INF, NAN = float("inf"), float("nan")


def _offset_view(x: Tensor) -> Tensor:
    larger = x.new_full((x.shape[0] + 1, x.shape[1] + 3), NAN)
    larger[1:, 3:] = x
    return larger[1:, 3:]


def _every_other_column(x: Tensor) -> Tensor:
    larger = x.new_full((x.shape[0], 2 * x.shape[1]), NAN)
    larger[:, ::2] = x
    return larger[:, ::2]


# The same numbers, [N, last], laid out differently; what lies around a view is NaN.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "N": lambda x: x,
    "bs": lambda x: x.reshape(BATCH, SEQUENCE, -1),
    "sb": lambda x: x.reshape(SEQUENCE, BATCH, -1),
    "sb view of bs": lambda x: x.reshape(BATCH, SEQUENCE, -1).transpose(0, 1),
    "column major": lambda x: x.t().contiguous().t(),
    "offset view": _offset_view,
    "every other column": _every_other_column,
    "one row expanded": lambda x: x[:1].expand(N, -1),
}

FUNCTIONS = ("entropy", "entropy in chunks", "log-probs and entropy")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def out_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def make_logits(
    columns: int,
    dtype: torch.dtype,
    *,
    rows: int = N,
    spread: float = 3.0,
    offset: float = 0.0,
    seed: int = 0,
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * spread + offset).to(dtype)


def make_target(rows: torch.Size | tuple[int, ...], columns: int, seed: int = 1) -> Tensor:
    return torch.randint(0, columns, tuple(rows), generator=torch.Generator().manual_seed(seed))


def make_upstream(
    rows: torch.Size | tuple[int, ...], dtype: torch.dtype, seed: int = 2
) -> tuple[Tensor, Tensor]:
    """Gradients for log_probs and entropy, in the dtype of the results."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(2, *rows, generator=generator).to(out_dtype(dtype))
    return both[0], both[1]


def leaf(x: Tensor) -> Tensor:
    """A leaf that keeps the strides and the storage of `x`."""
    return x.detach().requires_grad_()


def call_logits(function: str, x: Tensor, target: Tensor, chunk_size: int | None = None, **options: Any):
    """(log_probs or None, entropy, metrics) of one of FUNCTIONS."""
    if function == "log-probs and entropy":
        both = me.vocab_parallel_log_probs_and_entropy(x, target, chunk_size=chunk_size, **options)
        return both.log_probs, both.entropy, both.metrics
    options = {k: v for k, v in options.items() if k not in ("ignore_index", "metrics")}
    if function == "entropy":
        return None, me.vocab_parallel_entropy(x, **options), {}
    return None, me.vocab_parallel_entropy_with_chunking(x, chunk_size or 5, **options), {}


def compare_values(ours: Tensor, truth: Tensor, eager: Tensor, name: str) -> None:
    ref.assert_within_eager(ours, truth, eager, ref.VALUE_MULTIPLE, name=name)


def compare_metrics(ours: dict[str, Tensor], truth: ref.Dense, eager: ref.Dense, mask: Tensor | None) -> None:
    for name, value in ours.items():
        kept = ... if mask is None else mask
        assert not value.requires_grad
        assert value.shape == truth.entropy.shape
        floor = None
        if name == "varentropy":
            # It is the mean of (z-m)² less the square of the mean: ulps of those, not of the difference.
            mean = truth.entropy.abs() + truth.metrics["max_prob"].log().abs()
            floor = ref.ulps((mean.square() + truth.metrics[name])[kept], value.dtype)
        t, e = truth.metrics[name][kept], eager.metrics[name][kept]
        if floor is None:
            compare_values(value[kept], t, e, name)
        else:
            error = (value[kept].double() - t).abs()
            assert bool((error <= ref.VALUE_MULTIPLE * (e.double() - t).abs().max() + floor).all()), name


def compare_gradient(
    ours: Tensor, truth: Tensor, eager: Tensor, name: str, bad: Tensor | None = None
) -> None:
    """Bad rows hold NaN somewhere; the others are compared."""
    if bad is not None and bool(bad.any()):
        assert bool(ours[bad].isnan().any(-1).all()), f"gradient of {name}: a bad row without NaN"
        ours, truth, eager = (torch.where(bad[..., None], 0.0, x) for x in (ours, truth, eager))
    multiple = ref.GRADIENT_MULTIPLE[ours.dtype]
    ref.assert_within_eager(ours, truth, eager, multiple, name=f"gradient of {name}")


def check_logits(
    function: str,
    x: Tensor,
    target: Tensor,
    *,
    upstream: tuple[Tensor, Tensor] | None = None,
    chunk_size: int | None = None,
    **options: Any,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Values and gradient of ours against truth and eager; the input survives. Returns ours."""
    g_lp, g_h = upstream or make_upstream(x.shape[:-1], x.dtype)
    before = x.detach().clone()
    x = leaf(x)
    log_probs, entropy, metrics = call_logits(function, x, target, chunk_size, **options)
    options = {k: v for k, v in options.items() if k not in ("metrics", "execution")}
    with_target = {"target": target, "grad_log_probs": g_lp} if log_probs is not None else {}
    truth = ref.truth_logits(x, grad_entropy=g_h, **with_target, **options)
    eager = ref.eager_logits(x, grad_entropy=g_h, **with_target, **options)
    assert entropy.dtype == out_dtype(x.dtype)
    compare_values(entropy, truth.entropy, eager.entropy, "entropy")
    values, grads = [entropy], [g_h]
    if log_probs is not None:
        assert log_probs.dtype == out_dtype(x.dtype)
        compare_values(log_probs, truth.log_probs, eager.log_probs, "log_probs")
        compare_metrics(metrics, truth, eager, options.get("mask"))
        values, grads = [log_probs, entropy], [g_lp, g_h]
    (gradient,) = torch.autograd.grad(values, x, grads)
    assert gradient.dtype == x.dtype
    bad = truth.entropy.isnan()
    compare_gradient(gradient, truth.gradients["logits"], eager.gradients["logits"], "logits", bad)
    ref.assert_same_bits(x.detach(), before, "the logits after forward and backward")
    return log_probs, entropy, gradient


# --- the fused head ---


def make_linear(
    dtype: torch.dtype,
    *,
    rows: int = N,
    columns: int = 517,
    width: int = 32,
    spread: float = 3.0,
    seed: int = 3,
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight and bias whose logits have a standard deviation of `spread`."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    weight = (torch.randn(columns, width, generator=generator) * spread * width**-0.5).to(dtype)
    bias = torch.randn(columns, generator=generator).to(dtype)
    return hidden, weight, bias


def check_linear(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    upstream: tuple[Tensor, Tensor] | None = None,
    chunk_size: int | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    execution: me.Execution | None = None,
    metrics: tuple[str, ...] = (),
    **options: Any,
) -> tuple[me.TokenStatistics, dict[str, Tensor]]:
    """Values and gradients of the fused head against truth and eager; the inputs survive. Returns ours.

    Values of half-precision inputs are held against eager on the same inputs in fp32, much closer to
    the truth than eager in half precision, which rounds the logits.
    """
    dtype = hidden.dtype
    given = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    before = {name: x.detach().clone() for name, x in given.items()}
    leaves = {name: leaf(x) for name, x in given.items()}
    transform = None if (scale, softcap) == (1.0, None) else me.LogitTransform(scale=scale, softcap=softcap)
    ours = me.linear_log_probs_and_entropy(
        leaves["hidden"],
        leaves["weight"],
        target,
        bias=leaves.get("bias"),
        transform=transform,
        chunk_size=chunk_size,
        execution=execution,
        metrics=metrics,
        **options,
    )
    g_lp, g_h = upstream or make_upstream(target.shape, dtype)
    options |= {"scale": scale, "softcap": softcap, "grad_log_probs": g_lp, "grad_entropy": g_h}
    mask = options.get("mask")
    clean = hidden if mask is None else torch.where(mask[..., None], hidden, 0.0)
    truth = ref.truth_linear(hidden, weight, target, bias=bias, **options)
    eager = ref.eager_linear(clean, weight, target, bias=bias, **options)
    h, w, b = (x if x is None else x.to(out_dtype(dtype)) for x in (clean, weight, bias))
    eager_values = ref.eager_linear(h, w, target, bias=b, **options)
    assert ours.entropy is not None
    for name in ("log_probs", "entropy"):
        value = getattr(ours, name)
        assert value.dtype == out_dtype(dtype)
        compare_values(value, getattr(truth, name), getattr(eager_values, name), name)
    compare_metrics(ours.metrics, truth, eager_values, mask)
    found = torch.autograd.grad((ours.log_probs, ours.entropy), list(leaves.values()), (g_lp, g_h))
    gradients = dict(zip(leaves, found, strict=True))
    bad = truth.entropy.isnan()
    for name, gradient in gradients.items():
        assert gradient.dtype == dtype
        if name == "hidden":
            compare_gradient(gradient, truth.gradients[name], eager.gradients[name], name, bad)
        elif bool(bad.any()):
            assert bool(gradient.isnan().any()), f"gradient of {name}: a bad row is part of its sum"
        else:
            compare_gradient(gradient, truth.gradients[name], eager.gradients[name], name)
        ref.assert_same_bits(leaves[name].detach(), before[name], f"{name} after forward and backward")
    return ours, gradients

"""What the unit tests run on: layouts, upstream gradients, and one comparison for each form of the library.

Legend: N tokens (24 = 4 sequences of 6), V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_entropy as me
from mcore_entropy.backends import TorchBackend
from tests import reference as ref
from tests.comparison import (
    GRADIENTS,
    HALF_PRECISION_HEAD_GRADIENTS,
    VALUES,
    assert_same_bits,
    assert_within_eager,
)

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
    assert_within_eager(ours, truth, eager, VALUES, name=name)


def compare_metrics(ours: dict[str, Tensor], truth: ref.Dense, eager: ref.Dense, mask: Tensor | None) -> None:
    for name, value in ours.items():
        assert not value.requires_grad
        assert value.shape == truth.entropy.shape
        # What a masked row gets is not said.
        kept = truth.entropy.isfinite() if mask is None else mask & truth.entropy.isfinite()
        floor, (v, t, e) = 4.0, (x[kept] for x in (value, truth.metrics[name], eager.metrics[name]))
        if name == "varentropy" and t.numel():
            # It is the mean of (z-m)² less the square of the mean: ulps of those, not of the difference.
            mean = truth.entropy[kept] + truth.metrics["max_prob"][kept].log()
            floor *= float((mean.square() + t).max() / t.max().clamp_min(1e-30))
        assert_within_eager(v, t, e, VALUES, floor, name)
        bad = truth.entropy.isnan()
        assert bool(value[bad].isnan().all()), f"{name} of a bad row"


def compare_gradient(
    name: str,
    ours: Tensor,
    truth: ref.Dense,
    eager: ref.Dense,
    multiple: tuple[float, float] = GRADIENTS,
    floor: float = 4.0,
) -> None:
    """Bad rows hold NaN somewhere, sums over rows then do too; the others are compared."""
    bad = truth.entropy.isnan()
    mine, size = ours, truth.sizes[name]
    expected, theirs = truth.gradients[name], eager.gradients[name]
    if bool(bad.any()) and name in ("weight", "bias"):
        assert bool(ours.isnan().any()), f"gradient of {name}: a bad row is part of its sum"
        return
    if bool(bad.any()):
        assert bool(ours[bad].isnan().any(-1).all()), f"gradient of {name}: a bad row without NaN"
        mine, size, expected, theirs = (
            torch.where(bad[..., None], 0.0, x) for x in (mine, size, expected, theirs)
        )
    assert_within_eager(mine, expected, theirs, multiple, floor, f"gradient of {name}", size)


def head_gradients(dtype: torch.dtype, largest_terms: float) -> dict[str, Any]:
    """How the fused head's gradients compare. Its backward computes the logits again, in a product of
    another shape when rows are left out, so they are an ulp off those that lse was made of: of the sum of
    |terms| of the product, whose partial sums may be larger than z, by much in an unlucky order (the
    processor's vectors decide that). In fp32 and fp64 that is a relative error of p."""
    if dtype.itemsize == 2:
        return {"multiple": HALF_PRECISION_HEAD_GRADIENTS}
    return {"multiple": GRADIENTS, "floor": 4.0 + largest_terms}


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
    compare_gradient("logits", gradient, truth, eager)
    assert_same_bits(x.detach(), before, "the logits after forward and backward")
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


def largest_terms(hidden: Tensor, weight: Tensor, bias: Tensor | None, options: dict[str, Any]) -> float:
    """The largest sum of |terms| that a z is the sum of."""
    if not hidden.numel():
        return 0.0
    z = hidden.double().abs() @ weight.double().abs().T
    if bias is not None:
        z = z + torch.where(bias.isfinite(), bias, 0.0).abs()
    z = z[..., : options.get("vocab_size")]
    temperature = options.get("temperature", 1.0)
    z = z / (temperature.clamp_min(0.1)[..., None] if isinstance(temperature, Tensor) else temperature)
    return float(z[z.isfinite()].abs().max())


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
    clean, for_eager = hidden, dict(options)
    if mask is not None:  # eager computes masked rows: give it something to compute
        clean = torch.where(mask[..., None], hidden, 0.0)
        if isinstance(options.get("temperature"), Tensor):
            for_eager["temperature"] = torch.where(mask, options["temperature"], 1.0)
    truth = ref.truth_linear(hidden, weight, target, bias=bias, **options)
    eager = ref.eager_linear(clean, weight, target, bias=bias, **for_eager)
    h, w, b = (x if x is None else x.to(out_dtype(dtype)) for x in (clean, weight, bias))
    eager_values = ref.eager_linear(h, w, target, bias=b, **for_eager)
    assert ours.entropy is not None
    for name in ("log_probs", "entropy"):
        value = getattr(ours, name)
        assert value.dtype == out_dtype(dtype)
        compare_values(value, getattr(truth, name), getattr(eager_values, name), name)
    compare_metrics(ours.metrics, truth, eager_values, mask)
    found = torch.autograd.grad((ours.log_probs, ours.entropy), list(leaves.values()), (g_lp, g_h))
    gradients = dict(zip(leaves, found, strict=True))
    how = head_gradients(dtype, largest_terms(clean, weight, bias, options))
    for name, gradient in gradients.items():
        assert gradient.dtype == dtype
        compare_gradient(name, gradient, truth, eager, **how)
        assert_same_bits(leaves[name].detach(), before[name], f"{name} after forward and backward")
    return ours, gradients


def put_torch_backend_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every S of the torch backend is wrong by 1e-4 of it."""
    right = TorchBackend.tile_statistics

    def off(*arguments: Any) -> Any:
        statistics = right(*arguments)
        statistics.sum_exp.mul_(1 + 1e-4)
        return statistics

    monkeypatch.setattr(TorchBackend, "tile_statistics", staticmethod(off))

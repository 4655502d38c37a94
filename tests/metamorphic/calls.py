"""One call of the library as a value, which a relation changes, and how two calls' results compare.

A relation says what a change of the inputs does to values and gradients. Both sides are held against the
fp64 truth of their own inputs, so that two sides that are wrong alike are seen; then against each other, to
the bit where the arithmetic is the same, otherwise within what rounding can do.

Legend: N tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import mcore_entropy as me
from tests import reference as ref
from tests.comparison import assert_same_bits
from tests.unit.cases import (
    compare_gradient,
    compare_metrics,
    compare_values,
    head_gradients,
    largest_terms,
    leaf,
    make_linear,
    make_logits,
    make_target,
    make_upstream,
    out_dtype,
)

N, COLUMNS, WIDTH = 24, 203, 16
Results = dict[str, Tensor]  # log_probs, entropy, the metrics, and a "d name" for every input


@dataclass(frozen=True)
class Call:
    """What is given to `linear_log_probs_and_entropy`, or with "logits" to the function for those.

    Attributes:
        inputs: "logits" [N, V], or "hidden" [N, H], "weight" [V, H] and perhaps "bias" [V]; unsharded.
        options: of those keywords that change the result; a transform as scale and softcap.
        how: of those that must not, chunk_size and execution.
    """

    inputs: dict[str, Tensor]
    target: Tensor
    upstream: tuple[Tensor, Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.inputs.values())).dtype

    def given(self, **inputs: Tensor) -> Call:
        """The same with these inputs instead of its own."""
        return replace(self, inputs={**self.inputs, **inputs})

    def with_options(self, **options: Any) -> Call:
        return replace(self, options={**self.options, **options})

    def computed(self, **how: Any) -> Call:
        return replace(self, how={**self.how, **how})

    def rows(self, rows: Tensor | slice) -> Call:
        """Some of its tokens, in that order."""
        options = {k: v[rows] if isinstance(v, Tensor) else v for k, v in self.options.items()}
        name = "logits" if "logits" in self.inputs else "hidden"
        upstream = (self.upstream[0][rows], self.upstream[1][rows])
        changed = replace(self, target=self.target[rows], upstream=upstream, options=options)
        return changed.given(**{name: self.inputs[name][rows]})


def logits_call(x: Tensor) -> Call:
    return Call({"logits": x}, make_target((x.shape[0],), x.shape[1]), make_upstream((x.shape[0],), x.dtype))


def head_call(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call:
    inputs = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    rows = hidden.shape[0]
    return Call(inputs, make_target((rows,), weight.shape[0]), make_upstream((rows,), hidden.dtype))


def make_call(form: str, dtype: torch.dtype) -> Call:
    """A call of random numbers, of either form."""
    if form == "logits":
        return logits_call(make_logits(COLUMNS, dtype))
    return head_call(*make_linear(dtype, columns=COLUMNS, width=WIDTH))


def on_grid(*shape: int, step: float, most: float, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random multiples of `step` up to `most`: sums, and products of two, are exact in binary."""
    generator = torch.Generator().manual_seed(seed)
    count = int(most / step)
    return (torch.randint(-count, count + 1, shape, generator=generator) * step).to(dtype)


def make_call_on_grid(form: str, dtype: torch.dtype) -> Call:
    """A call whose logits are exact multiples of 1/8, at most 16 or so, whatever the order of terms."""
    if form == "logits":
        return logits_call(on_grid(N, COLUMNS, step=0.25, most=12.0, dtype=dtype))
    hidden = on_grid(N, WIDTH, step=0.5, most=1.0, dtype=dtype)
    weight = on_grid(COLUMNS, WIDTH, step=0.25, most=1.0, dtype=dtype, seed=1)
    return head_call(hidden, weight, on_grid(COLUMNS, step=0.25, most=2.0, dtype=dtype, seed=2))


# --- results ---


def values_of(call: Call, parts: dict[str, Tensor], **keywords: Any) -> me.TokenStatistics:
    """The library on leaves: the call's inputs, or a rank's part of them."""
    options = {"metrics": ref.METRICS, **call.options, **call.how, **keywords}
    scale, softcap = options.pop("scale", 1.0), options.pop("softcap", None)
    if "logits" in parts:
        assert (scale, softcap) == (1.0, None), "logits that are given are transformed by whoever gives them"
        return me.vocab_parallel_log_probs_and_entropy(parts["logits"], call.target, **options)
    if (scale, softcap) != (1.0, None):
        options["transform"] = me.LogitTransform(scale=scale, softcap=softcap)
    return me.linear_log_probs_and_entropy(
        parts["hidden"], parts["weight"], call.target, bias=parts.get("bias"), **options
    )


def results_of(call: Call, parts: dict[str, Tensor], **keywords: Any) -> Results:
    """Values and gradients; the inputs survive."""
    leaves = {name: leaf(x) for name, x in parts.items()}
    before = {name: x.clone() for name, x in parts.items()}
    found = values_of(call, leaves, **keywords)
    assert found.entropy is not None
    gradients = torch.autograd.grad((found.log_probs, found.entropy), list(leaves.values()), call.upstream)
    for name, x in leaves.items():
        assert_same_bits(x.detach(), before[name], f"{name} after forward and backward")
    return {
        "log_probs": found.log_probs.detach(),
        "entropy": found.entropy.detach(),
        **found.metrics,
        **{f"d {name}": gradient for name, gradient in zip(leaves, gradients, strict=True)},
    }


def evaluate(call: Call) -> Results:
    """On one rank, and held against the truth."""
    results = results_of(call, call.inputs)
    assert_true(call, results)
    return results


def _dense(call: Call, function: Callable[..., ref.Dense], inputs: dict[str, Tensor]) -> ref.Dense:
    g_lp, g_h = call.upstream
    return function(**inputs, target=call.target, grad_log_probs=g_lp, grad_entropy=g_h, **call.options)


def truth_of(call: Call) -> ref.Dense:
    return _dense(call, ref.truth_logits if "logits" in call.inputs else ref.truth_linear, call.inputs)


def assert_true(call: Call, results: Results) -> None:
    """As near the fp64 truth of the call's own inputs as eager is, values, metrics and gradients."""
    truth, inputs, mask = truth_of(call), dict(call.inputs), call.options.get("mask")
    how: dict[str, Any] = {}
    if "logits" in inputs:
        eager = values = _dense(call, ref.eager_logits, inputs)
    else:
        if mask is not None:  # eager computes masked rows: give it something to compute
            inputs["hidden"] = torch.where(mask[:, None], inputs["hidden"], 0.0)
        eager = _dense(call, ref.eager_linear, inputs)
        wide = {name: x.to(out_dtype(call.dtype)) for name, x in inputs.items()}
        values = _dense(call, ref.eager_linear, wide)
        terms = largest_terms(inputs["hidden"], inputs["weight"], inputs.get("bias"), call.options)
        how = head_gradients(call.dtype, terms)
    for name in ("log_probs", "entropy"):
        assert results[name].dtype == out_dtype(call.dtype)
        compare_values(results[name], getattr(truth, name), getattr(values, name), name)
    compare_metrics({name: results[name] for name in ref.METRICS}, truth, values, mask)
    for name in inputs:
        assert results[f"d {name}"].dtype == call.dtype
        compare_gradient(name, results[f"d {name}"], truth, eager, **how)


# --- how two sides compare ---


def assert_same(results: Results, others: Results, names: tuple[str, ...] | None = None) -> None:
    """To the bit, all of them or those named."""
    for name in names or results:
        assert_same_bits(results[name], others[name], name)


def assert_close(call: Call, results: Results, others: Results) -> None:
    """Within what rounding may do to two correct results of this call."""
    for name, bound in rounding(call).items():
        error = (results[name].double() - others[name].double()).abs()
        worst = torch.unravel_index((error - bound).argmax(), error.shape)
        assert bool((error <= bound).all()), (
            f"{name}: {float(error[worst]):.4g} apart, allowed {float(bound[worst]):.4g}, "
            f"at {tuple(int(i) for i in worst)}"
        )


def assert_within_8_ulp(call: Call, results: Results, others: Results) -> None:
    """Values and metrics of the same inputs, split otherwise: what is promised of each of them."""
    for name in ("log_probs", "entropy", *ref.METRICS):
        excess = (results[name] - others[name]).abs() - eight_ulp(call)
        assert bool((excess <= 0).all()), (
            f"{name}: {float(excess.max()):.4g} more than 8 ulp of the largest |z|"
        )


def eight_ulp(call: Call) -> Tensor:
    """8 ulp of each row's largest |z|, [N]."""
    z = z_of(call)
    largest = torch.where(z.isfinite(), z, 0.0).abs().amax(-1)
    return 8 * torch.finfo(out_dtype(call.dtype)).eps * torch.exp2(largest.log2().floor())


def rounding(call: Call) -> dict[str, Tensor]:
    """How far apart two correct results may be, by name.

    Values: 8 ulp of the row's largest |z|. The varentropy, E (z-m)² - (E (z-m))², has ulps of those squares,
    and an error e of z moves it by up to 2 e E |deviation|. Gradients: p (a + b ln p) + c onehot inherits the
    errors of ln p and of the entropy, relative to the magnitudes of its terms; a sum of n products adds at
    most n ulp of the sum of their magnitudes; each side is rounded to the input's dtype.
    """
    truth, z = truth_of(call), z_of(call)
    unit = torch.finfo(out_dtype(call.dtype)).eps
    of_values = eight_ulp(call)
    bounds = dict.fromkeys(("log_probs", "entropy", *ref.METRICS), of_values)
    p = torch.softmax(z, -1)
    squares = (truth.entropy + truth.metrics["max_prob"].log()).square() + truth.metrics["varentropy"]
    deviation = 2 * truth.metrics["varentropy"].sqrt()
    bounds["varentropy"] = of_values * deviation.clamp(min=1.0) + 8 * unit * squares
    slope = call.options.get("scale", 1.0) / torch.as_tensor(call.options.get("temperature", 1.0))
    error = of_values + 8 * unit
    if "hidden" in call.inputs:  # the logits are computed again in backward, in another order of terms
        terms = call.inputs["hidden"].double().abs() @ call.inputs["weight"].double().abs().T
        error = error + call.inputs["weight"].shape[1] * unit * terms.amax(-1)
    uncertain = 2 * call.upstream[1].double().abs()[:, None] * p * slope.reshape(-1, 1).abs()
    of_logits = error[:, None] * (_sizes_of_logits(call) + uncertain)
    if "logits" in call.inputs:
        half = torch.finfo(call.dtype).eps * truth.gradients["logits"].abs()
        return {**bounds, "d logits": of_logits + half}
    h, w = call.inputs["hidden"].double().abs(), call.inputs["weight"].double().abs()
    of_sums = {
        "hidden": of_logits @ w + w.shape[0] * unit * truth.sizes["hidden"],
        "weight": of_logits.T @ h + h.shape[0] * unit * truth.sizes["weight"],
        "bias": of_logits.sum(0) + h.shape[0] * unit * truth.sizes["bias"],
    }
    for name in call.inputs:
        rounded = torch.finfo(call.dtype).eps * truth.gradients[name].abs()
        bounds[f"d {name}"] = of_sums[name] + rounded
    return bounds


def raw_logits(call: Call) -> Tensor:
    """[N, V] in fp64."""
    if "logits" in call.inputs:
        return call.inputs["logits"].double()
    logits = call.inputs["hidden"].double() @ call.inputs["weight"].double().T
    return logits if "bias" not in call.inputs else logits + call.inputs["bias"].double()


def z_of(call: Call) -> Tensor:
    """[N, V] in fp64, columns beyond vocab_size at -inf."""
    z = raw_logits(call) * call.options.get("scale", 1.0)
    softcap = call.options.get("softcap")
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z / torch.as_tensor(call.options.get("temperature", 1.0)).double().reshape(-1, 1)
    beyond = torch.arange(z.shape[1]) >= call.options.get("vocab_size", z.shape[1])
    return z.masked_fill(beyond, -torch.inf)


def _sizes_of_logits(call: Call) -> Tensor:
    """The sizes of the terms of the raw logits' gradient, [N, V]."""
    of_logits = replace(call, inputs={"logits": raw_logits(call)})
    return truth_of(of_logits).sizes["logits"]

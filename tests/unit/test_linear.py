"""The fused head against the fp64 truth of hidden @ weight.T, on one rank.

One thing varies at a time around a base case (24 tokens, 517 columns, hidden 32), for every dtype.
"""

from __future__ import annotations

import pytest
import torch

import mcore_entropy as me
from tests import reference as ref
from tests.unit.cases import (
    DTYPES,
    INF,
    LAYOUTS,
    NAN,
    N,
    check_linear,
    compare_gradient,
    dtype_name,
    head_gradients,
    largest_terms,
    leaf,
    make_linear,
    make_target,
    make_upstream,
)

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_hidden(dtype: torch.dtype, layout: str) -> None:
    hidden, weight, _ = make_linear(dtype)
    hidden = LAYOUTS[layout](hidden)
    ours, _ = check_linear(hidden, weight, make_target(hidden.shape[:-1], 517), chunk_size=7)
    assert ours.log_probs.shape == hidden.shape[:-1]


@every_dtype
@pytest.mark.parametrize("layout", ["column major", "offset view", "every other column"])
def test_layouts_of_weight(dtype: torch.dtype, layout: str) -> None:
    hidden, weight, bias = make_linear(dtype)
    check_linear(hidden, LAYOUTS[layout](weight), make_target((N,), 517), bias=bias.repeat(2)[::2])


@every_dtype
@pytest.mark.parametrize(
    ("rows", "columns", "width"),
    [
        pytest.param(N, 1, 32, marks=pytest.mark.uninterpreted("log-probs of 0 only to 8 ulp of z")),
        (N, 2, 1),
        (1, 1031, 7),
        (N, 4099, 33),
        (301, 517, 16),
    ],
)
def test_sizes(dtype: torch.dtype, rows: int, columns: int, width: int) -> None:
    hidden, weight, bias = make_linear(dtype, rows=rows, columns=columns, width=width)
    check_linear(hidden, weight, make_target((rows,), columns), bias=bias)


@every_dtype
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    "transform",
    [
        {"scale": 0.4},
        {"softcap": 5.0},
        {"scale": 1.7, "softcap": 30.0},
        {"scale": 1.0, "softcap": None},
    ],
    ids=str,
)
def test_transforms(dtype: torch.dtype, with_bias: bool, transform: dict[str, float]) -> None:
    hidden, weight, bias = make_linear(dtype, spread=6.0)
    options = {"temperature": 0.6, "chunk_size": 7, "bias": bias if with_bias else None}
    check_linear(hidden, weight, make_target((N,), 517), **options, **transform)


@every_dtype
@pytest.mark.parametrize("temperature", [0.6, 1, 1.5, "per token"])
def test_temperature(dtype: torch.dtype, temperature) -> None:
    hidden, weight, _ = make_linear(dtype)
    hidden = LAYOUTS["sb view of bs"](hidden)
    if temperature == "per token":
        temperature = torch.linspace(0.6, 1.5, N).reshape(4, 6).t()
    check_linear(hidden, weight, make_target(hidden.shape[:-1], 517), temperature=temperature)


# hidden's gradient cancels to 0 there, and the rounding of gradient tiles, if they are rounded, is all of it.
CANCELLING = pytest.mark.uninterpreted("no yardstick for gradient tiles in half precision")


@every_dtype
@pytest.mark.parametrize(
    ("offset", "spread"),
    [pytest.param(500, 1, marks=CANCELLING), pytest.param(-500, 1, marks=CANCELLING), (0, 100), (0, 0.01)],
)
def test_offset_and_spread(dtype: torch.dtype, offset: float, spread: float) -> None:
    hidden, weight, _ = make_linear(dtype, spread=spread)
    hidden[:, 0], weight[:, 0] = 1.0, offset  # exact in every dtype
    check_linear(hidden, weight, make_target((N,), 517))


@every_dtype
@pytest.mark.parametrize("chunk_size", [1, 7, N, N + 1000, None])
def test_chunk_sizes(dtype: torch.dtype, chunk_size: int | None) -> None:
    hidden, weight, bias = make_linear(dtype)
    mask = torch.arange(N) % 5 != 3
    options = {"mask": mask, "chunk_size": chunk_size, "metrics": ref.METRICS}
    check_linear(hidden, weight, make_target((N,), 517), bias=bias, **options)


@pytest.mark.parametrize(
    "settings",
    [{"workspace_mib": 1}, {"workspace_mib": 64}, {"compact_rows": False}, {"backend": "auto"}],
    ids=str,
)
def test_execution_is_how_never_what(settings: dict[str, object]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        # [300, 4099] fp32 logits are 4.7 MiB: more than one workspace of 1 MiB.
        hidden, weight, bias = make_linear(dtype, rows=300, columns=4099)
        target, mask = make_target((300,), 4099), torch.arange(300) % 7 != 0
        options = {"bias": bias, "mask": mask, "temperature": 0.7}
        plain, _ = check_linear(hidden, weight, target, **options)
        ours, _ = check_linear(hidden, weight, target, execution=me.Execution(**settings), **options)
        largest = (
            (torch.nn.functional.linear(hidden.float(), weight.float(), bias.float()) / 0.7).abs().amax(-1)
        )
        bound = 8 * torch.finfo(torch.float32).eps * largest
        assert bool(((ours.log_probs - plain.log_probs).abs() <= bound).all())
        assert bool(((ours.entropy - plain.entropy).abs() <= bound).all())


@pytest.mark.uninterpreted("follows the torch backend's tiles, products of which round alike in eager")
@every_dtype
@pytest.mark.parametrize("case", ["plain", "ascending", "-inf", "softcap", "bad rows"])
def test_partial_statistics_of_column_tiles_merge(dtype: torch.dtype, case: str) -> None:
    """1 MiB holds a few hundred of 4099 columns for 300 rows: maxima rise, fall or are missing in a tile."""
    hidden, weight, bias = make_linear(dtype, rows=300, columns=4099, width=8)
    target = torch.linspace(0, 3999, 300).long()
    options = {"temperature": torch.linspace(0.6, 1.5, 300), "vocab_size": 4000, "metrics": ref.METRICS}
    if case == "ascending":
        bias = torch.linspace(-40, 40, 4099).to(dtype)
    elif case == "-inf":
        bias[:1500], bias[3000:] = -INF, -INF
        target = target.clamp(1500, 2999)
    elif case == "softcap":
        options["softcap"] = 4.0
    elif case == "bad rows":
        hidden[[0, 150, 299], 3] = NAN
    check_linear(hidden, weight, target, bias=bias, execution=me.Execution(workspace_mib=1), **options)


@every_dtype
@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias", "hidden and bias"])
def test_frozen_inputs(dtype: torch.dtype, wanted: str) -> None:
    tensors = dict(zip(("hidden", "weight", "bias"), make_linear(dtype), strict=True))
    target, (g_lp, g_h) = make_target((N,), 517), make_upstream((N,), dtype)
    _, all_gradients = check_linear(target=target, **tensors)
    for name, x in tensors.items():
        tensors[name] = leaf(x) if name in wanted else x.detach()
    both = me.linear_log_probs_and_entropy(tensors["hidden"], tensors["weight"], target, bias=tensors["bias"])
    torch.autograd.backward((both.log_probs, both.entropy), (g_lp, g_h))
    for name, x in tensors.items():
        if name in wanted:
            assert x.grad is not None
            tolerance = 4 * torch.finfo(dtype).eps
            atol = tolerance * float(all_gradients[name].abs().max())
            torch.testing.assert_close(x.grad, all_gradients[name], rtol=tolerance, atol=atol)
        else:
            assert x.grad is None


def test_nothing_to_differentiate() -> None:
    hidden, weight, _ = make_linear(torch.float32)
    frozen = me.linear_log_probs_and_entropy(hidden, weight, make_target((N,), 517))
    with torch.no_grad():
        quiet = me.linear_log_probs_and_entropy(leaf(hidden), leaf(weight), make_target((N,), 517))
    for both in (frozen, quiet):
        assert both.entropy is not None
        assert not both.log_probs.requires_grad
        assert not both.entropy.requires_grad


@every_dtype
@pytest.mark.parametrize("asked", ["log_probs", "entropy"])
def test_gradient_of_one_result_alone(dtype: torch.dtype, asked: str) -> None:
    hidden, weight, _ = make_linear(dtype)
    target, (g, _) = make_target((N,), 517), make_upstream((N,), dtype)
    leaves = {"hidden": leaf(hidden), "weight": leaf(weight)}
    both = me.linear_log_probs_and_entropy(*leaves.values(), target, entropy=asked == "entropy")
    assert (both.entropy is None) == (asked == "log_probs")
    found = torch.autograd.grad(getattr(both, asked), list(leaves.values()), g)
    truth = ref.truth_linear(hidden, weight, target, **{f"grad_{asked}": g})
    eager = ref.eager_linear(hidden, weight, target, **{f"grad_{asked}": g})
    how = head_gradients(dtype, largest_terms(hidden, weight, None, {}))
    for name, gradient in zip(leaves, found, strict=True):
        compare_gradient(name, gradient, truth, eager, **how)


@every_dtype
@pytest.mark.parametrize("rows", [(0,), (2, 0), (0, 3)])
def test_no_tokens(dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    hidden, weight, bias = torch.zeros(*rows, 32, dtype=dtype), *make_linear(dtype)[1:]
    target, mask = torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.bool)
    for options in ({}, {"mask": mask, "chunk_size": 3, "temperature": torch.ones(rows)}):
        ours, gradients = check_linear(hidden, weight, target, bias=bias, **options)
        assert ours.log_probs.shape == rows
        assert gradients["hidden"].shape == hidden.shape
        assert not gradients["weight"].any()
        assert not gradients["bias"].any()


@pytest.mark.parametrize(
    "size",
    # The bias's gradient is a sum of entries of both signs: rounded ones are off by more than this.
    [1e-4, 1.0, pytest.param(2e5, marks=pytest.mark.uninterpreted("fp32 tiles only"))],
)
def test_half_precision_gradients_neither_vanish_nor_overflow(size: float) -> None:
    """fp16 holds 6e-8 to 65504: a gradient tile of small p times a small upstream gradient vanishes in
    it, and a loss scale of 2e5 overflows, unless the tile is scaled. Judged against the truth."""
    hidden, weight, bias = make_linear(torch.float16, columns=4099)
    hidden, weight = hidden / 8, weight / 8
    target, (g_lp, g_h) = make_target((N,), 4099), make_upstream((N,), torch.float16)
    leaves = [leaf(x) for x in (hidden, weight, bias)]
    both = me.linear_log_probs_and_entropy(leaves[0], leaves[1], target, bias=leaves[2])
    upstream = {"grad_log_probs": g_lp * size, "grad_entropy": g_h * size}
    truth = ref.truth_linear(hidden, weight, target, bias=bias, **upstream)
    found = torch.autograd.grad((both.log_probs, both.entropy), leaves, tuple(upstream.values()))
    for name, gradient in zip(("hidden", "weight", "bias"), found, strict=True):
        expected = truth.gradients[name]
        fits = expected.abs() < 65504
        assert bool(gradient[fits].isfinite().all()), name
        error = (gradient.double() - expected)[fits].abs()
        # Two roundings to fp16, of the tile and of the result; 3e-8 is half of fp16's smallest step.
        allowed = 2 * 2**-11 * (expected[fits].abs() + expected[fits].square().mean().sqrt()) + 3.1e-8
        assert bool((error <= allowed).all()), (name, float((error / allowed).max()))


@pytest.mark.uninterpreted("holds only where gradient tiles stay in fp32: the torch backend on the CPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
def test_weight_and_bias_gradients_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """Over 128 chunks, a sum in half precision would be off by many roundings; this one is rounded once."""
    hidden, weight, bias = make_linear(dtype, rows=512, spread=0.3)
    hidden[:, 0] = 1.0
    target = torch.zeros(512, dtype=torch.long)
    leaves = [leaf(x) for x in (weight, bias)]
    both = me.linear_log_probs_and_entropy(hidden, leaves[0], target, bias=leaves[1], chunk_size=4)
    found = torch.autograd.grad(both.log_probs.sum(), leaves)
    truth = ref.truth_linear(hidden, weight, target, bias=bias, grad_log_probs=torch.ones(512))
    for name, gradient in zip(("weight", "bias"), found, strict=True):
        expected = truth.gradients[name]
        error = (gradient.double() - expected).abs()
        allowed = torch.finfo(dtype).eps * (0.75 * expected.abs() + 0.25 * expected.square().mean().sqrt())
        assert bool((error <= allowed).all()), (name, float((error / allowed).max()))


def test_nan_in_a_weight_row_is_everybodys() -> None:
    hidden, weight, _ = make_linear(torch.float32)
    weight[100, 3] = NAN
    both = me.linear_log_probs_and_entropy(hidden, weight, make_target((N,), 517))
    assert both.entropy is not None
    assert bool(both.entropy.isnan().all())
    assert bool(both.log_probs.isnan().all())
    fine = me.linear_log_probs_and_entropy(hidden, weight, make_target((N,), 100), vocab_size=100)
    assert bool(fine.log_probs.isfinite().all())

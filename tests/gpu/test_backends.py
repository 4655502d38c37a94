"""Both backends on a CUDA device: the same comparisons as on the CPU, where the products differ.

Half-precision operands go through products with fp32 results there, and gradient tiles are rounded to
the operands' dtype (fp16 ones after scaling). Legend: N tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_entropy as me
from mcore_entropy import backends
from mcore_entropy.backends.pytorch.backend import gradient_operand
from mcore_entropy.functional.linear import fused_head
from mcore_entropy.functional.linear_passes import LinearOptions
from mcore_entropy.functional.problem import Keywords
from mcore_entropy.statistics import Wanted
from tests import reference as ref
from tests.comparison import assert_same_bits
from tests.unit import cases

every_dtype = pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.dtype_name)


@pytest.fixture(params=["torch", "triton"], autouse=True)
def _backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test twice; Triton's is what ``"auto"`` chooses on a GPU, for all but fp64."""
    if request.param == "torch":
        monkeypatch.setattr(backends, "why_not_triton", lambda *_: "the test switched it off")
    chosen = backends.select(me.Execution(), torch.device("cuda"), torch.bfloat16).name
    assert chosen == request.param


def on_gpu(*tensors: Tensor) -> list[Tensor]:
    return [x.cuda() for x in tensors]


def upstream_on_gpu(rows: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    g_lp, g_h = on_gpu(*cases.make_upstream(rows, dtype))
    return g_lp, g_h


@every_dtype
@pytest.mark.parametrize("function", cases.FUNCTIONS)
@pytest.mark.parametrize("temperature", [1.0, 0.6, "per token"])
def test_logits(function: str, dtype: torch.dtype, temperature: float | str) -> None:
    x, target = on_gpu(cases.make_logits(4099, dtype), cases.make_target((cases.N,), 4099))
    tau = temperature if isinstance(temperature, float) else torch.linspace(0.5, 2, cases.N, device="cuda")
    mask = torch.arange(cases.N, device="cuda") % 3 != 0
    upstream = upstream_on_gpu((cases.N,), dtype)
    with torch.device("cuda"):
        cases.check_logits(function, x, target, upstream=upstream, chunk_size=7, temperature=tau, mask=mask)


@every_dtype
@pytest.mark.parametrize("rows", [24, 3000])
@pytest.mark.parametrize("softcap", [None, 10.0])
def test_linear(dtype: torch.dtype, rows: int, softcap: float | None) -> None:
    inputs = cases.make_linear(dtype, rows=rows, columns=4099, width=256)
    hidden, weight, bias = on_gpu(*inputs)
    (target,) = on_gpu(cases.make_target((rows,), 4099))
    upstream = upstream_on_gpu((rows,), dtype)
    mask = torch.arange(rows, device="cuda") % 3 != 0
    with torch.device("cuda"):
        cases.check_linear(
            hidden, weight, target, bias=bias, upstream=upstream, chunk_size=1000, softcap=softcap, mask=mask
        )


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e4])
def test_fp16_gradients_are_scaled(size: float) -> None:
    """Upstream gradients of a mean over many tokens are far below fp16's smallest normal number, 6e-5."""
    hidden, weight, _ = on_gpu(*cases.make_linear(torch.float16, rows=256, columns=4099, width=256))
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    (target,) = on_gpu(cases.make_target((256,), 4099))
    g_lp, g_h = upstream_on_gpu((256,), torch.float16)
    # A weight that wants fp32 gradients: fp16 results could not hold these.
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    with torch.device("cuda"):
        truth = ref.truth_linear(hidden, weight, target, grad_log_probs=g_lp, grad_entropy=g_h)
    keywords = Keywords(target=target, wanted=Wanted())
    result = fused_head(hidden, weight, None, LinearOptions(accumulate_into_main_grad=True), keywords)
    torch.autograd.backward([result.log_probs, result.entropy], [size * g_lp, size * g_h])
    error = (weight.main_grad.double() / size - truth.gradients["weight"]).norm()
    assert error / truth.gradients["weight"].norm() < 2**-10  # one rounding of each tile to fp16


def test_a_nan_does_not_decide_the_scale_of_its_neighbours() -> None:
    tile = torch.tensor([[torch.nan, 1.0], [1000.0, -900.0]], device="cuda")
    operand, factor = gradient_operand(tile, torch.float16)
    assert torch.equal((operand.float() * factor)[1], tile[1])


def test_invalid_target_is_nan_without_a_sync() -> None:
    x, target = on_gpu(cases.make_logits(517, torch.float32), cases.make_target((cases.N,), 517))
    target[3], target[5], target[7] = 517, -1, -100
    x.requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = me.vocab_parallel_log_probs_and_entropy(
            x, target, execution=me.Execution(compact_rows=False), mask=target != 1
        )
        (result.log_probs.sum() + result.entropy.sum()).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    bad = torch.zeros_like(target, dtype=torch.bool)
    bad[3] = bad[5] = True
    assert torch.equal(result.log_probs.isnan(), bad)
    assert torch.equal(x.grad.isnan().any(1), bad)
    assert result.log_probs[7] == 0
    assert not result.entropy.isnan().any()


def test_checks_name_an_invalid_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCORE_ENTROPY_CHECKS", "1")
    x, target = on_gpu(cases.make_logits(517, torch.float32), cases.make_target((cases.N,), 517))
    target[3] = 517
    with pytest.raises(ValueError, match=r"target.*517 at token 3"):
        me.vocab_parallel_log_probs_and_entropy(x, target)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("compact", [False, True])
def test_host_syncs(compact: bool, masked: bool) -> None:
    """compact_rows costs one sync in forward with a mask and one in backward; off, none."""
    hidden, weight, _ = on_gpu(*cases.make_linear(torch.bfloat16, rows=256, columns=4099, width=256))
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    (target,) = on_gpu(cases.make_target((256,), 4099))
    mask = torch.arange(256, device="cuda") % 2 == 0 if masked else None
    upstream = upstream_on_gpu((256,), torch.bfloat16)
    execution = me.Execution(compact_rows=compact)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as forward:
            warnings.simplefilter("always")
            result = me.linear_log_probs_and_entropy(
                hidden, weight, target, mask=mask, chunk_size=64, execution=execution
            )
        with warnings.catch_warnings(record=True) as backward:
            warnings.simplefilter("always")
            torch.autograd.backward([result.log_probs, result.entropy], upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    counts = [sum("synchroniz" in str(w.message) for w in caught) for caught in (forward, backward)]
    assert counts == [int(compact and masked), int(compact)]


def test_autocast() -> None:
    hidden, weight, _ = on_gpu(*cases.make_linear(torch.float32, rows=256, columns=4099, width=256))
    (target,) = on_gpu(cases.make_target((256,), 4099))
    with torch.autocast("cuda", torch.bfloat16):
        result = me.linear_log_probs_and_entropy(hidden, weight, target)
    rounded = [x.bfloat16().double() for x in (hidden, weight)]
    log_p = torch.log_softmax(rounded[0] @ rounded[1].t(), -1)
    torch.testing.assert_close(result.entropy.double(), -(log_p.exp() * log_p).sum(-1), rtol=2e-6, atol=2e-5)


def test_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation that torch calls nondeterministic, and the same bits in every run."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    inputs = on_gpu(*cases.make_linear(torch.bfloat16, rows=3000, columns=4099, width=256))
    (target,) = on_gpu(cases.make_target((3000,), 4099))
    mask = torch.arange(3000, device="cuda") % 3 != 0
    upstream = upstream_on_gpu((3000,), torch.bfloat16)

    def run() -> list[Tensor]:
        hidden, weight, bias = (x.clone().requires_grad_() for x in inputs)
        result = me.linear_log_probs_and_entropy(hidden, weight, target, bias=bias, mask=mask)
        torch.autograd.backward([result.log_probs, result.entropy], upstream)
        return [result.log_probs, result.entropy, hidden.grad, weight.grad, bias.grad]

    torch.use_deterministic_algorithms(True)
    try:
        first, *others = [run() for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        for name, a, b in zip(
            ("log_probs", "entropy", "hidden", "weight", "bias"), first, other, strict=True
        ):
            assert_same_bits(a.detach(), b.detach(), name)

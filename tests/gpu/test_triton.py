"""What only the Triton backend promises: the same bits under any split, its two ways to load, CUDA graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import mcore_entropy as me
from mcore_entropy.backends.triton import head_statistics, machine, operands
from tests.comparison import assert_same_bits
from tests.unit import cases

Outputs = dict[str, Tensor]


@pytest.fixture(params=["descriptors", "pointers"])
def _way_to_load(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same GPU as it is, and as one whose blocks are addressed by pointers (sm_80, sm_86, sm_89)."""
    if request.param == "pointers":
        here = machine.machine(torch.device("cuda", 0))
        older = dataclasses.replace(here, tma=False, large_tiles=False)
        monkeypatch.setattr(operands, "machine", lambda _: older)
        monkeypatch.setattr(head_statistics, "machine", lambda _: older)


both_ways = pytest.mark.usefixtures("_way_to_load")


def make(
    dtype: torch.dtype, rows: int = 700, columns: int = 4099, width: int = 264
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    hidden, weight, _ = cases.make_linear(dtype, rows=rows, columns=columns, width=width)
    target = cases.make_target((rows,), columns)
    g_lp, g_h = cases.make_upstream((rows,), dtype)
    return hidden.cuda(), weight.cuda(), target.cuda(), (g_lp.cuda(), g_h.cuda())


def run(
    hidden: Tensor, weight: Tensor, target: Tensor, upstream: tuple[Tensor, Tensor], **keywords: object
) -> Outputs:
    leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    result = me.linear_log_probs_and_entropy(*leaves, target, **keywords)  # type: ignore[arg-type]
    torch.autograd.backward([result.log_probs, result.entropy], upstream)
    return {
        "log_probs": result.log_probs.detach(),
        "entropy": result.entropy.detach(),
        "hidden": leaves[0].grad,
        "weight": leaves[1].grad,
    }


# bf16 or fp16; H a number of whole steps, aligned, odd; nothing kept, some tiles, all. (A kernel takes
# seconds to compile: not every combination.)
HEADS = [
    (torch.bfloat16, 264, 0, {}),
    (torch.bfloat16, 264, 1, {"softcap": 10.0, "scale": 0.5, "temperature": 0.7}),
    (torch.bfloat16, 77, 0, {}),
    (torch.float16, 256, 100, {}),
]


@both_ways
@pytest.mark.parametrize(("dtype", "width", "budget", "transform"), HEADS)
def test_head(dtype: torch.dtype, width: int, budget: int, transform: dict[str, float]) -> None:
    hidden, weight, bias = (x.cuda() for x in cases.make_linear(dtype, rows=300, columns=4099, width=width))
    target = cases.make_target((300,), 4099).cuda()
    mask = torch.arange(300, device="cuda") % 3 != 0
    upstream = tuple(g.cuda() for g in cases.make_upstream((300,), dtype))
    execution = me.Execution(backend="triton", logits_budget_mib=budget)
    with torch.device("cuda"):
        cases.check_linear(
            hidden, weight, target, upstream=upstream, mask=mask, execution=execution, chunk_size=128,
            bias=bias if transform else None, metrics=("varentropy",) if transform else (), **transform,
        )  # fmt: skip


@both_ways
@pytest.mark.parametrize("width", [264, 2048])
def test_same_bits_under_any_split(width: int) -> None:
    """A token's values do not depend on its chunk, its neighbours, or what is left out beside it."""
    hidden, weight, target, upstream = make(torch.bfloat16, width=width)
    whole = run(hidden, weight, target, upstream)
    mask = torch.arange(700, device="cuda") % 3 != 0
    order = torch.randperm(700, device="cuda")
    for name in ("log_probs", "entropy"):
        for size in (1, 100, 513):
            chunked = run(
                hidden[: 2 * size],
                weight,
                target[: 2 * size],
                tuple(g[: 2 * size] for g in upstream),
                chunk_size=size,
            )
            assert_same_bits(chunked[name], whole[name][: 2 * size], f"{name} in chunks of {size}")
        masked = run(hidden, weight, target, upstream, mask=mask)
        assert_same_bits(masked[name][mask], whole[name][mask], f"{name} with a mask")
        shuffled = run(hidden[order], weight, target[order], upstream)
        assert_same_bits(shuffled[name], whole[name][order], f"{name} among other neighbours")


@both_ways
@pytest.mark.parametrize("budget", [0, 100])
def test_same_bits_in_every_run(budget: int) -> None:
    inputs = make(torch.bfloat16, rows=3000, columns=32001)
    execution = me.Execution(logits_budget_mib=budget)
    first, *others = [run(*inputs, execution=execution) for _ in range(4)]
    for other in others:
        for name, value in first.items():
            assert_same_bits(value, other[name], name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=cases.dtype_name)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("compact", [False, True])
def test_logits_layouts(layout: str, dtype: torch.dtype, compact: bool) -> None:
    x = cases.LAYOUTS[layout](cases.make_logits(4999, dtype).cuda())
    target = cases.make_target(x.shape[:-1], 4999).cuda()
    mask = (torch.arange(cases.N, device="cuda") % 3 != 0).view(x.shape[:-1])
    upstream = tuple(g.cuda() for g in cases.make_upstream(x.shape[:-1], dtype))
    with torch.device("cuda"):
        cases.check_logits(
            "log-probs and entropy", x, target, upstream=upstream, mask=mask,
            execution=me.Execution(backend="triton", compact_rows=compact),
            metrics=("sum_pi_squared", "varentropy", "max_prob"),
        )  # fmt: skip


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    """fullgraph=True, forward and backward, to the bit."""
    inputs = make(torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(me.linear_log_probs_and_entropy, fullgraph=True, backend=backend)
    expected = run(*inputs)
    leaves = [x.detach().requires_grad_() for x in inputs[:2]]
    result = compiled(*leaves, inputs[2])
    torch.autograd.backward([result.log_probs, result.entropy], inputs[3])
    ours = [result.log_probs.detach(), result.entropy.detach(), *(x.grad for x in leaves)]
    for (name, value), found in zip(expected.items(), ours, strict=True):
        assert_same_bits(found, value, name)


@pytest.fixture
def stream() -> Iterator[torch.cuda.Stream]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield side
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize("form", ["head", "logits"])
def test_cuda_graph(form: str, stream: torch.cuda.Stream) -> None:
    """Capture forward and backward once, replay them on other inputs."""
    hidden, weight, target, upstream = make(torch.bfloat16)
    mask = torch.arange(700, device="cuda") % 3 != 0
    execution = me.Execution(compact_rows=False)
    if form == "logits":
        hidden = hidden @ weight.t()
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]

    def step() -> list[Tensor]:
        for x in leaves:
            x.grad = None
        if form == "head":
            result = me.linear_log_probs_and_entropy(*leaves, target, mask=mask, execution=execution)
        else:
            result = me.vocab_parallel_log_probs_and_entropy(
                leaves[0], target, mask=mask, execution=execution
            )
        torch.autograd.backward([result.log_probs, result.entropy], upstream)
        grads = [x.grad for x in leaves if x.grad is not None]
        return [result.log_probs.detach(), result.entropy.detach(), *grads]

    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    with torch.no_grad():
        leaves[0].copy_(leaves[0].flip(0) * 0.5)
    target.copy_(target.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    replayed = [x.clone() for x in captured]
    for ours, expected in zip(replayed, step(), strict=True):
        assert_same_bits(ours, expected, "replayed")

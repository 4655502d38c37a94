"""DTensors on 2 and 4 ranks: values and gradients against the fp64 truth of the whole tensors.

Every rank puts its results and gradients together to whole tensors, by their placements; those of all ranks
have to be the same to the bit, which a gradient that is partial on some rank would not be.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

import mcore_entropy as me
from mcore_entropy.adapters import dtensor as adapter
from mcore_entropy.functional.linear import fused_head
from tests import reference as ref
from tests.comparison import assert_same_bits
from tests.distributed.cases import Case, Whole, build
from tests.distributed.test_parity import check
from tests.ranks import run_ranks

V = 97  # over 2 ranks 49 and 48, over 4 ranks 25, 25, 25 and 22
WHOLE, SEQUENCE, BATCH, LAST = Replicate(), Shard(0), Shard(1), Shard(2)  # of hidden and logits [8, 3, *]


@dataclass(frozen=True)
class Spread:
    """A case, and how the mesh holds its logits or hidden states; `case.shards` is the whole vocabulary."""

    case: Case
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]
    names: tuple[str, ...] | None = ("tp",)
    per_token: str = "plain"  # or "DTensor"
    hidden: str = "DTensor"  # or "plain"
    checks: str = "0"  # MCORE_ENTROPY_CHECKS
    megatron: bool = False  # a process in which Megatron's groups are initialised

    @property
    def linear(self) -> bool:
        return self.case.form == "linear"

    @property
    def tokens(self) -> tuple[Placement, ...]:
        """How the mesh holds the results."""
        if not self.linear:
            return tuple(WHOLE if p in (LAST, Shard(-1)) else p for p in self.placements)
        return (*self.placements[:-1], WHOLE)


def _spread(x: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    return distribute_tensor(x, mesh, placements, src_data_rank=None)  # every rank has the whole one


def _whole(x: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size) -> Tensor:
    """A result on the ranks, put together."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, mesh, placements, shape=shape, stride=stride).full_tensor()


def _megatron_initialised() -> types.ModuleType:
    stub: Any = types.ModuleType("megatron.core.parallel_state")
    stub.model_parallel_is_initialized = lambda: True
    stub.get_tensor_model_parallel_group = lambda check_initialized: dist.group.WORLD
    return stub


def _call(spread: Spread, inputs: dict[str, Tensor], given: dict[str, Any], mesh: DeviceMesh) -> Any:
    case, given = spread.case, dict(given)
    given |= {"chunk_size": case.chunk_size, "execution": me.Execution(compact_rows=case.compact_rows)}
    if case.form == "entropy":
        del given["target"]
        return adapter.dtensor_entropy(inputs["logits"], **given)
    given["metrics"] = case.metrics
    if not spread.linear:
        return adapter.dtensor_log_probs_and_entropy(inputs["logits"], **given)
    return adapter.dtensor_linear_log_probs_and_entropy(
        **inputs,
        **given,
        transform=None if case.softcap is None else me.LogitTransform(softcap=case.softcap),
        tp_mesh=mesh if spread.names is None else None,
    )


def _run_one(spread: Spread) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", spread.mesh, mesh_dim_names=spread.names)
    whole: Whole = build(spread.case)
    rows = (*(WHOLE,) * (mesh.ndim - 1), Shard(0))  # of weight and bias
    placements = {name: spread.placements if name in ("hidden", "logits") else rows for name in whole.inputs}
    inputs: dict[str, Tensor] = {
        name: _spread(x, mesh, placements[name]).requires_grad_() for name, x in whole.inputs.items()
    }
    if spread.hidden == "plain" and spread.linear:
        inputs["hidden"] = whole.inputs["hidden"].clone().requires_grad_()
    shape = whole.target.shape
    given: dict[str, Any] = {"target": whole.target, **whole.options}
    for name, x in given.items():
        if isinstance(x, Tensor):
            part = _spread(x, mesh, spread.tokens)
            given[name] = part if spread.per_token == "DTensor" else part.to_local()
    upstream = [_spread(g, mesh, spread.tokens).to_local() for g in whole.upstream]

    stubs = {"megatron.core.parallel_state": _megatron_initialised()} if spread.megatron else {}
    with (
        mock.patch.dict(sys.modules, stubs),
        mock.patch.dict("os.environ", MCORE_ENTROPY_CHECKS=spread.checks),
    ):
        results = _call(spread, inputs, given, mesh)
        if isinstance(results, Tensor):
            results = me.TokenStatistics(None, results, {})  # type: ignore[arg-type] # there are none
        pairs = [(v, g) for v, g in zip((results.log_probs, results.entropy), upstream, strict=True)]
        pairs = [(v, g) for v, g in pairs if v is not None]
        found = torch.autograd.grad([v for v, _ in pairs], list(inputs.values()), [g for _, g in pairs])

    values = {"log_probs": results.log_probs, "entropy": results.entropy, **results.metrics}
    answer = {}
    for name, value in values.items():
        if value is not None:
            assert type(value) is Tensor
            answer[name] = _whole(value.detach(), mesh, spread.tokens, shape)
    for (name, x), gradient in zip(inputs.items(), found, strict=True):
        assert type(gradient) is type(x)
        if isinstance(x, DTensor):
            expected = x.placements
            if name in ("weight", "bias"):  # sums over tokens, of which other ranks have others
                others = (WHOLE if p == WHOLE else Partial() for p in spread.tokens[:-1])
                expected = (*others, Shard(0))
            assert gradient.placements == expected, f"{name}: {gradient.placements}"
            gradient = gradient.full_tensor()
        answer[f"d {name}"] = gradient
    return answer


def _run(spreads: list[Spread]) -> list[dict[str, Any]]:
    return [_run_one(spread) for spread in spreads]


def _check_all(world_size: int, spreads: list[Spread]) -> None:
    by_rank = run_ranks(world_size, _run, spreads)
    for i, spread in enumerate(spreads):
        first, *others = (answers[i] for answers in by_rank)
        try:
            for rank, other in enumerate(others, 1):
                for name in first:
                    assert_same_bits(first[name], other[name], f"{name} on ranks 0 and {rank}")
            check(spread.case, [first])
        except AssertionError as error:
            raise AssertionError(f"{spread}: {error}") from error


def _logits(columns: int = V, **options: Any) -> Case:
    return Case((columns,), **options)


def _head(columns: int = V, **options: Any) -> Case:
    return Case((columns,), "linear", **options)


@pytest.mark.parametrize("ranks", [2, 4])
def test_logits(ranks: int) -> None:
    base = Spread(_logits(chunk_size=5), (ranks,), (Shard(-1),))
    cases = [
        _logits(),
        _logits(96),
        _logits(vocab_size=60, metrics=ref.METRICS),
        _logits(form="entropy", chunk_size=5),
        _logits(form="entropy", layout="sb", mask="half", temperature=0.6),
        _logits(dtype=torch.bfloat16, temperature="per token", target="ignored"),
        _logits(dtype=torch.float64, mask="half", metrics=ref.METRICS, chunk_size=7),
    ]
    spreads = [replace(base, case=case) for case in cases]
    spreads += [replace(s, per_token="DTensor", checks="1") for s in spreads[2:]]
    _check_all(ranks, spreads)


def test_a_rank_without_columns() -> None:
    """The last of 4 ranks: the others hold 1, 1, 1 or 2, 2, 1 or 3, 3, 3."""
    spreads = [
        Spread(case, (4,), (placement,), checks=checks, hidden="plain")
        for columns in (3, 5, 9)
        for case, placement in (
            (_logits(columns, metrics=ref.METRICS), LAST),
            (_head(columns, bias=True, chunk_size=5), WHOLE),
        )
        for checks in ("0", "1")
    ]
    _check_all(4, spreads)


def test_logits_whose_tokens_are_sharded_as_well() -> None:
    base = Spread(_logits(), (2, 2), (BATCH, LAST), ("dp", "tp"))
    _check_all(
        4,
        [
            base,
            replace(
                base, case=_logits(mask="half", temperature="per token", chunk_size=5), per_token="DTensor"
            ),
            replace(base, placements=(LAST, SEQUENCE), names=("tp", "cp")),
            replace(base, placements=(WHOLE, LAST), names=None),
            replace(base, placements=(SEQUENCE, SEQUENCE), megatron=True),
        ],
    )


def test_a_replicated_vocabulary_is_one_rank_s_own() -> None:
    """Beside an initialised Megatron too, whose group would take each rank's logits for a shard."""
    base = Spread(_logits(metrics=ref.METRICS), (2,), (WHOLE,), megatron=True)
    cases = (base.case, _logits(form="entropy", chunk_size=5))
    _check_all(2, [replace(base, case=c, placements=(p,)) for c in cases for p in (WHOLE, SEQUENCE, BATCH)])


@pytest.mark.parametrize("ranks", [2, 4])
def test_head(ranks: int) -> None:
    base = Spread(_head(chunk_size=5), (ranks,), (WHOLE,))
    cases = [
        _head(),
        _head(96, bias=True),
        _head(vocab_size=60, metrics=ref.METRICS, temperature="per token"),
        _head(dtype=torch.bfloat16, bias=True, mask="half", softcap=5.0),
    ]
    spreads = [replace(base, case=case, hidden=hidden) for case in cases for hidden in ("plain", "DTensor")]
    spreads += [replace(base, case=case, placements=(p,)) for case in cases for p in (SEQUENCE, BATCH)]
    spreads += [
        replace(base, case=cases[2], placements=(BATCH,), per_token="DTensor", checks="1"),
        replace(base, names=None, hidden="plain"),
    ]
    _check_all(ranks, spreads)


def test_head_with_data_parallel_ranks() -> None:
    base = Spread(_head(bias=True, chunk_size=5), (2, 2), (BATCH, WHOLE), ("dp", "tp"))
    _check_all(
        4,
        [
            base,
            replace(base, placements=(BATCH, SEQUENCE), per_token="DTensor"),
            replace(base, placements=(SEQUENCE, SEQUENCE)),
            replace(base, placements=(WHOLE, BATCH), case=_head(mask="half", temperature="per token")),
        ],
    )


def _head_of_hidden_in_flight() -> list[tuple[Tensor, Tensor, bool]]:
    """Entropy, hidden's gradient, and whether the gather was in flight: of a DTensor, of its local part."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole, answers = build(_head()), []
    weight = _spread(whole.inputs["weight"], mesh, (Shard(0),))
    for plain in (False, True):
        sharded = _spread(whole.inputs["hidden"], mesh, (SEQUENCE,)).requires_grad_()
        gathered = sharded.redistribute(placements=(WHOLE,), async_op=True)
        hidden = gathered.to_local(grad_placements=(WHOLE,)) if plain else gathered
        in_flight = isinstance(gathered.to_local(), AsyncCollectiveTensor)

        def addressed(*operands: Any) -> Any:
            assert all(x is None or type(x) is Tensor or type(x) is nn.Parameter for x in operands[:3])
            return fused_head(*operands)

        with mock.patch.object(adapter, "fused_head", addressed):
            entropy = adapter.dtensor_linear_log_probs_and_entropy(hidden, weight, whole.target).entropy
        assert entropy is not None
        entropy.backward(whole.upstream[1])
        assert isinstance(sharded.grad, DTensor)
        answers.append((entropy.detach(), sharded.grad.full_tensor(), in_flight))
    return answers


def test_hidden_states_whose_gather_is_in_flight() -> None:
    """torch's tensor-parallel styles hand them on like that; a kernel must not get the wrapper."""
    whole = build(_head())
    leaf = whole.inputs["hidden"].requires_grad_()
    expected = me.linear_log_probs_and_entropy(leaf, whole.inputs["weight"], whole.target).entropy
    assert expected is not None
    expected.backward(whole.upstream[1])
    assert leaf.grad is not None
    for answers in run_ranks(2, _head_of_hidden_in_flight):
        for entropy, gradient, in_flight in answers:
            assert in_flight
            torch.testing.assert_close(entropy, expected.detach(), rtol=1e-5, atol=1e-5)  # fp32, other sums
            torch.testing.assert_close(gradient, leaf.grad, rtol=1e-5, atol=1e-5)


# --- what is communicated ---


def _communicated(call: Callable[[], Any]) -> dict[str, int]:
    with CommDebugMode() as mode:
        call()
    return {str(op).rsplit(".", 1)[-1]: count for op, count in mode.get_comm_counts().items()}


def _collectives_of_forward_and_backward() -> list[dict[str, int]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    hidden, weight, target = torch.randn(8, 3, 16), torch.randn(V, 16), torch.randint(V, (8, 3))
    logits = _spread(torch.randn(8, 3, V), mesh, (LAST,)).requires_grad_()
    rows = _spread(weight, mesh, (Shard(0),)).requires_grad_()

    def of_logits() -> None:
        both = adapter.dtensor_log_probs_and_entropy(logits, target, chunk_size=6)
        (both.log_probs + both.entropy).sum().backward()

    def of_head(placement: Placement) -> Callable[[], None]:
        given = _spread(hidden, mesh, (placement,)).requires_grad_()

        def call() -> None:
            both = adapter.dtensor_linear_log_probs_and_entropy(given, rows, target, chunk_size=6)
            (both.log_probs + both.entropy).sum().backward()

        return call

    return [_communicated(call) for call in (of_logits, of_head(WHOLE), of_head(SEQUENCE))]


def test_the_vocabulary_is_never_gathered() -> None:
    for logits, head, sharded_hidden in run_ranks(2, _collectives_of_forward_and_backward):
        assert logits == {"allreduce_": 8}  # a MAX and a SUM for each of four chunks
        assert head == {"allreduce_": 12}  # and hidden's gradient
        assert sharded_hidden == {"allreduce_": 12, "all_gather_into_tensor": 1}  # of hidden


# --- whole logits, and a head made column-parallel ---


def _column_parallel_logits() -> list[dict[str, Tensor]]:
    """Forward and backward in fp64: on a mesh of 4 and of 2 × 2, hidden of each kind."""
    answers = []
    for shape, names, placements in (
        ((4,), ("tp",), None),
        ((4,), ("tp",), (WHOLE,)),
        ((4,), ("tp",), (SEQUENCE,)),
        ((2, 2), ("dp", "tp"), (BATCH, SEQUENCE)),
    ):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        whole = build(_head(dtype=torch.float64, bias=True))
        rows = (*(WHOLE,) * (mesh.ndim - 1), Shard(0))
        inputs: dict[str, Tensor] = {
            name: _spread(x, mesh, placements if name == "hidden" and placements else rows).requires_grad_()
            for name, x in whole.inputs.items()
        }
        if placements is None:
            inputs["hidden"] = whole.inputs["hidden"].clone().requires_grad_()
        logits = adapter.column_parallel_logits(**inputs)
        assert type(logits) is Tensor
        tokens = (WHOLE,) if mesh.ndim == 1 else (BATCH, WHOLE)
        upstream = _spread(_upstream(), mesh, tokens).to_local()
        gradients = torch.autograd.grad(logits, list(inputs.values()), upstream)
        answer = {"logits": _whole(logits.detach(), mesh, tokens, torch.Size((8, 3, V)))}
        for name, gradient in zip(inputs, gradients, strict=True):
            answer[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        answers.append(answer)
    return answers


def _upstream() -> Tensor:
    return torch.randn(8, 3, V, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def test_whole_logits_of_a_column_parallel_head() -> None:
    inputs = {n: x.requires_grad_() for n, x in build(_head(dtype=torch.float64, bias=True)).inputs.items()}
    logits = nn.functional.linear(inputs["hidden"], inputs["weight"], inputs["bias"])
    expected = dict(zip(inputs, torch.autograd.grad(logits, list(inputs.values()), _upstream()), strict=True))
    expected["logits"] = logits.detach()
    for answers in run_ranks(4, _column_parallel_logits):
        for answer in answers:
            for name, value in answer.items():  # sums of at most 97 terms, in another order
                torch.testing.assert_close(
                    value, expected[name], rtol=1e-12, atol=1e-12, msg=f"{name}: {{}}".format
                )


def _parallelize() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(dist.get_rank())  # every rank's own: the first one's count
    model = nn.Sequential(nn.Embedding(V, 16), nn.Linear(16, V))
    first = model[1].weight.detach().clone()
    dist.broadcast(first, 0)
    head = model[1]
    head.bias.requires_grad_(False)
    adapter.parallelize_lm_head(head, mesh, model=model)
    assert isinstance(head.weight, nn.Parameter) and isinstance(head.weight, DTensor)
    assert head.weight.placements == head.bias.placements == (Shard(0),)
    assert head.weight.requires_grad and not head.bias.requires_grad
    whole = nn.Linear(16, V)
    whole.weight, whole.bias = (nn.Parameter(p.full_tensor()) for p in (head.weight, head.bias))
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    target = torch.arange(5)
    ours = adapter.dtensor_linear_log_probs_and_entropy(x, head.weight, target, bias=head.bias).log_probs
    dense = torch.log_softmax(whole(x), -1).gather(-1, target[:, None])[:, 0]
    return (
        head.weight.full_tensor().detach(),
        first,
        ours.detach(),
        dense.detach(),
    )


def test_a_head_made_column_parallel() -> None:
    for weight, first, ours, dense in run_ranks(2, _parallelize):
        assert_same_bits(weight, first)
        torch.testing.assert_close(ours, dense, rtol=1e-5, atol=1e-5)  # fp32, with sums in another order


class _Head(nn.Linear):
    """A head whose forward gives statistics, as one that takes the place of a model's does."""

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        assert isinstance(self.weight, DTensor)
        both = adapter.dtensor_linear_log_probs_and_entropy(hidden, self.weight, target)
        return torch.stack((both.log_probs, both.entropy))  # type: ignore[arg-type] # it is wanted


def _under_fsdp() -> tuple[Tensor, Tensor, Tensor]:
    """dp 2 × tp 2: statistics of this rank's half of the sequence, gradients of hidden and weight."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, first = build(_head(dtype=torch.float64)), 4 * mesh.get_local_rank("dp")
    half = slice(first, first + 4)
    head = _Head(16, V, bias=False, dtype=torch.float64)
    head.weight = nn.Parameter(whole.inputs["weight"].clone())
    adapter.parallelize_lm_head(head, mesh["tp"])
    fully_shard(head, mesh=mesh["dp"])
    hidden = whole.inputs["hidden"][half].clone().requires_grad_()
    both = head(hidden, whole.target[half])
    (both * torch.stack([g[half] for g in whole.upstream])).sum().backward()
    with pytest.raises(ValueError, match=r"weight: expected placements Shard or Replicate.*what FSDP"):
        adapter.dtensor_linear_log_probs_and_entropy(hidden, head.weight, whole.target[half])
    assert hidden.grad is not None and isinstance(head.weight.grad, DTensor)
    return both.detach(), hidden.grad, head.weight.grad.full_tensor()


def test_head_under_fsdp_and_tensor_parallelism() -> None:
    """In the forward of FSDP2's module the weight is sharded over the tensor-parallel ranks alone."""
    whole = build(_head(dtype=torch.float64))
    g_lp, g_h = whole.upstream
    truth = ref.truth_linear(**whole.inputs, target=whole.target, grad_log_probs=g_lp, grad_entropy=g_h)
    expected = torch.stack((truth.log_probs, truth.entropy))
    for rank, (both, of_hidden, of_weight) in enumerate(run_ranks(4, _under_fsdp)):
        half = slice(4 * (rank // 2), 4 * (rank // 2) + 4)
        close = {"rtol": 1e-11, "atol": 1e-11}  # fp64, with sums in another order
        torch.testing.assert_close(both, expected[:, half], **close)
        torch.testing.assert_close(of_hidden, truth.gradients["hidden"][half], **close)
        torch.testing.assert_close(of_weight, truth.gradients["weight"] / 2, **close)  # FSDP's mean over dp


# --- refusals ---


def _refused(names: list[str]) -> list[tuple[str, dict[str, int]]]:
    """What each call says, and what it communicated before."""
    return [_refusal(_refusals()[name][0]) for name in names]


def _refusal(call: Callable[[], Any]) -> tuple[str, dict[str, int]]:
    message = "fine"

    def attempt() -> None:
        nonlocal message
        try:
            call()
        except ValueError as error:
            message = str(error)

    counts = _communicated(attempt)
    return message, counts


def _refusals() -> dict[str, tuple[Callable[[], Any], str]]:
    """By name: a call on 4 ranks, and the message it must raise."""
    tp = _mesh((4,), ("tp",))
    dp = _mesh((4,), ("dp",))
    both = _mesh((2, 2), ("dp", "tp"))
    target = torch.zeros(8, 4, dtype=torch.long)
    x, w, b, h = torch.zeros(8, 4, V), torch.zeros(V, 16), torch.zeros(V), torch.zeros(8, 4, 16)
    logits, head = adapter.dtensor_log_probs_and_entropy, adapter.dtensor_linear_log_probs_and_entropy

    def on(mesh: Any, value: Tensor, *placements: Placement) -> Any:
        return _spread(value, mesh, placements) if mesh is not None else None

    def partial(value: Tensor) -> Any:
        return DTensor.from_local(value, tp, [Partial()], run_check=False) if tp is not None else None

    def strided(value: Tensor) -> Any:
        placements = (_StridedShard(0, split_factor=2), Shard(0))
        return None if both is None else DTensor.from_local(value, both, placements, run_check=False)

    def uneven_otherwise() -> Any:
        part = torch.zeros(8, 4, (40, 19, 19, 19)[dist.get_rank()])
        return DTensor.from_local(part, tp, [LAST], run_check=False, shape=x.shape, stride=x.stride())

    rows = on(tp, w, Shard(0))
    sharded = on(tp, x, LAST)
    tied = nn.Sequential(nn.Embedding(V, 16), nn.Linear(16, V))
    tied[1].weight = tied[0].weight
    made = nn.Linear(16, V)
    if tp is not None:
        made.weight = nn.Parameter(rows)
    return {
        "plain logits": (
            lambda: logits(x, target),
            "logits: expected a DTensor, got a plain tensor .8, 4, 97.",
        ),
        "partial logits": (lambda: logits(partial(x), target), r"logits: .*got \(Partial.*not summed yet"),
        "vocabulary on two mesh dimensions": (
            lambda: logits(on(both, x, LAST, LAST), target),
            "logits: expected at most one mesh dimension that shards the vocabulary .tensor dimension 2.",
        ),
        "shards cut otherwise": (
            lambda: logits(uneven_otherwise(), target),
            r"logits: expected a local shard of shape \(8, 4, \d+\), .* got \(8, 4, \d+\); DTensor.from_loc",
        ),
        "entropy of plain logits": (lambda: adapter.dtensor_entropy(x), "logits: expected a DTensor"),
        "vocab_size": (
            lambda: logits(sharded, target, vocab_size=98),
            "vocab_size: expected at most the 97 columns of the DTensor, got 98",
        ),
        "target sharded over the vocabulary's ranks": (
            lambda: logits(sharded, on(tp, target, Shard(0))),
            r"target: expected placements \(Replicate.*got \(Shard\(dim=0\)",
        ),
        "mask not sharded as logits are": (
            lambda: logits(on(both, x, SEQUENCE, LAST), target[:4], mask=on(both, target == 0, WHOLE, WHOLE)),
            r"mask: expected placements \(Shard\(dim=0\), Replicate\(\)\).*got \(Replicate",
        ),
        "temperature on another mesh": (
            lambda: logits(sharded, target, temperature=on(dp, target + 1.0, WHOLE)),
            "temperature: expected a plain tensor of this rank's tokens or a DTensor on .*tp=4.* got .*dp=4",
        ),
        "a whole target for sharded tokens": (
            lambda: logits(on(both, x, SEQUENCE, LAST), target),
            r"target: expected shape \(4, 4\).* got \(8, 4\)",
        ),
        "plain weight": (lambda: head(h, w, target), "weight: expected a DTensor, got a plain tensor"),
        "FSDP's weight": (
            lambda: head(h, on(dp, w, Shard(0)), target),
            "weight: expected to be sharded over a mesh dimension called .tp., .*'dp'.*FSDP shards",
        ),
        "a mesh without names": (
            lambda: head(h, on(_mesh((4,), None), w, Shard(0)), target),
            "weight: expected to be sharded over a mesh dimension called .tp., .*None.*FSDP shards",
        ),
        "tp_mesh of other ranks": (
            lambda: head(on(both, h, WHOLE, WHOLE), on(both, w, Shard(0), WHOLE), target, tp_mesh=both["tp"]),
            r"weight: expected to be sharded over the ranks \[\d, \d\] of tp_mesh, got the .*FSDP shards",
        ),
        "tp_mesh of two dimensions": (
            lambda: head(h, rows, target, tp_mesh=both),
            "tp_mesh: expected a mesh of one dimension",
        ),
        "FSDP's and tensor parallel weight": (
            lambda: head(h, strided(torch.zeros(25, 16)), target),
            r"weight: expected placements Shard or Replicate, .*what FSDP leaves",
        ),
        "weight sharded twice": (
            lambda: head(h, on(both, w, Shard(0), Shard(0)), target),
            "weight: expected at most one mesh dimension",
        ),
        "weight sharded over the hidden size too": (
            lambda: head(h, on(both, w, Shard(1), Shard(0)), target),
            r"weight: expected Shard\(0\) on one mesh dimension and Replicate\(\) on all others",
        ),
        "a replicated weight": (
            lambda: head(h, on(tp, w, WHOLE), target),
            r"weight: expected Shard\(0\) on one mesh dimension and Replicate\(\) on all others",
        ),
        "plain bias": (
            lambda: head(h, rows, target, bias=b),
            "bias: expected a DTensor, .*shard it with the",
        ),
        "bias of other placements": (
            lambda: head(h, rows, target, bias=on(tp, b, WHOLE)),
            r"bias: expected weight's mesh .* and placements \(Shard\(dim=0\),\), got .*Replicate",
        ),
        "hidden sharded over its last dimension": (
            lambda: head(on(tp, h, LAST), rows, target),
            r"hidden: expected whole rows, .* got \(Shard\(dim=2\),\)",
        ),
        "partial hidden": (
            lambda: head(partial(h), rows, target),
            "hidden: expected placements Shard or Repl",
        ),
        "hidden on another mesh": (
            lambda: head(on(dp, h, WHOLE), rows, target),
            "hidden: expected a plain tensor or a DTensor on weight's mesh .*tp=4.* got one on .*dp=4",
        ),
        "plain hidden beside data-parallel ranks": (
            lambda: head(h, on(both, w, WHOLE, Shard(0)), target),
            "hidden: expected a DTensor on weight's mesh .* got a plain tensor, which does not tell",
        ),
        "target sharded like the sequence": (
            lambda: head(on(tp, h, SEQUENCE), rows, on(tp, target, Shard(0))),
            r"target: expected placements \(Replicate\(\),\)",
        ),
        "vocab_size of a head": (lambda: head(h, rows, target, vocab_size=98), "at most the 97 columns"),
        "DTensors given to the plain functions": (
            lambda: me.linear_log_probs_and_entropy(h, rows, target),
            "weight: expected a plain tensor, .*mcore_entropy.adapters.dtensor: .*dtensor_linear_log_probs",
        ),
        "whole logits of FSDP's weight": (
            lambda: adapter.column_parallel_logits(h, on(dp, w, Shard(0))),
            "weight: expected to be sharded over a mesh dimension called .tp.",
        ),
        "a tied head": (
            lambda: adapter.parallelize_lm_head(tied[1], tp, model=tied),
            "head: expected a weight of its own, got the one of '0'; tied weights",
        ),
        "a head that is parallel": (
            lambda: adapter.parallelize_lm_head(made, tp),
            "head: expected plain parameters, got DTensors",
        ),
        "no head": (
            lambda: adapter.parallelize_lm_head(tied, tp),
            "head: expected an nn.Linear, got Sequential",
        ),
        "a head on two mesh dimensions": (
            lambda: adapter.parallelize_lm_head(nn.Linear(16, V), both),
            "tp_mesh: expected a mesh of one dimension",
        ),
    }


_meshes: dict[Any, DeviceMesh] = {}


def _mesh(shape: tuple[int, ...], names: tuple[str, ...] | None) -> Any:
    """One mesh for all calls of a group of ranks; None outside, where only names and messages are read."""
    if not dist.is_initialized():
        return None
    key = (id(dist.group.WORLD), shape, names)
    if key not in _meshes:
        _meshes[key] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[key]


def test_refusals() -> None:
    """On every rank, before any collective."""
    messages = {name: message for name, (_, message) in _refusals().items()}
    for found in run_ranks(4, _refused, list(messages)):
        for (name, message), (said, communicated) in zip(messages.items(), found, strict=True):
            with pytest.raises(ValueError, match=message):
                raise ValueError(said)
            assert not communicated, f"{name}: {communicated}"

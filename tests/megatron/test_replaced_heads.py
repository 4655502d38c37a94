"""Heads and schedules that a swap would bypass or break: refused by name, and the model is what it was."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_entropy import EntropyConfig, Execution, TokenStatistics
from tests.comparison import assert_same_bits
from tests.megatron.test_swap import swap
from tests.megatron.tiny_gpt import (
    TinyGPT,
    build,
    forward_with_labels,
    make_batch,
    model_parallel,
    needs_megatron,
)
from tests.ranks import run_ranks

pytestmark = needs_megatron

TP2 = TinyGPT(tensor_parallel=2)


class LowRankHead(nn.Module):
    """A wrapper in the manner of parameter-efficient fine-tuning: the frozen layer plus two thin products."""

    def __init__(self, to_wrap: Any) -> None:
        super().__init__()
        self.to_wrap = to_wrap
        self.down = nn.Linear(to_wrap.input_size, 2, bias=False)
        self.up = nn.Linear(2, to_wrap.output_size_per_partition, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.to_wrap.weight

    def forward(self, input_: Tensor, *args: Any, **keywords: Any) -> tuple[Tensor, Any]:
        logits, bias = self.to_wrap(input_, *args, **keywords)
        return logits + self.up(self.down(input_)), bias


def wrapped(core: Any) -> None:
    core.output_layer = LowRankHead(core.output_layer)


def of_class(name: str) -> Callable[[Any], None]:
    """A head of a subclass of that name, as Megatron and its users derive them."""

    def change(core: Any) -> None:
        layer = core.output_layer
        layer.__class__ = type(name, (type(layer),), {})

    return change


def with_a_forward_of_its_own(core: Any) -> None:
    layer = core.output_layer
    forward = layer.forward
    layer.forward = lambda *args, **keywords: forward(*args, **keywords)


def switched(**switches: Any) -> Callable[[Any], None]:
    def change(core: Any) -> None:
        for name, value in switches.items():
            setattr(core.config, name, value)

    return change


def with_sharded_columns(core: Any) -> None:
    core.output_layer.gtp_remat_size = 2


REFUSALS: dict[str, tuple[Callable[[Any], None], str]] = {
    "low-rank wrapper": (wrapped, r"got tests\.megatron\.test_replaced_heads\.LowRankHead; .* bypassed"),
    "mxfp8": (of_class("TELMHeadColumnParallelLinear"), "TELMHeadColumnParallelLinear"),
    "Transformer Engine": (of_class("TEColumnParallelLinear"), "TEColumnParallelLinear"),
    "inference": (of_class("InferenceColumnParallelLinear"), "InferenceColumnParallelLinear"),
    "own forward": (with_a_forward_of_its_own, "expected ColumnParallelLinear's own forward"),
    "sharded columns": (with_sharded_columns, "gtp_weight_remat_size: expected 1, got 2"),
    "1F1B": (switched(overlap_moe_expert_parallel_comm=True), "overlap_moe_expert_parallel_comm: expected"),
    "deferred": (switched(defer_embedding_wgrad_compute=True), "defer_embedding_wgrad_compute: expected"),
    "CUDA graph": (switched(cuda_graph_impl="full_iteration"), "compact_rows: expected False with a CUDA"),
    "CUDA graph by scope": (
        switched(cuda_graph_scope=[SimpleNamespace(name="full_iteration")]),
        "compact_rows: expected False with a CUDA",
    ),
}


def state(module: nn.Module) -> list[Any]:
    """Everything that a swap could change."""
    return [(type(one), dict(vars(one))) for one in module.modules()]


def refused(options: TinyGPT, case: str) -> tuple[str, Tensor, Tensor]:
    """What is said, and the loss before and after; the switches themselves stock would need a GPU for."""
    change, _ = REFUSALS[case]
    batch = make_batch(options)
    with model_parallel(options):
        core = build(options).core
        runs = change in (wrapped, with_a_forward_of_its_own) or case in ("mxfp8", "inference")
        change(core)
        before_loss = forward_with_labels(core, batch).detach() if runs else torch.zeros(0)
        before = state(core)
        with pytest.raises(ValueError, match=":") as error:
            swap(core)
        assert state(core) == before
        after_loss = forward_with_labels(core, batch).detach() if runs else torch.zeros(0)
        return str(error.value), before_loss, after_loss


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_by_name_and_nothing_changes(case: str) -> None:
    for said, before, after in run_ranks(2, refused, TP2, case):
        with pytest.raises(ValueError, match=REFUSALS[case][1]):
            raise ValueError(said)
        assert_same_bits(after, before)


def one_chunk_of_two(options: TinyGPT) -> None:
    with model_parallel(options):
        good, bad = build(options).core, build(options).core
        wrapped(bad)
        before = state(good)
        with pytest.raises(ValueError, match="LowRankHead"):
            swap([good, bad])
        assert state(good) == before


def test_a_refused_chunk_leaves_the_others_alone() -> None:
    run_ranks(1, one_chunk_of_two, TinyGPT())


def without_compaction(options: TinyGPT) -> None:
    with model_parallel(options):
        core = build(options).core
        switched(cuda_graph_impl="full_iteration")(core)
        swap(core, EntropyConfig(execution=Execution(compact_rows=False)))
        assert isinstance(forward_with_labels(core, make_batch(options)), TokenStatistics)


def test_a_whole_iteration_is_captured_without_compaction() -> None:
    run_ranks(1, without_compaction, TinyGPT())


def through_a_schedule_node(options: TinyGPT) -> str:
    """Megatron's own node of the 1F1B schedule, around the loss, on what a swapped model gives."""
    from megatron.core.pipeline_parallel import utils

    node_of = functools.partial(utils.ScheduleNode, stream=None, event=None)
    with model_parallel(options), pytest.MonkeyPatch.context() as patch:
        for owner in (utils, utils.ScheduleNode):  # in older versions a function of the module
            if hasattr(owner, "stream_acquire_context"):
                patch.setattr(owner, "stream_acquire_context", lambda *_: contextlib.nullcontext())
        for name in ("range_push", "range_pop"):
            patch.setattr(torch.cuda.nvtx, name, lambda *_: None)
        core = build(options).core
        stock = forward_with_labels(core, make_batch(options))
        torch.testing.assert_close(node_of(torch.sum).forward(stock), stock.sum())
        swap(core)
        output = forward_with_labels(core, make_batch(options))
        node = node_of(lambda statistics: statistics.log_probs.sum())
        with pytest.raises(AttributeError) as error:
            node.forward(output)
        return str(error.value)


def test_why_the_1f1b_schedule_is_refused() -> None:
    """Should this fail, Megatron takes more than tensors there, and the refusal may go."""
    assert "TokenStatistics" in run_ranks(1, through_a_schedule_node, TinyGPT())[0]


def parallelism(options: TinyGPT) -> tuple[list[Any], list[Any]]:
    """How Megatron-FSDP takes the parameters of the stock and the swapped head."""
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    with model_parallel(options):
        core = build(options).core
        kinds = []
        for swapped in (False, True):
            if swapped:
                swap(core)
            layer = core.output_layer
            layer.bias = nn.Parameter(torch.zeros(layer.output_size_per_partition))
            kinds.append(
                [
                    FullyShardedDataParallel._detect_parallelism_type(FullyShardedDataParallel, name, layer)
                    for name, _ in layer.named_parameters()
                ]
            )
        return kinds[0], kinds[1]


def knows_parallelism() -> bool:
    try:
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    except ImportError:
        return False
    return hasattr(FullyShardedDataParallel, "_detect_parallelism_type")


@pytest.mark.skipif(not knows_parallelism(), reason="before 0.18, Megatron-FSDP does not ask for it")
def test_megatron_fsdp_takes_the_head_for_the_column_parallel_layer_it_is() -> None:
    stock, swapped = run_ranks(1, parallelism, TinyGPT())[0]
    assert stock == swapped == ["column", "column"]

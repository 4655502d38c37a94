"""Swapped Hugging Face models under FSDP1, FSDP2 and DDP: gradients are one process's on dense logits."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers", reason="needs transformers: pip install 'mcore-entropy[hf]'")


import mcore_entropy as me
from mcore_entropy.adapters.dtensor import parallelize_lm_head
from mcore_entropy.adapters.fsdp import wrap_fsdp1, wrap_fsdp2
from mcore_entropy.adapters.huggingface import swap_lm_head
from tests.adapters.dense import COEFFICIENT, dense, gradients, largest_error
from tests.adapters.tiny_models import VOCABULARY, tiny_model
from tests.ranks import run_ranks

RANKS, MICRO_BATCHES = 2, 2
IDS = torch.randint(3, VOCABULARY, (MICRO_BATCHES, RANKS, 2, 9), generator=torch.Generator().manual_seed(1))
CONFIG = me.EntropyConfig(entropy_coeff=COEFFICIENT)

WRAP: dict[str, Callable[..., Any]] = {
    "fsdp2": wrap_fsdp2,
    "fsdp1": wrap_fsdp1,
    "ddp": DistributedDataParallel,
}
every_kind = pytest.mark.parametrize("kind", WRAP)


def labels_of(ids: Tensor) -> Tensor:
    """The first token of each sequence does not count."""
    labels = ids.clone()
    labels[..., :2] = -100
    return labels


def local_loss(model: Any, micro_batch: int, data_rank: int | None = None) -> Tensor:
    ids = IDS[micro_batch, dist.get_rank() if data_rank is None else data_rank]
    return model(input_ids=ids, labels=labels_of(ids), use_cache=False).loss


@contextlib.contextmanager
def without_sync(model: Any) -> Iterator[None]:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        with model.no_sync():
            yield


def accumulate(model: Any, data_rank: int | None = None) -> None:
    """Gradients of all micro-batches, reduced with the last one's."""
    for micro_batch in range(MICRO_BATCHES - 1):
        with without_sync(model):
            (local_loss(model, micro_batch, data_rank) / MICRO_BATCHES).backward()
    (local_loss(model, MICRO_BATCHES - 1, data_rank) / MICRO_BATCHES).backward()


def full_gradients(model: Any) -> dict[str, Tensor]:
    whole = contextlib.nullcontext()
    if isinstance(model, FullyShardedDataParallel):
        whole = FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False)
    found = {}
    with whole:
        for name, parameter in model.named_parameters():
            if (
                parameter.grad is not None and parameter.requires_grad
            ):  # FSDP1 gives frozen ones a gradient of 0
                gradient = parameter.grad
                name = name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")
                found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()
    return found


def truth(stock: Any) -> dict[str, Tensor]:
    """One process's gradients of the mean loss over all ranks and micro-batches, in fp64 on dense logits."""
    stock = copy.deepcopy(stock).double()
    ids = IDS.flatten(0, 1)
    return gradients(stock, sum(dense(stock, rows, labels_of(rows))[0] / len(ids) for rows in ids))


def gradient_error(kind: str, architecture: str, tied: bool, recompute: bool = False) -> float:
    model = tiny_model(architecture, tie_word_embeddings=tied)
    expected = truth(model)
    swap_lm_head(model, CONFIG)
    if recompute:
        model.train()
        model.gradient_checkpointing_enable()
    wrapped = WRAP[kind](model)
    accumulate(wrapped)
    return largest_error(full_gradients(wrapped), expected)


@every_kind
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_gradients_with_accumulation(kind: str, tied: bool) -> None:
    assert max(run_ranks(RANKS, gradient_error, kind, "LlamaForCausalLM", tied)) < 2e-6


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("fsdp2", "Qwen2ForCausalLM"),
        ("fsdp2", "Qwen3ForCausalLM"),
        ("fsdp2", "Gemma2ForCausalLM"),
        ("fsdp2", "Gemma3ForCausalLM"),
        ("fsdp2", "GraniteForCausalLM"),
        ("fsdp2", "CohereForCausalLM"),
        ("fsdp1", "Gemma2ForCausalLM"),
        ("ddp", "CohereForCausalLM"),
    ],
)
def test_architectures(kind: str, architecture: str) -> None:
    tied = architecture.startswith(("Gemma", "Cohere"))
    assert max(run_ranks(RANKS, gradient_error, kind, architecture, tied)) < 2e-6


@every_kind
def test_activation_checkpointing(kind: str) -> None:
    assert max(run_ranks(RANKS, gradient_error, kind, "LlamaForCausalLM", False, True)) < 2e-6


# --------------------------------------------------------------------------- mixed precision


def mixed_precision(kind: str) -> tuple[torch.dtype, float, float, float]:
    """Dtype of the statistics; errors of the loss, of the stock loss, and of the gradients."""
    stock = tiny_model("LlamaForCausalLM")
    expected = truth(stock)
    ids = IDS[0, dist.get_rank()]
    with torch.no_grad():
        true_loss = copy.deepcopy(stock).double()(input_ids=ids, labels=labels_of(ids)).loss
        stock_loss = copy.deepcopy(stock).bfloat16()(input_ids=ids, labels=labels_of(ids)).loss
    swap_lm_head(stock, CONFIG)
    autocast: Any = contextlib.nullcontext()
    if kind == "fsdp2":
        model = wrap_fsdp2(stock, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    elif kind == "fsdp1":
        model = WRAP[kind](stock, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))
    else:
        model = WRAP[kind](stock)
        autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    with autocast:
        with torch.no_grad():  # FSDP1's own gradients are wrong after a forward that no backward follows
            output = model(input_ids=ids, labels=labels_of(ids), use_cache=False)
        accumulate(model)
    loss = output.loss + COEFFICIENT * output.entropy[:, 1:-1].mean()
    found = full_gradients(model)
    assert output.entropy.dtype == output.loss.dtype
    return (
        output.log_probs.dtype,
        abs(float(loss) - float(true_loss)),
        abs(float(stock_loss) - float(true_loss)),
        largest_error(found, expected),
    )


@every_kind
def test_mixed_precision(kind: str) -> None:
    for dtype, error, stock_error, gradient in run_ranks(RANKS, mixed_precision, kind):
        assert dtype == torch.float32
        assert error < 2 * stock_error + 1e-2
        assert gradient < 5e-2


def half_outputs(part: str) -> None:
    model = tiny_model("LlamaForCausalLM")
    swap_lm_head(model, CONFIG)
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16)
    if part == "wrap":
        wrap_fsdp2(model, mp_policy=half)
        return
    fully_shard(model.lm_head, mp_policy=half if part == "head" else MixedPrecisionPolicy())
    fully_shard(model, mp_policy=half if part == "root" else MixedPrecisionPolicy())
    local_loss(model, 0)


@pytest.mark.parametrize("part", ["wrap", "head", "root"])
def test_half_outputs_are_refused(part: str) -> None:
    with pytest.raises(ValueError, match=r"output_dtype: expected None or torch.float32 .* torch.bfloat16"):
        run_ranks(1, half_outputs, part)


def half_outputs_without_our_head() -> torch.dtype:
    model = tiny_model("LlamaForCausalLM")
    wrap_fsdp2(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16))
    return model(input_ids=IDS[0, 0]).logits.dtype


def test_half_outputs_of_other_heads_are_theirs() -> None:
    assert run_ranks(1, half_outputs_without_our_head) == [torch.bfloat16]


# --------------------------------------------------------------------------- files, adapters, other wrapping


def save_and_load(tied: bool) -> bool:
    """A sharded, swapped model's state in a stock model, and back in another sharded one."""
    model = tiny_model("LlamaForCausalLM", tie_word_embeddings=tied)
    swap_lm_head(model, CONFIG)
    wrap_fsdp2(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    ids = IDS[0, dist.get_rank()]
    loss = model(input_ids=ids, labels=ids).loss
    other = tiny_model("LlamaForCausalLM", seed=5, tie_word_embeddings=tied)
    swap_lm_head(other, CONFIG)
    wrap_fsdp2(other)
    different = not torch.equal(other(input_ids=ids, labels=ids).loss, loss)
    to_everyone = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, dict(state), options=to_everyone)
    box = [state]
    dist.broadcast_object_list(box)
    (state,) = box
    stock = tiny_model("LlamaForCausalLM", seed=6, tie_word_embeddings=tied)
    stock.load_state_dict(state)
    swap_lm_head(stock, CONFIG)
    same = torch.equal(other(input_ids=ids, labels=ids).loss, loss)
    return different and same and torch.equal(stock(input_ids=ids, labels=ids).loss, loss)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_save_and_load(tied: bool) -> None:
    assert run_ranks(RANKS, save_and_load, tied) == [True, True]


def lora_error(kind: str) -> float:
    import peft

    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("LlamaForCausalLM"), lora)
    expected = truth(model)
    swap_lm_head(model, CONFIG)
    wrapped = WRAP[kind](model)
    accumulate(wrapped)
    return largest_error(full_gradients(wrapped), expected)


@every_kind
def test_lora_on_the_head(kind: str) -> None:
    pytest.importorskip("peft", reason="needs peft")
    assert max(run_ranks(RANKS, lora_error, kind)) < 2e-6


def head_in_a_group(way: str) -> float:
    """As accelerate and torchtitan wrap: the last norm and the head together, or all in the root."""
    model = tiny_model("LlamaForCausalLM")
    expected = truth(model)
    swap_lm_head(model, CONFIG)
    if way == "norm and head":
        fully_shard([model.model.norm, model.lm_head])
    fully_shard(model)
    accumulate(model)
    return largest_error(full_gradients(model), expected)


@pytest.mark.parametrize("way", ["norm and head", "root"])
def test_wrapped_by_others(way: str) -> None:
    assert max(run_ranks(RANKS, head_in_a_group, way)) < 2e-6


def swapped_after_wrapping(kind: str) -> None:
    swap_lm_head(WRAP[kind](tiny_model("LlamaForCausalLM")), CONFIG)


@every_kind
def test_swap_comes_first(kind: str) -> None:
    with pytest.raises(ValueError, match=r"swap (the head )?first"):
        run_ranks(1, swapped_after_wrapping, kind)


# --------------------------------------------------------------------------- tensor parallelism beside it


def tensor_parallel_error(tied: bool) -> tuple[float, float]:
    """dp 2 × tp 2: the largest error of the gradients, and of the logits without labels."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    stock = tiny_model("Gemma2ForCausalLM", tie_word_embeddings=tied)
    expected = truth(stock)
    model = copy.deepcopy(stock)
    swap_lm_head(model, CONFIG)
    parallelize_lm_head(model.lm_head, mesh["tp"], model=model)
    wrap_fsdp2(model, mesh=mesh["dp"])
    data_rank = mesh["dp"].get_local_rank()
    accumulate(model, data_rank=data_rank)
    ids = IDS[0, data_rank]
    logits = float((model(input_ids=ids).logits - stock(input_ids=ids).logits).abs().max())
    return largest_error(full_gradients(model), expected), logits


def test_fsdp2_and_tensor_parallelism() -> None:
    """V = 97 over two ranks: uneven shards. The head is column-parallel, the layers are not."""
    for gradient, logits in run_ranks(4, tensor_parallel_error, False):
        assert gradient < 2e-6
        assert logits < 1e-5


def test_a_tied_head_is_not_sharded_alone() -> None:
    with pytest.raises(ValueError, match="head: expected a weight of its own"):
        run_ranks(4, tensor_parallel_error, True)


def foreign_tensor_parallelism(swap_first: bool) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = tiny_model("LlamaForCausalLM")
    if swap_first:
        swap_lm_head(model, CONFIG)
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Shard(-1))})
    if not swap_first:
        swap_lm_head(model, CONFIG)
    model(input_ids=IDS[0, 0], labels=IDS[0, 0])


@pytest.mark.parametrize(("swap_first", "error"), [(True, RuntimeError), (False, ValueError)])
def test_torchs_own_tensor_parallelism_of_the_head(swap_first: bool, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"parallelize_module .*parallelize_lm_head"):
        run_ranks(2, foreign_tensor_parallelism, swap_first)

"""A tiny GPTModel to train on CPU ranks, for tests that compare one head or one layout with another.

    def step(options: TinyGPT) -> Step:              # on every rank, see tests/ranks.py
        with model_parallel(options):
            model = build(options, prepare=lambda core: swap_output_layer(core, config))
            return gather(model, train(model, loss_function=my_loss))

    one, two = (run_ranks(2, step, TinyGPT(tensor_parallel=tp))[0] for tp in (1, 2))

Parameters go by global names (`TinyModel.names`), the same whatever the tensor and pipeline
parallelism, and their values are drawn by name: any two builds start from the same weights.
Gradients are Megatron's complete ones: DistributedDataParallel and finalize_model_grads sum them in
fp32 over micro-batches, sequence-parallel ranks and tied copies, and average them over data-parallel
ranks, which all get the same batches.
"""

from __future__ import annotations

import contextlib
import importlib.util
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_entropy.megatron.cpu import megatron_on_cpu

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None,
    reason="megatron-core is not installed",
)


@dataclass(frozen=True)
class TinyGPT:
    """What to build. Ranks that tensor and pipeline parallelism leave over are data-parallel."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    sequence_parallel: bool = False
    tied: bool = False
    mtp_layers: int = 0
    dtype: torch.dtype = torch.float32
    vocab_size: int = 61  # tokens are below it
    padded_vocab_size: int = 64  # columns of the head
    hidden_size: int = 32
    layers: int = 2
    heads: int = 4
    sequence_length: int = 8
    micro_batch_size: int = 2
    seed: int = 1234
    # Further arguments, or others, for TransformerConfig and DistributedDataParallelConfig.
    transformer: Mapping[str, Any] = field(default_factory=dict, hash=False)
    data_parallel: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Batch:
    tokens: Tensor  # [b, s]
    position_ids: Tensor  # [b, s]
    attention_mask: Tensor  # [1, 1, s, s], True where attention is forbidden
    labels: Tensor  # [b, s]
    loss_mask: Tensor  # [b, s], 0 or 1


@dataclass(frozen=True)
class TinyModel:
    """This rank's stage: `core` is the GPTModel, `wrapped` what to call."""

    options: TinyGPT
    core: Any
    wrapped: Any
    names: dict[str, str]  # global name of every parameter in use, by its name in core
    prepared: Any  # what `prepare` returned


@dataclass(frozen=True)
class Step:
    """The loss function's reports, one a micro-batch, and gradients by global name.

    From `train`: reports on the last pipeline stage only, and this rank's shards. From `gather`: all.
    """

    losses: list[dict[str, Tensor]]
    gradients: dict[str, Tensor]


Forward = Callable[[Any, Batch], Any]
LossFunction = Callable[[Any, Batch], tuple[Any, ...]]


@contextlib.contextmanager
def model_parallel(options: TinyGPT) -> Iterator[None]:
    """Megatron on the CPU with the parallel state and RNG that `options` ask for, and none after it."""
    with megatron_on_cpu(), torch.random.fork_rng(devices=()):
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        try:
            parallel_state.initialize_model_parallel(
                options.tensor_parallel, options.pipeline_parallel, distributed_timeout_minutes=2
            )
            model_parallel_cuda_manual_seed(options.seed)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            MTPLossLoggingHelper.tracker.clear()  # its tensors have the size of this model


def gpt_model(config: Any, options: TinyGPT) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    spec = get_gpt_layer_local_spec()
    return GPTModel(
        config,
        spec,
        vocab_size=options.padded_vocab_size,
        max_sequence_length=options.sequence_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=options.tied,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        if options.mtp_layers
        else None,
    )


def build(
    options: TinyGPT,
    prepare: Callable[[Any], Any] = lambda core: None,
    construct: Callable[[Any, TinyGPT], Any] = gpt_model,
) -> TinyModel:
    """This rank's stage with its seeded weights; `prepare(core)` runs before it is wrapped."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    arguments: dict[str, Any] = dict(
        num_layers=options.layers,
        hidden_size=options.hidden_size,
        num_attention_heads=options.heads,
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
        sequence_parallel=options.sequence_parallel,
        mtp_num_layers=options.mtp_layers or None,
        mtp_loss_scaling_factor=0.1,
        params_dtype=options.dtype,
        pipeline_dtype=options.dtype,
        bf16=options.dtype == torch.bfloat16,
        fp16=options.dtype == torch.float16,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        finalize_model_grads_func=finalize_model_grads,
    )
    config = TransformerConfig(**{**arguments, **options.transformer})
    core = construct(config, options)
    names = {
        name: _global_name(core, name) for name, _ in core.named_parameters() if not _is_idle(core, name)
    }
    _fill(core, names, options.seed)
    prepared = prepare(core)
    module = Float16Module(config, core) if config.bf16 or config.fp16 else core
    ddp_config = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, **options.data_parallel})
    return TinyModel(options, core, DistributedDataParallel(config, ddp_config, module), names, prepared)


def make_batch(options: TinyGPT, index: int = 0) -> Batch:
    """Micro-batch number `index`, the same on every rank; the loss mask leaves out a fifth or so."""
    generator = torch.Generator().manual_seed(options.seed + index)
    rows, length = options.micro_batch_size, options.sequence_length
    text = torch.randint(options.vocab_size, (rows, length + 1), generator=generator)
    loss_mask = (torch.rand(rows, length, generator=generator) > 0.2).float()
    loss_mask[:, 0] = 1
    return Batch(
        tokens=text[:, :-1].contiguous(),
        position_ids=torch.arange(length).expand(rows, length),
        attention_mask=torch.ones(1, 1, length, length, dtype=torch.bool).triu(diagonal=1),
        labels=text[:, 1:].contiguous(),
        loss_mask=loss_mask,
    )


def forward_with_labels(module: Any, batch: Batch) -> Any:
    """Per-token losses [b, s] of the stock head; on stages before the last, hidden states."""
    return module(
        batch.tokens,
        batch.position_ids,
        batch.attention_mask,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
    )


def masked_mean(output: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The stock loss."""
    loss = (output.float() * batch.loss_mask).sum() / batch.loss_mask.sum()
    return loss, {"loss": loss.detach().clone()}  # Megatron divides the loss in place afterwards


def train(
    model: TinyModel,
    *,
    forward: Forward = forward_with_labels,
    loss_function: LossFunction = masked_mean,
    num_microbatches: int = 2,
) -> Step:
    """Forward and backward of `num_microbatches` batches by Megatron's schedule.

    `forward(module, batch)` gives the output, and `loss_function(output, batch)` on the last stage
    what Megatron's loss functions give: (loss, report) or (loss, number of tokens, report).
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(batches: Iterator[Batch], module: Any) -> tuple[Any, Callable[..., Any]]:
        batch = next(batches)
        return forward(module, batch), lambda output: loss_function(output, batch)

    model.wrapped.zero_grad_buffer()  # main_grad
    model.wrapped.zero_grad()  # .grad, which Megatron's optimizers make main_grad
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([make_batch(model.options, index) for index in range(num_microbatches)]),
        model=[model.wrapped],
        num_microbatches=num_microbatches,
        seq_length=model.options.sequence_length,
        micro_batch_size=model.options.micro_batch_size,
        forward_only=False,
    )
    gradients = {name: p.main_grad.clone() for name, p in parameters(model).items() if p.requires_grad}
    return Step(losses, gradients)


def parameters(model: TinyModel) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by global name."""
    by_name = dict(model.core.named_parameters())
    return {model.names[name]: by_name[name] for name in model.names}


def gather(model: TinyModel, step: Step) -> Step:
    """Reports and whole gradients on every rank. Copies of one shard that differ are an error."""
    from megatron.core import parallel_state

    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    mine: list[tuple[str, int, int | None, Tensor]] = []
    for name, parameter in parameters(model).items():
        if name in step.gradients:
            mine.append((name, tp_rank, _shard_dimension(parameter), step.gradients[name]))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (step.losses, mine))

    dimensions: dict[str, int | None] = {}
    shards: dict[str, dict[int, Tensor]] = {}
    for name, tp_rank, dimension, gradient in (entry for _, entries in everyone for entry in entries):
        dimensions[name] = dimension
        copy = shards.setdefault(name, {}).setdefault(0 if dimension is None else tp_rank, gradient)
        difference = (copy - gradient).abs().max().item()
        if not torch.equal(copy.isnan(), gradient.isnan()) or difference > 0:
            raise AssertionError(f"ranks differ in their copies of {name}'s gradient, by {difference:.3g}")
    gradients = {}
    for name, dimension in dimensions.items():
        parts = [shards[name][rank] for rank in sorted(shards[name])]
        gradients[name] = parts[0] if dimension is None else torch.cat(parts, dimension)
    return Step(next(losses for losses, _ in everyone if losses), gradients)


def _shard_dimension(parameter: Tensor) -> int | None:
    """Along which dimension tensor parallelism cuts a parameter."""
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def _global_name(core: Any, name: str) -> str:
    """A parameter's name with its layer's number in the whole model; one name for tied weights."""
    if name.startswith("decoder.layers."):
        *prefix, index, rest = name.split(".", 3)
        return ".".join([*prefix, str(core.decoder.layers[int(index)].layer_number - 1), rest])
    if name == "output_layer.weight" and core.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    return name


def _is_idle(core: Any, name: str) -> bool:
    """A last stage with MTP layers has an embedding, which tied weights use; its head's own idles."""
    tied = core.share_embeddings_and_output_weights
    return tied and name == "output_layer.weight" and hasattr(core, "embedding")


@torch.no_grad()
def _fill(core: Any, names: Mapping[str, str], seed: int) -> None:
    """This rank's shards of weights drawn by name; norms are around 1, the rest around 0."""
    from megatron.core import parallel_state

    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    by_name = dict(core.named_parameters())
    for name, global_name in names.items():
        parameter = by_name[name]
        generator = torch.Generator().manual_seed(seed + zlib.crc32(global_name.encode()))
        dimension, shape = _shard_dimension(parameter), list(parameter.shape)
        if dimension is not None:
            shape[dimension] *= tp_size
        whole = 0.2 * torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            whole += 1
        parameter.copy_(whole if dimension is None else whole.chunk(tp_size, dimension)[tp_rank])

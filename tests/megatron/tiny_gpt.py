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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_entropy.megatron.cpu import megatron_on_cpu
from tests.megatron.tiny_core import gpt_model, transformer_config
from tests.megatron.weights import fill, global_name, is_idle, shard_dimension

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None,
    reason="megatron-core is not installed",
)


@dataclass(frozen=True)
class TinyGPT:
    """What to build. Ranks that tensor, pipeline and context parallelism leave over are data-parallel."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_stages: int = 1  # model chunks of a pipeline rank
    context_parallel: int = 1
    expert_parallel: int = 1
    sequence_parallel: bool = False
    tied: bool = False
    parallel_output: bool = True
    mtp_layers: int = 0
    dtype: torch.dtype = torch.float32
    vocab_size: int = 61  # tokens are below it
    padded_vocab_size: int = 64  # columns of the head
    hidden_size: int = 32
    layers: int = 2
    heads: int = 4
    attention: bool = True  # without, each token is on its own
    experts: int = 0
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
                options.tensor_parallel,
                options.pipeline_parallel,
                options.virtual_stages if options.virtual_stages > 1 else None,
                context_parallel_size=options.context_parallel,
                expert_model_parallel_size=options.expert_parallel,
                distributed_timeout_minutes=2,
            )
            model_parallel_cuda_manual_seed(options.seed)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            MTPLossLoggingHelper.tracker.clear()  # its tensors have the size of this model


def build(
    options: TinyGPT,
    prepare: Callable[[Any], Any] = lambda core: None,
    construct: Callable[[Any, TinyGPT, int], Any] = gpt_model,
) -> TinyModel:
    """This rank's stage with its seeded weights; `prepare(core)` runs before it is wrapped."""
    (model,) = build_chunks(options, lambda cores: prepare(cores[0]), construct)
    return model


def build_chunks(
    options: TinyGPT,
    prepare: Callable[[list[Any]], Any],
    construct: Callable[[Any, TinyGPT, int], Any] = gpt_model,
) -> list[TinyModel]:
    """This rank's chunks, `options.virtual_stages` of them, which `prepare(cores)` gets all at once."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    config = transformer_config(options)
    cores = [construct(config, options, stage) for stage in range(options.virtual_stages)]
    names = [
        {name: global_name(core, name) for name, _ in core.named_parameters() if not is_idle(core, name)}
        for core in cores
    ]
    for core, core_names in zip(cores, names, strict=True):
        fill(core, core_names, options.seed)
    prepared = prepare(cores)
    ddp_config = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, **options.data_parallel})
    return [
        TinyModel(
            options,
            core,
            DistributedDataParallel(
                config, ddp_config, Float16Module(config, core) if config.bf16 or config.fp16 else core
            ),
            core_names,
            prepared,
        )
        for core, core_names in zip(cores, names, strict=True)
    ]


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
    model: TinyModel | list[TinyModel],
    *,
    forward: Forward = forward_with_labels,
    loss_function: LossFunction = masked_mean,
    num_microbatches: int = 2,
    batch_of: Callable[[TinyGPT, int], Batch] = make_batch,
) -> Step:
    """Forward and backward of `num_microbatches` batches by Megatron's schedule.

    `forward(module, batch)` gives the output, and `loss_function(output, batch)` on the last stage
    what Megatron's loss functions give: (loss, report) or (loss, number of tokens, report).
    `batch_of(options, index)` gives a micro-batch; its columns are the sequence of one rank.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(batches: Iterator[Batch], module: Any) -> tuple[Any, Callable[..., Any]]:
        batch = next(batches)
        return forward(module, batch), lambda output: loss_function(output, batch)

    chunks = model if isinstance(model, list) else [model]
    options = chunks[0].options
    for chunk in chunks:
        chunk.wrapped.zero_grad_buffer()  # main_grad
        chunk.wrapped.zero_grad()  # .grad, which Megatron's optimizers make main_grad
    batches = [batch_of(options, index) for index in range(num_microbatches)]
    iterators = [iter(batches) for _ in chunks]
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=[chunk.wrapped for chunk in chunks],
        num_microbatches=num_microbatches,
        seq_length=options.sequence_length,
        micro_batch_size=options.micro_batch_size,
        forward_only=False,
    )
    gradients = {name: p.main_grad.clone() for name, p in parameters(model).items() if p.requires_grad}
    return Step(losses, gradients)


def parameters(model: TinyModel | list[TinyModel]) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by global name."""
    if isinstance(model, list):
        return {name: parameter for chunk in model for name, parameter in parameters(chunk).items()}
    by_name = dict(model.core.named_parameters())
    return {model.names[name]: by_name[name] for name in model.names}


def gather(model: TinyModel | list[TinyModel], step: Step) -> Step:
    """Reports and whole gradients on every rank. Copies of one shard that differ are an error."""
    from megatron.core import parallel_state

    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    mine: list[tuple[str, int, int | None, Tensor]] = []
    for name, parameter in parameters(model).items():
        if name in step.gradients:
            mine.append((name, tp_rank, shard_dimension(parameter), step.gradients[name]))
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

"""Context parallelism and packed sequences: the head is local to a token, sums over the batch are not.

Megatron's attention needs Transformer Engine for either, so the GPTModel here has none: embedding, MLPs and
head under Megatron's own schedule, context-parallel groups and gradient reduction. The truth is one rank with
whole rows: dense logits, fp64.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_entropy import EntropyConfig, TokenStatistics
from mcore_entropy.megatron.loss import EntropyLoss, masked_token_sum
from tests.megatron.parity import assert_as_near_as, errors, forward_without_labels, swap
from tests.megatron.test_parallelisms import COEFFICIENT, added_up, dense_sum
from tests.megatron.tiny_gpt import (
    Batch,
    Step,
    TinyGPT,
    build,
    gather,
    make_batch,
    model_parallel,
    needs_megatron,
    train,
)
from tests.ranks import run_ranks

pytestmark = needs_megatron

WHOLE = TinyGPT(attention=False, transformer={"calculate_per_token_loss": True})
SHARDED = dataclasses.replace(WHOLE, context_parallel=2)

# Columns of the sequence that each of two ranks holds.
LAYOUTS = {
    "ring": ([0, 1, 6, 7], [2, 3, 4, 5]),  # zig-zag: the first and the last of four pieces, and the middle
    "ulysses": ([0, 1, 2, 3], [4, 5, 6, 7]),
}


def columns_of_this_rank(layout: str, options: TinyGPT, index: int) -> Batch:
    from megatron.core import parallel_state

    columns = LAYOUTS[layout][parallel_state.get_context_parallel_rank()]
    whole = make_batch(options, index)
    return Batch(
        attention_mask=whole.attention_mask,
        **{
            name: getattr(whole, name)[:, columns].contiguous()
            for name in ("tokens", "position_ids", "labels", "loss_mask")
        },
    )


def sharded_step(layout: str, loss: Any, config: EntropyConfig | None) -> tuple[Step, list[Any]]:
    """The step with reports added up over micro-batches and ranks, and this rank's outputs."""
    outputs: list[Any] = []

    def loss_function(output: Any, batch: Batch) -> tuple[Any, ...]:
        outputs.append(output)
        return loss(batch.loss_mask, output)

    with model_parallel(SHARDED):
        prepare = functools.partial(swap, config=config) if config else lambda core: None
        model = build(SHARDED, prepare=prepare)
        result = train(
            model,
            loss_function=loss_function,
            batch_of=functools.partial(columns_of_this_rank, layout),
        )
        step = gather(model, Step([added_up(result.losses)], result.gradients))
    return step, outputs


def stock_step(layout: str) -> Step:
    return sharded_step(layout, masked_token_sum, None)[0]


def swapped_step(layout: str, head: str) -> tuple[Step, list[tuple[Tensor, Tensor]]]:
    config = EntropyConfig(entropy_coeff=COEFFICIENT, head=head, chunk_size=3)  # type: ignore[arg-type]
    step, outputs = sharded_step(layout, EntropyLoss(config), config)
    return step, [(output.log_probs.detach(), output.entropy.detach()) for output in outputs]


def dense_truth(coefficient: float) -> tuple[Step, list[tuple[Tensor, Tensor]]]:
    """One rank; per-token values of each micro-batch too."""
    values = []

    def loss_function(logits: Tensor, batch: Batch) -> tuple[Any, ...]:
        log_p = torch.log_softmax(logits.detach().double(), -1)
        log_probs = log_p.gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1)
        values.append((log_probs, -(log_p.exp() * log_p).sum(-1)))
        return dense_sum(coefficient, logits, batch)

    with model_parallel(WHOLE):
        model = build(WHOLE)
        result = train(model, forward=forward_without_labels, loss_function=loss_function)
        return gather(model, Step([added_up(result.losses)], result.gradients)), values


@pytest.mark.parametrize("head", ["fused", "logits"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_context_parallel_layouts(layout: str, head: str) -> None:
    right, right_values = run_ranks(1, dense_truth, COEFFICIENT)[0]
    plain, _ = run_ranks(1, dense_truth, 0.0)[0]
    ranks = run_ranks(2, swapped_step, layout, head)
    for columns, (_, values) in zip(LAYOUTS[layout], ranks, strict=True):
        for ours, whole in zip(values, right_values, strict=True):
            for mine, all_columns in zip(ours, whole, strict=True):
                torch.testing.assert_close(mine.double(), all_columns[:, columns], rtol=2e-6, atol=2e-6)
    stock = run_ranks(2, stock_step, layout)[0]
    for step, _ in ranks:
        for name in ("lm loss", "entropy"):
            assert step.losses[0][name][1] == right.losses[0][name][1]  # tokens of the whole batch
        assert_as_near_as(errors(step, right), errors(stock, plain))


# --- packed sequences -----------------------------------------------------------------------------

LENGTHS = (5, 2, 1, 8)


def packed_and_alone(options: TinyGPT, head: str) -> list[Tensor]:
    """Per-token log-probs and entropy of one packed row, and dense ones of each sequence alone."""
    from megatron.core.packed_seq_params import PackedSeqParams

    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(options.vocab_size, (1, length + 1), generator=generator) for length in LENGTHS]
    tokens, labels = (
        torch.cat(parts, 1) for parts in zip(*((t[:, :-1], t[:, 1:]) for t in texts), strict=True)
    )
    positions = torch.cat([torch.arange(length)[None] for length in LENGTHS], 1)
    ends = torch.tensor((0, *LENGTHS)).cumsum(0).int()
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(LENGTHS),
        max_seqlen_kv=max(LENGTHS),
    )
    with model_parallel(options):
        # Its own model: sequence parallelism does not cut sequences of an odd length.
        dense = build(dataclasses.replace(options, sequence_parallel=False)).core
        results: list[list[Tensor]] = [[], []]
        for text in texts:
            length = text.shape[1] - 1
            logits = dense(
                text[:, :-1], torch.arange(length)[None], None, runtime_gather_output=True
            ).detach()
            log_p = torch.log_softmax(logits.double(), -1)
            results[0].append(log_p.gather(-1, text[:, 1:].unsqueeze(-1)).squeeze(-1))
            results[1].append(-(log_p.exp() * log_p).sum(-1))
        core = build(options).core
        swap(core, EntropyConfig(chunk_size=6, head=head))  # type: ignore[arg-type]
        output = core(tokens, positions, None, labels=labels, packed_seq_params=packed)
    assert isinstance(output, TokenStatistics) and output.entropy is not None
    return [output.log_probs.detach(), output.entropy.detach(), *(torch.cat(parts, 1) for parts in results)]


@pytest.mark.parametrize("head", ["fused", "logits"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_packed_sequences_give_what_each_gives_alone(sequence_parallel: bool, head: str) -> None:
    options = TinyGPT(
        tensor_parallel=2,
        sequence_parallel=sequence_parallel,
        attention=False,
        sequence_length=sum(LENGTHS),
    )
    for log_probs, entropy, *right in run_ranks(2, packed_and_alone, options, head):
        assert log_probs.shape == (1, sum(LENGTHS))
        torch.testing.assert_close([log_probs.double(), entropy.double()], right, rtol=2e-6, atol=2e-6)

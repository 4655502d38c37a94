"""What a config can ask for around the head: loss, entropy and gradients are as near to the truth as stock's.

The truth is that of test_parallelisms: the same model on one rank, dense logits, fp64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_entropy import EntropyConfig, LogitTransform, TokenStatistics
from tests.megatron.parity import assert_as_near_as, errors, statistics_loss, swap
from tests.megatron.test_head_parity import mtp_steps
from tests.megatron.test_parallelisms import COEFFICIENT, stock_step, truth_step
from tests.megatron.test_swap import logits_of, stock_swapped_and_restored_logits
from tests.megatron.tiny_gpt import (
    Step,
    TinyGPT,
    build,
    forward_with_labels,
    gather,
    make_batch,
    model_parallel,
    needs_megatron,
    train,
)
from tests.ranks import run_ranks

try:
    from megatron.core.transformer.transformer_config import TransformerConfig

    FIELDS = {field.name for field in dataclasses.fields(TransformerConfig)}
except ImportError:
    FIELDS = set()

pytestmark = needs_megatron

needs_mup = pytest.mark.skipif("use_mup" not in FIELDS, reason="MuP came with megatron-core 0.17")

TP2 = TinyGPT(tensor_parallel=2)
TP2_SP = TinyGPT(tensor_parallel=2, sequence_parallel=True)
MUP = {"use_mup": True, "mup_base_hidden_size": 8}  # logits times a quarter


def with_config(options: TinyGPT, **transformer: Any) -> TinyGPT:
    return dataclasses.replace(options, transformer=transformer)


FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
FEATURES = {
    "recompute-full": with_config(TP2_SP, **FULL),
    "recompute-selective": with_config(TP2_SP, recompute_granularity="selective"),
    "gathered-output": dataclasses.replace(TP2, parallel_output=False),
    "fused-cross-entropy": with_config(TP2, cross_entropy_loss_fusion=True),
    "mup": with_config(TP2_SP, **MUP),
    "mup-tied": with_config(TinyGPT(tied=True), **MUP),
}


def swapped_step(options: TinyGPT, head: str) -> Step:
    config = EntropyConfig(chunk_size=6, head=head)  # type: ignore[arg-type]
    with model_parallel(options):
        model = build(options, prepare=functools.partial(swap, config=config))
        return gather(model, train(model, loss_function=functools.partial(statistics_loss, COEFFICIENT)))


@pytest.mark.parametrize("head", ["fused", "logits"])
@pytest.mark.parametrize(
    "feature", [pytest.param(name, marks=needs_mup if "mup" in name else ()) for name in FEATURES]
)
def test_loss_entropy_and_gradients(feature: str, head: str) -> None:
    options = FEATURES[feature]
    ranks = options.tensor_parallel
    whole = dataclasses.replace(options, tensor_parallel=1, sequence_parallel=False)
    right, plain = (run_ranks(1, truth_step, whole, c)[0] for c in (COEFFICIENT, 0.0))
    ours = run_ranks(ranks, swapped_step, options, head)[0]
    # The stock loss is for logits that are not gathered, and its fused kernel rounds gradients to bf16.
    transformer = {k: v for k, v in options.transformer.items() if k != "cross_entropy_loss_fusion"}
    comparable = dataclasses.replace(options, parallel_output=True, transformer=transformer)
    stock = run_ranks(ranks, stock_step, comparable)[0]
    assert_as_near_as(errors(ours, right), errors(stock, plain))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(with_config(TP2, **MUP), id="mup", marks=needs_mup),
        pytest.param(dataclasses.replace(TP2, parallel_output=False), id="gathered-output"),
    ],
)
def test_without_labels_logits_are_the_stock_heads_to_the_bit(options: TinyGPT) -> None:
    columns = options.padded_vocab_size // (2 if options.parallel_output else 1)
    for stock, swapped, restored in run_ranks(2, stock_swapped_and_restored_logits, options):
        assert stock.shape == (2, 8, columns)
        assert torch.equal(stock, swapped) and torch.equal(stock, restored)


def scaled_and_capped(options: TinyGPT) -> list[Tensor]:
    """Ours, and the same written out on the stock head's logits: MuP's factor comes first."""
    batch = make_batch(options)
    with model_parallel(options):
        core = build(options).core
        logits = logits_of(core, options).double()
        swap(core, EntropyConfig(transform=LogitTransform(2.0, softcap=1.5)))
        output = forward_with_labels(core, batch)
    log_p = torch.log_softmax(1.5 * torch.tanh(2.0 * logits / 1.5), -1)
    right = log_p.gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    return [output.log_probs.detach(), output.entropy.detach(), *right]


@needs_mup
def test_mup_and_a_transform_of_the_users() -> None:
    log_probs, entropy, *right = run_ranks(1, scaled_and_capped, with_config(TinyGPT(), **MUP))[0]
    torch.testing.assert_close([log_probs.double(), entropy.double()], right, rtol=2e-6, atol=2e-6)


@needs_mup
def test_mup_without_a_positive_factor_is_refused_at_the_swap() -> None:
    run_ranks(1, swap_with_a_factor_of_zero, with_config(TinyGPT(), **MUP))


def swap_with_a_factor_of_zero(options: TinyGPT) -> None:
    with model_parallel(options):
        core = build(options).core
        core.config.mup_output_mult = 0.0
        with pytest.raises(ValueError, match="mup_output_mult: expected a positive number, got 0"):
            swap(core, EntropyConfig())


def half_precision_temperature(options: TinyGPT) -> list[Tensor]:
    """Entropy of the head on Megatron's logits with a scale, and of a log_softmax in fp64."""
    batch = make_batch(options)
    temperature = torch.linspace(0.5, 2.0, batch.labels.numel()).view_as(batch.labels).bfloat16()
    with model_parallel(options):
        core = build(options).core
        logits = logits_of(core, options).double()
        handle = swap(core, EntropyConfig(head="logits", transform=LogitTransform(3.0)))
        with handle.request(temperature=temperature):
            output = forward_with_labels(core, batch)
    log_p = torch.log_softmax(3.0 * logits / temperature.double().unsqueeze(-1), -1)
    return [output.entropy.detach(), -(log_p.exp() * log_p).sum(-1)]


def test_a_half_precision_temperature_is_not_rounded_again_by_the_scale() -> None:
    for ours, right in run_ranks(1, half_precision_temperature, TinyGPT()):
        torch.testing.assert_close(ours.double(), right, rtol=2e-6, atol=2e-6)


@needs_mup
def test_mup_in_the_logits_of_mtp_layers() -> None:
    options = with_config(TinyGPT(mtp_layers=2), **MUP)
    (stock, stock_losses), (swapped, swapped_losses) = run_ranks(1, mtp_steps, options)[0]
    torch.testing.assert_close(swapped_losses, stock_losses, rtol=1e-6, atol=0)
    for name, gradient in stock.gradients.items():
        difference = (swapped.gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert difference < 2e-6, f"{name}: {difference}"


# --- inference mode and the config logger ---------------------------------------------------------


def inference_mode() -> Any:
    """As an inference engine sets it; nothing to set before megatron-core 0.18."""
    try:
        from megatron.core.inference.utils import InferenceMode
    except ImportError:
        return contextlib.nullcontext()
    return InferenceMode.active()


def labels_in_inference(options: TinyGPT) -> list[str]:
    """What is said with an inference context that keeps the last token's hidden state only, and without."""
    batch = make_batch(options)
    messages = []
    with model_parallel(options):
        core = build(options).core
        swap(core, EntropyConfig())
        for keeps_last in (True, False):
            switches = SimpleNamespace(materialize_only_last_token_logits=keeps_last)
            context = SimpleNamespace(
                **vars(switches),
                config=switches,
                is_static_batching=lambda: True,
                is_dynamic_batching=lambda: False,
            )
            # As GPTModel.forward calls it, whose body would want a key-value cache.
            arguments = dict.fromkeys(("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"))
            hidden = torch.zeros(options.sequence_length, options.micro_batch_size, options.hidden_size)
            core.eval()
            with inference_mode():
                try:
                    output = core._postprocess(
                        hidden_states=hidden,
                        input_ids=batch.tokens,
                        position_ids=batch.position_ids,
                        labels=batch.labels,
                        runtime_gather_output=True,
                        inference_context=context,
                        **arguments,
                    )
                    messages.append(type(output).__name__)
                except ValueError as error:
                    messages.append(str(error))
            core.train()
            assert isinstance(forward_with_labels(core, batch), TokenStatistics)
    return messages


def test_labels_where_only_the_last_token_reaches_the_head() -> None:
    for refused, computed in run_ranks(2, labels_in_inference, TP2):
        assert refused.startswith("labels: expected none in inference mode with materialize_only_last")
        assert computed == "TokenStatistics"


def logged(options: TinyGPT, folder: str) -> int:
    with model_parallel(options):
        core = build(with_config(options, config_logger_dir=folder)).core
        swap(core, EntropyConfig())
        assert isinstance(forward_with_labels(core, make_batch(options)), TokenStatistics)
    return len(list(Path(folder).glob("input_and_logits*")))


def test_megatrons_config_logger_takes_statistics(tmp_path: Path) -> None:
    assert run_ranks(1, logged, TinyGPT(), str(tmp_path))[0] == 1

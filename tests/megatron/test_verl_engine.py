"""verl's Megatron engine, switched to our head: its own step on two ranks against the dense formula in fp64.

The step is `MegatronEngineWithLMHead.forward_step` itself, on an engine without its trainer: two samples of
odd lengths, packed and padded by verl, each with a temperature of its own, which stock refuses under fused
kernels, as it does the sum of p squared. Megatron-core 0.18 and newer calls verl's output processor, an older
one the forward that verl puts in the model's place.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_entropy.adapters.verl_switch import switch_verl
from tests.adapters.verl_cases import NEEDS_VERL
from tests.megatron.parity import assert_as_near_as, errors
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

pytest.importorskip("verl", reason=NEEDS_VERL)
pytestmark = needs_megatron

LENGTHS = (7, 5)
TEMPERATURES = (0.7, 1.3)
COEFFICIENT = 0.3  # of the entropy
Rows = list[Tensor]  # one for each sample
LAYOUTS = {
    "TP 1": TinyGPT(attention=False),
    "TP 2": TinyGPT(tensor_parallel=2, attention=False),
    "TP 2, SP": TinyGPT(tensor_parallel=2, sequence_parallel=True, attention=False),
    "TP 2, SP, tied": TinyGPT(tensor_parallel=2, sequence_parallel=True, tied=True, attention=False),
}


def samples(values: Tensor) -> Rows:
    """A batch's rows, cut to their lengths."""
    return [row[:length] for row, length in zip(values, LENGTHS, strict=True)]


def report(log_probs: Rows, entropy: Rows, sum_pi_squared: Rows) -> tuple[Tensor, Any]:
    """A loss of both, whose upstream gradient differs from token to token. A sample's last token has no
    successor, and does not count."""

    def total(values: Rows) -> Tensor:
        return sum((row[:-1] * torch.arange(1, len(row))).sum() for row in values)  # type: ignore[return-value]

    loss = -total(log_probs) - COEFFICIENT * total(entropy)
    shown = {"loss": loss, "entropy": total(entropy), "sum_pi_squared": total(sum_pi_squared)}
    return loss, {name: value.detach().double().clone() for name, value in shown.items()}


# --- the dense formula ---


def dense_forward(module: Any, batch: Batch) -> Tensor:
    return module(batch.tokens, batch.position_ids, batch.attention_mask)  # type: ignore[no-any-return]


def dense_loss(dtype: torch.dtype, logits: Tensor, batch: Batch) -> tuple[Tensor, Any]:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    temperature = torch.tensor(TEMPERATURES, dtype=dtype)[:, None, None]
    log_p = (gather_from_tensor_model_parallel_region(logits).to(dtype) / temperature).log_softmax(-1)
    p = log_p.exp()
    log_probs = log_p.gather(-1, batch.tokens.roll(-1, 1)[..., None]).squeeze(-1)
    return report(samples(log_probs), samples(-(p * log_p).sum(-1)), samples(p.square().sum(-1)))


def dense_step(options: TinyGPT, dtype: torch.dtype) -> Step:
    with model_parallel(options):
        model = build(options)
        return gather(
            model, train(model, forward=dense_forward, loss_function=lambda *to: dense_loss(dtype, *to))
        )


# --- verl's engine ---


def engine_of(fused: bool, chunked: bool) -> Any:
    """What verl's step reads of its engine."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    engine = object.__new__(MegatronEngineWithLMHead)
    engine.engine_config = SimpleNamespace(
        use_fused_kernels=fused,
        use_remove_padding=True,
        pad_to_length=False,
        dynamic_context_parallel=False,
        entropy_from_logits_with_chunking=chunked,
        entropy_from_logits_chunk_size=5,
    )
    engine.model_config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
        tokenizer=SimpleNamespace(pad_token_id=0),
        mtp=SimpleNamespace(enable=False, enable_train=False),
    )
    engine.enable_routing_replay = False
    return engine


def micro_batch(batch: Batch, **flags: Any) -> Any:
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    jagged = torch.nested.nested_tensor(samples(batch.tokens), layout=torch.jagged)
    made = TensorDict(
        {
            "input_ids": jagged,
            "loss_mask": torch.nested.nested_tensor(samples(torch.ones(2, 8)), layout=torch.jagged),
            "temperature": torch.tensor(TEMPERATURES),
        },
        batch_size=[len(LENGTHS)],
    )
    tu.assign_non_tensor(made, **flags)
    return made


def engine_forward(fused: bool, chunked: bool = False, **flags: bool) -> Callable[[Any, Batch], Any]:
    engine = engine_of(fused, chunked)

    def forward(module: Any, batch: Batch) -> Any:
        engine.tf_config = module.config
        flags_of_batch = {"calculate_entropy": True, "calculate_sum_pi_squared": True, **flags}
        outputs, _ = engine.forward_step(
            iter([micro_batch(batch, **flags_of_batch)]), module, None, lambda *_, **__: None
        )
        return outputs

    return forward


def engine_loss(outputs: dict[str, Tensor], _: Batch) -> tuple[Tensor, Any]:
    assert set(outputs) == {"log_probs", "entropy", "sum_pi_squared"}
    names = ("log_probs", "entropy", "sum_pi_squared")
    return report(*(list(outputs[name].unbind()) for name in names))


def prepared(core: Any) -> None:
    from verl.models.mcore.model_forward_fused import patch_fused_forward

    patch_fused_forward(core)


def engine_step(options: TinyGPT, fused: bool, chunked: bool) -> Step:
    handle = switch_verl()
    try:
        with model_parallel(options):
            model = build(options, prepare=prepared if fused else lambda core: None)
            forward = engine_forward(fused, chunked)
            return gather(model, train(model, forward=forward, loss_function=engine_loss))
    finally:
        handle.restore()


@pytest.mark.parametrize("kernels", ["fused", "logits", "logits in chunks"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients(layout: str, kernels: str) -> None:
    options = LAYOUTS[layout]
    one_rank = TinyGPT(tied=options.tied, attention=False)
    truth = run_ranks(1, dense_step, one_rank, torch.float64)[0]
    eager = errors(run_ranks(1, dense_step, one_rank, torch.float32)[0], truth)
    steps = run_ranks(options.tensor_parallel, engine_step, options, kernels == "fused", "chunks" in kernels)
    for step in steps:
        assert_as_near_as(eager, errors(step, truth))


def outputs_of(options: TinyGPT, **flags: bool) -> dict[str, Tensor]:
    with model_parallel(options):
        model = build(options, prepare=prepared)
        outputs = engine_forward(True, **flags)(model.wrapped, make_batch(options))
    return {name: values.detach().values() for name, values in outputs.items()}


def switched_stock_switched(options: TinyGPT) -> None:
    """Stock's refusals while it is stock, and nothing computed that is not asked for while it is not."""
    from verl.models.mcore import model_forward_fused

    stock = model_forward_fused.fused_output_processor
    handle = switch_verl()
    all_three = outputs_of(options)
    log_probs_alone = outputs_of(options, calculate_entropy=False, calculate_sum_pi_squared=False)
    assert set(log_probs_alone) == {"log_probs"}
    assert torch.equal(log_probs_alone["log_probs"], all_three["log_probs"])
    handle.restore()
    assert model_forward_fused.fused_output_processor is stock
    with pytest.raises(NotImplementedError, match="calculate_sum_pi_squared"):
        outputs_of(options)
    with pytest.raises(NotImplementedError, match="uniform temperature"):
        outputs_of(options, calculate_sum_pi_squared=False)


def test_what_stock_refuses_and_what_is_left_out() -> None:
    run_ranks(2, switched_stock_switched, LAYOUTS["TP 2, SP"])


def head_with_lora(options: TinyGPT) -> None:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    class WithLoRA(ColumnParallelLinear):  # type: ignore[misc]
        pass

    handle = switch_verl()
    try:
        with model_parallel(options):
            model = build(options, prepare=prepared)
            model.core.output_layer.__class__ = WithLoRA
            with pytest.raises(ValueError, match=r"output_layer: expected Megatron's .* got .*WithLoRA"):
                engine_forward(True)(model.wrapped, make_batch(options))
    finally:
        handle.restore()


def test_a_head_that_would_be_bypassed_is_refused() -> None:
    run_ranks(1, head_with_lora, LAYOUTS["TP 1"])

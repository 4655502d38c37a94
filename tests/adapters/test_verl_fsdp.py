"""verl's FSDP engine, switched to our head, on a tiny Llama: against the dense formula in fp64.

Its own `prepare_model_inputs` and `prepare_model_outputs`, around the forward that verl gives the model.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from mcore_entropy.adapters.verl_switch import switch_verl
from tests.adapters.verl_cases import NEEDS_VERL
from tests.ranks import run_ranks

pytest.importorskip("verl", reason=NEEDS_VERL)
transformers = pytest.importorskip("transformers", reason="needs transformers")

LENGTHS = (7, 4)
TEMPERATURES = (0.7, 1.3)
COEFFICIENT = 0.3
NAMES = ("log_probs", "entropy", "sum_pi_squared")
Rows = dict[str, list[Tensor]]  # one tensor for each sample


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Llama of two layers, whose class verl may give another forward until the test ends."""
    torch.manual_seed(0)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", transformers.LlamaForCausalLM.forward)
    return tiny_llama()


def tiny_llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    made = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        made.lm_head.weight.mul_(20)  # distributions that are not uniform
    return made


@pytest.fixture
def switched() -> Any:
    handle = switch_verl()
    yield handle
    handle.restore()


def fused_by_verl(model: Any, backend: str) -> None:
    from verl.models.transformers.monkey_patch import patch_forward_with_backends

    patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend=backend)
    if not type(model).forward.__module__.startswith("verl."):
        pytest.skip(f"this verl has no backend {backend}")


def engine_of(model: Any, checkpointing: bool = False, chunking: bool = False, compiled: bool = False) -> Any:
    """What verl's step reads of its engine; the entropy function is taken as its __init__ takes it."""
    from verl.utils import torch_functional as verl_F
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    engine = object.__new__(FSDPEngineWithLMHead)
    engine.module = model
    engine.use_ulysses_sp = False
    engine.ulysses_sequence_parallel_size = 1
    engine.pad_to_length = False
    engine.pad_to_length_bucket = None
    engine._autocast_dtype = torch.float32
    engine.engine_config = SimpleNamespace(
        entropy_checkpointing=checkpointing,
        entropy_from_logits_with_chunking=chunking,
        entropy_from_logits_chunk_size=5,
        pad_to_length=False,
    )
    function = verl_F.entropy_from_logits_with_chunking if chunking else verl_F.entropy_from_logits
    engine.compute_entropy_from_logits = (
        torch.compile(function, dynamic=True, backend="aot_eager") if compiled else function
    )
    return engine


def micro_batch(temperature: Any, **flags: Any) -> Any:
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(61, (length,), generator=generator) for length in LENGTHS]
    places = [torch.arange(length) for length in LENGTHS]
    made = TensorDict(
        {
            "input_ids": torch.nested.nested_tensor(rows, layout=torch.jagged),
            "position_ids": torch.nested.nested_tensor(places, layout=torch.jagged),
        },
        batch_size=[len(LENGTHS)],
    )
    if isinstance(temperature, Tensor):
        made["temperature"] = temperature
    else:
        tu.assign_non_tensor(made, temperature=temperature)
    tu.assign_non_tensor(made, calculate_entropy=True, calculate_sum_pi_squared=True, **flags)
    return made


def outputs_of(engine: Any, batch: Any) -> dict[str, Tensor]:
    """The engine's own way from a micro-batch to its outputs."""
    inputs, output_args = engine.prepare_model_inputs(micro_batch=batch)
    output = engine.module(**inputs, use_cache=False)
    outputs: dict[str, Tensor] = engine.prepare_model_outputs(
        output=output, output_args=output_args, micro_batch=batch, logits_processor_func=None
    )
    return outputs


def truth_of(model: Any, batch: Any, packed: bool, temperatures: tuple[float, ...]) -> Rows:
    """From the same hidden states in fp64: rows of every sample, packed in one sequence or padded.

    A sample's last token has no successor, and its label is what verl's roll leaves there: not compared.
    """
    ids, places = batch["input_ids"], batch["position_ids"]
    if packed:
        hidden = (
            model.model(input_ids=ids.values()[None], position_ids=places.values()[None], use_cache=False)
            .last_hidden_state[0]
            .split(list(LENGTHS))
        )
    else:
        padded = torch.nested.to_padded_tensor(ids, padding=0)
        mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
        found = model.model(
            input_ids=padded,
            attention_mask=mask.to(torch.int64),
            position_ids=torch.nested.to_padded_tensor(places, padding=0),
            use_cache=False,
        ).last_hidden_state
        hidden = [row[:length] for row, length in zip(found, LENGTHS, strict=True)]
    labels = ids.values().roll(-1).split(list(LENGTHS))
    results: Rows = {name: [] for name in NAMES}
    for states, label, temperature in zip(hidden, labels, temperatures, strict=True):
        log_p = (states.double() @ model.lm_head.weight.double().t() / temperature).log_softmax(-1)
        p = log_p.exp()
        results["log_probs"].append(log_p.gather(-1, label[:, None]).squeeze(-1))
        results["entropy"].append(-(p * log_p).sum(-1))
        results["sum_pi_squared"].append(p.square().sum(-1))
    return results


def gradients_of(model: Any, log_probs: list[Tensor], entropy: list[Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    weights = [1 + torch.arange(len(row) - 1) for row in log_probs]
    loss = sum(
        ((first + COEFFICIENT * second)[:-1] * weight).sum()
        for first, second, weight in zip(log_probs, entropy, weights, strict=True)
    )
    loss.backward()  # type: ignore[union-attr]
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("per_sample", [True, False], ids=["temperature per sample", "one temperature"])
@pytest.mark.parametrize("use_remove_padding", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("backend", ["torch", "liger", "triton", None])
def test_values_and_gradients(
    backend: str | None, use_remove_padding: bool, per_sample: bool, model: Any, switched: Any
) -> None:
    if backend is not None:
        fused_by_verl(model, backend)
    temperatures = TEMPERATURES if per_sample else (0.7, 0.7)
    batch = micro_batch(
        torch.tensor(TEMPERATURES) if per_sample else 0.7,
        use_fused_kernels=backend is not None,
        use_remove_padding=use_remove_padding,
    )
    truth = truth_of(model, batch, use_remove_padding, temperatures)
    compare(model, outputs_of(engine_of(model), batch), truth)


def compare(model: Any, outputs: dict[str, Tensor], truth: Rows) -> None:
    """Values, and all gradients of the model."""
    right = gradients_of(model, truth["log_probs"], truth["entropy"])
    found = {name: list(outputs[name].unbind()) for name in NAMES}
    ours = gradients_of(model, found["log_probs"], found["entropy"])
    # fp32 rounding of logits of up to 30, which the temperature divides.
    for name in NAMES:
        for row, expected in zip(found[name], truth[name], strict=True):
            torch.testing.assert_close(row[:-1].double(), expected[:-1], rtol=1e-5, atol=1e-5)
    for name, gradient in ours.items():
        largest = right[name].abs().max()
        torch.testing.assert_close(gradient / largest, right[name] / largest, rtol=0, atol=2e-5)


@pytest.mark.parametrize("use_remove_padding", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize(
    "options",
    [
        dict(chunking=True),
        dict(checkpointing=True),
        dict(checkpointing=True, chunking=True),
        dict(compiled=True),
        dict(compiled=True, chunking=True),
    ],
    ids=" and ".join,
)
def test_options_of_the_entropy_from_logits(
    options: dict[str, bool], use_remove_padding: bool, model: Any, switched: Any
) -> None:
    batch = micro_batch(
        torch.tensor(TEMPERATURES), use_fused_kernels=False, use_remove_padding=use_remove_padding
    )
    truth = truth_of(model, batch, use_remove_padding, TEMPERATURES)
    compare(model, outputs_of(engine_of(model, **options), batch), truth)


def sharded_outputs(temperature: Any) -> Tensor:
    """Log-probs of a Llama in FSDP2, which casts a forward's floating-point arguments to bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    kind = transformers.LlamaForCausalLM
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    torch.manual_seed(0)
    made = tiny_llama()
    handle = switch_verl()
    try:
        with mock.patch.object(kind, "forward", kind.forward):  # the process has other tests to run
            fused_by_verl(made, "torch")
            fully_shard(made, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
            outputs = outputs_of(engine_of(made), micro_batch(temperature, use_fused_kernels=True))
            return outputs["log_probs"].detach().values()
    finally:
        handle.restore()


def test_fsdp_does_not_round_temperatures() -> None:
    """In bf16 0.7 would be 0.699, which moves these log-probs by a hundredth."""
    each = run_ranks(1, sharded_outputs, torch.tensor([0.7, 0.7]))[0]
    one = run_ranks(1, sharded_outputs, 0.7)[0]
    torch.testing.assert_close(each, one, rtol=0, atol=1e-4)
    rounded = run_ranks(1, sharded_outputs, float(torch.tensor(0.7, dtype=torch.bfloat16)))[0]
    assert (rounded - one).abs().max() > 1e-3


def test_entropy_is_left_out_unless_asked_for(model: Any, switched: Any) -> None:
    from verl.utils import tensordict_utils as tu

    fused_by_verl(model, "torch")
    batch = micro_batch(1.0, use_fused_kernels=True)
    tu.assign_non_tensor(batch, calculate_entropy=False, calculate_sum_pi_squared=False)
    engine = engine_of(model)
    inputs, output_args = engine.prepare_model_inputs(micro_batch=batch)
    output = engine.module(**inputs, use_cache=False)
    assert output.entropy is None
    outputs = engine.prepare_model_outputs(output, output_args, batch, None)
    assert set(outputs) == {"log_probs"}


def test_stock_refuses_again_after_restore(model: Any) -> None:
    switch_verl().restore()
    fused_by_verl(model, "torch")
    with pytest.raises(AssertionError, match="per sample temperature"):
        outputs_of(engine_of(model), micro_batch(torch.tensor(TEMPERATURES), use_fused_kernels=True))
    with pytest.raises(NotImplementedError, match="calculate_sum_pi_squared"):
        outputs_of(engine_of(model), micro_batch(1.0, use_fused_kernels=True))


def test_a_model_with_a_fused_head_of_its_own_is_left_alone(model: Any, switched: Any) -> None:
    """As VeOmni's, whose engine inherits the FSDP engine's methods: stock's refusal stays."""
    with pytest.raises(AssertionError, match="per sample temperature"):
        engine_of(model).prepare_model_inputs(micro_batch(torch.tensor(TEMPERATURES), use_fused_kernels=True))

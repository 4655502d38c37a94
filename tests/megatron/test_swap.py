"""`swap_output_layer` and its handle on real GPTModels: what changes, what does not, and what is refused."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_entropy import EntropyConfig, TokenStatistics, linear_log_probs_and_entropy
from tests.megatron.tiny_gpt import (
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
    from megatron.core.models.gpt import GPTModel
except ImportError:
    GPTModel = None

pytestmark = needs_megatron

TP2 = TinyGPT(tensor_parallel=2)
TP2_SP = TinyGPT(tensor_parallel=2, sequence_parallel=True)


def swap(core: Any, config: EntropyConfig | None = None) -> Any:
    from mcore_entropy import swap_output_layer

    return swap_output_layer(core, config or EntropyConfig())


def logits_of(core: Any, options: TinyGPT) -> Tensor:
    batch = make_batch(options)
    return core(batch.tokens, batch.position_ids, batch.attention_mask).detach()


def stock_swapped_and_restored_logits(options: TinyGPT) -> list[Tensor]:
    with model_parallel(options):
        core = build(options).core
        names, state = list(dict(core.named_parameters())), list(core.state_dict())
        sharded = list(core.sharded_state_dict())
        attributes = [list(vars(core)), list(vars(core.output_layer))]
        logits = [logits_of(core, options)]
        handle = swap(core)
        logits.append(logits_of(core, options))
        assert type(core.output_layer).__name__ == "EntropyAwareOutputLayer"
        assert list(dict(core.named_parameters())) == names
        assert list(core.state_dict()) == state
        assert list(core.sharded_state_dict()) == sharded
        handle.restore()
        handle.restore()
        logits.append(logits_of(core, options))
        assert type(core.output_layer).__name__ == "ColumnParallelLinear"
        assert isinstance(forward_with_labels(core, make_batch(options)), Tensor)
        assert [list(vars(core)), list(vars(core.output_layer))] == attributes
        return logits


@pytest.mark.parametrize("options", [TinyGPT(), TP2, TP2_SP], ids=["one-rank", "tp2", "tp2-sp"])
def test_without_labels_logits_are_the_stock_heads_to_the_bit(options: TinyGPT) -> None:
    for stock, swapped, restored in run_ranks(
        options.tensor_parallel, stock_swapped_and_restored_logits, options
    ):
        assert torch.equal(stock, swapped)
        assert torch.equal(stock, restored)


def close_checkpoint_writer() -> None:
    """End the process that Megatron's writer keeps for results: it would outlive a rank that is killed."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    queue = filesystem_async._results_queue
    if queue is not None:
        queue._manager.shutdown()
        filesystem_async._results_queue = None


def save_and_load(options: TinyGPT, folder: str) -> list[tuple[Tensor, Tensor]]:
    from megatron.core import dist_checkpointing

    pairs = []
    for writer_is_swapped in (True, False):
        with model_parallel(options):
            writer, reader = build(options).core, build(options).core
            swap(writer if writer_is_swapped else reader)
            with torch.no_grad():
                for parameter in reader.parameters():
                    parameter.zero_()
            path = Path(folder, f"swapped-{writer_is_swapped}")
            path.mkdir(exist_ok=True)
            try:
                dist_checkpointing.save(writer.sharded_state_dict(), str(path))
            finally:
                close_checkpoint_writer()
            state = dist_checkpointing.load(reader.sharded_state_dict(), str(path))
            reader.load_state_dict(state)
            both = zip(writer.parameters(), reader.parameters(), strict=True)
            pairs += [(written.detach(), read.detach()) for written, read in both]
            strict = reader.load_state_dict(writer.state_dict(), strict=True)
            assert not strict.missing_keys
            assert not strict.unexpected_keys
    return pairs


@pytest.mark.parametrize("tied", [False, True])
def test_checkpoints_load_into_a_stock_model_and_the_other_way_round(tied: bool, tmp_path: Path) -> None:
    options = TinyGPT(tensor_parallel=2, tied=tied)
    for pairs in run_ranks(2, save_and_load, options, str(tmp_path)):
        assert len(pairs) > 10
        assert all(torch.equal(written, read) for written, read in pairs)


def requests(options: TinyGPT) -> dict[str, tuple[TokenStatistics, TokenStatistics]]:
    """Through the model with a request, and through the public function on the same hidden states."""
    batch = make_batch(options)
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(batch.labels.shape, generator=generator) > 0.5
    temperature = 0.5 + torch.rand(batch.labels.shape, generator=generator)
    with model_parallel(options):
        core = build(options).core
        hidden: list[Tensor] = []
        core.output_layer.register_forward_pre_hook(lambda _, arguments: hidden.append(arguments[0]))
        handle = swap(core, EntropyConfig(temperature=0.8, metrics=("max_prob",)))

        def direct(**keywords: Any) -> TokenStatistics:
            keywords = {"temperature": 0.8, "metrics": ("max_prob",), **keywords}
            keywords = {k: v.t().contiguous() if isinstance(v, Tensor) else v for k, v in keywords.items()}
            return linear_log_probs_and_entropy(
                hidden[-1],
                core.output_layer.weight,
                batch.labels.t().contiguous(),
                sequence_parallel=options.sequence_parallel,
                **keywords,
            )

        results = {"no request": (forward_with_labels(core, batch), direct())}
        for name, keywords in {
            "mask": {"mask": mask},
            "temperature": {"temperature": temperature},
            "number": {"temperature": 2.0},
            "no entropy": {"entropy": False},
            "all": {"mask": mask, "temperature": temperature, "entropy": False},
        }.items():
            with handle.request(**keywords):
                results[name] = forward_with_labels(core, batch), direct(**keywords)
        results["after"] = forward_with_labels(core, batch), direct()
    return {
        name: tuple(
            TokenStatistics(
                s.log_probs.detach(), None if s.entropy is None else s.entropy.detach(), s.metrics
            )
            for s in pair
        )
        for name, pair in results.items()
    }


@pytest.mark.parametrize("options", [TinyGPT(), TP2_SP], ids=["one-rank", "tp2-sp"])
def test_requests_reach_the_head_one_micro_batch_at_a_time(options: TinyGPT) -> None:
    for results in run_ranks(options.tensor_parallel, requests, options):
        for name, (through_model, direct) in results.items():
            assert torch.equal(through_model.log_probs, direct.log_probs.t()), name
            assert torch.equal(through_model.metrics["max_prob"], direct.metrics["max_prob"].t()), name
            assert (through_model.entropy is None) == (direct.entropy is None), name
            if direct.entropy is not None:
                assert torch.equal(through_model.entropy, direct.entropy.t()), name
        before, after = (results[name][0].log_probs for name in ("no request", "after"))
        assert torch.equal(before, after)
        assert (before != results["mask"][0].log_probs).any()


def policy_and_reference(options: TinyGPT) -> None:
    batch = make_batch(options)
    with model_parallel(options):
        policy, reference = build(options).core, build(options).core
        alone = forward_with_labels(policy, batch).detach()
        policy_handle = swap(policy, EntropyConfig(temperature=0.5))
        reference_handle = swap(reference, EntropyConfig(entropy=False))
        with policy_handle.request(temperature=2.0):
            # The reference runs inside the policy's request, and is not touched by it.
            from_reference = forward_with_labels(reference, batch)
            from_policy = forward_with_labels(policy, batch)
        assert from_reference.entropy is None
        assert from_policy.entropy is not None
        torch.testing.assert_close(-from_reference.log_probs.detach(), alone, rtol=2e-6, atol=2e-6)
        assert (from_policy.log_probs - from_reference.log_probs).abs().max() > 1e-2
        reference_handle.restore()
        assert isinstance(forward_with_labels(reference, batch), Tensor)
        assert isinstance(forward_with_labels(policy, batch), TokenStatistics)


def test_policy_and_reference_do_not_disturb_each_other() -> None:
    run_ranks(2, policy_and_reference, TP2)


def with_output_processor(options: TinyGPT) -> bool:
    batch = make_batch(options)
    with model_parallel(options):
        core = build(options).core
        swap(core)

        def processor(*, hidden_states: Tensor, output_layer: Any, output_weight: Any, **_: Any) -> Tensor:
            return output_layer(hidden_states, weight=output_weight)[0]

        logits = core(
            batch.tokens,
            batch.position_ids,
            batch.attention_mask,
            labels=batch.labels,
            output_processor=processor,
        )
        return torch.equal(logits.transpose(0, 1), logits_of(core, options))


@pytest.mark.skipif(
    "output_processor" not in inspect.signature(GPTModel.forward).parameters if GPTModel else True,
    reason="this megatron-core has no output_processor: it came with 0.18",
)
def test_an_output_processor_gets_the_stock_heads_logits() -> None:
    assert run_ranks(1, with_output_processor, TinyGPT())[0]


def mean_log_prob(output: TokenStatistics, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    assert output.entropy is not None
    return (output.entropy - output.log_probs).mean(), {"loss": output.log_probs.detach().mean()}


def step_with_fusion(options: TinyGPT, fusion: bool) -> Any:
    def prepare(core: Any) -> None:
        swap(core, EntropyConfig(chunk_size=5))
        # The layer's own switch: Megatron's constructor would ask for apex, which only its kernels need.
        core.output_layer.gradient_accumulation_fusion = fusion
        if options.tied:
            core.shared_embedding_or_output_weight().zero_out_wgrad = True

    with model_parallel(options):
        model = build(options, prepare=prepare)
        return gather(model, train(model, loss_function=mean_log_prob))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_gets_the_weight_gradient_once(tied: bool, dtype: torch.dtype) -> None:
    options = TinyGPT(tensor_parallel=2, tied=tied, dtype=dtype)
    plain, fused = (run_ranks(2, step_with_fusion, options, fusion)[0] for fusion in (False, True))
    for name, gradient in plain.gradients.items():
        # Without fusion autograd rounds each micro-batch's gradient to the weight's dtype.
        allowed = (torch.finfo(dtype).eps if dtype != torch.float32 else 2e-6) * gradient.abs().max()
        assert (fused.gradients[name] - gradient).abs().max() <= allowed, name


def missing_main_grad(options: TinyGPT) -> str:
    with model_parallel(options):
        core = build(options).core
        swap(core)
        core.output_layer.gradient_accumulation_fusion = True
        del core.output_layer.weight.main_grad
        with torch.no_grad():  # a reference model
            assert forward_with_labels(core, make_batch(options)).log_probs.isfinite().all()
        with pytest.raises(ValueError, match="main_grad") as error:
            forward_with_labels(core, make_batch(options))
        return str(error.value)


def test_fusion_without_a_main_grad_is_an_error_that_says_what_to_do() -> None:
    assert "DistributedDataParallel" in run_ranks(1, missing_main_grad, TinyGPT())[0]


def chunk_list(options: TinyGPT) -> int:
    with model_parallel(options):
        model = build(options)
        handle = swap([model.wrapped], EntropyConfig())
        heads = int(model.core.post_process)
        with handle.request(temperature=2.0):  # unused on the stage without a head, and no error there
            if heads:
                assert isinstance(model.core.output_layer, torch.nn.Module)
                model.core.decoder.set_input_tensor(torch.zeros(8, 2, 32))
                forward_with_labels(model.wrapped, make_batch(options))
        handle.restore()
        return heads


def test_a_stage_without_a_head_is_left_alone() -> None:
    assert run_ranks(2, chunk_list, TinyGPT(pipeline_parallel=2)) == [0, 1]

"""Megatron-core on the CPU: nothing changes before or after, and what runs inside is right.

A tiny GPT with Megatron's own head trains on 2 and 4 ranks; its gradients are those of one rank.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_entropy.megatron.cpu import megatron_on_cpu
from tests.megatron.tiny_gpt import (
    Batch,
    Step,
    TinyGPT,
    TinyModel,
    build,
    forward_with_labels,
    gather,
    model_parallel,
    needs_megatron,
    parameters,
    train,
)
from tests.ranks import run_ranks

# fp32 rounding over two layers; measured: up to 1.3e-6 of a gradient's largest element
TOLERANCE = 1e-5


# --- what it changes ------------------------------------------------------------------------------


def test_import_changes_nothing_and_needs_no_megatron() -> None:
    program = """
import sys
import torch
owners = (torch, torch.cuda, torch.Tensor, torch.nn.Module)
before = [dict(vars(owner)) for owner in owners]
sys.modules["megatron"] = None  # importing it is an error
import mcore_entropy.megatron.cpu
for owner, attributes in zip(owners, before):
    assert all(vars(owner)[name] is value for name, value in attributes.items()), owner
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_megatron_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.utils", None)
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    before = torch.cuda.current_device
    with pytest.raises(ImportError, match="pip install megatron-core psutil"), megatron_on_cpu():
        pass
    assert torch.cuda.current_device is before


class Snapshot:
    """All attributes of torch and of every Megatron module that is loaded, by identity."""

    def __init__(self) -> None:
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        owners: dict[str, Any] = {
            "torch": torch,
            "torch.cuda": torch.cuda,
            "torch.cuda.random": torch.cuda.random,
            "torch.distributed": torch.distributed,
            "torch.Tensor": torch.Tensor,
            "torch.nn.Module": torch.nn.Module,
            "WrappedTorchNorm": WrappedTorchNorm,
        }
        owners |= {name: module for name, module in sys.modules.items() if name.startswith("megatron.")}
        self.owners = owners
        self.attributes = {name: dict(vars(owner)) for name, owner in owners.items()}

    def changes(self) -> set[str]:
        missing = object()
        found = set()
        for owner_name, before in self.attributes.items():
            now = vars(self.owners[owner_name])
            for name in before.keys() | now.keys():
                if before.get(name, missing) is not now.get(name, missing):
                    found.add(f"{owner_name}.{name}")
        return found


CHANGES = {
    "torch.cuda.current_device",
    "torch.cuda.current_stream",
    "torch.cuda.synchronize",
    "torch.cuda.manual_seed",
    "torch.cuda.get_rng_state",
    "torch.cuda.set_rng_state",
    "torch.Tensor.cuda",
    "torch.Tensor.type",
    "WrappedTorchNorm.__new__",
    "megatron.core.fusions.fused_softmax.get_default_causal_mask",
    "megatron.core.optimizer.clip_grads.torch",
    "megatron.core.optimizer.grad_scaler.torch",
    "megatron.core.optimizer.optimizer.torch",
    "megatron.core.pipeline_parallel.schedules.torch",
    "megatron.core.tensor_parallel.data.torch",
    "megatron.core.tensor_parallel.random._get_cuda_rng_state",
    "megatron.core.tensor_parallel.random._set_cuda_rng_state",
    "megatron.core.utils.torch",
}


def expected_changes() -> set[str]:
    from megatron.core.transformer.moe import moe_utils

    name = "te_general_gemm"  # None already in newer versions, where there is no Transformer Engine
    already = name in vars(moe_utils) and getattr(moe_utils, name) is None
    return CHANGES if already else CHANGES | {f"{moe_utils.__name__}.{name}"}


@needs_megatron
def test_everything_is_restored() -> None:
    import megatron.core.models.gpt.gpt_model  # noqa: F401

    with megatron_on_cpu():  # whatever is imported or built on first use
        pass
    before, expected = Snapshot(), expected_changes()
    with megatron_on_cpu():
        assert before.changes() == expected
        with megatron_on_cpu():
            assert before.changes() == expected
        assert before.changes() == expected
    assert before.changes() == set()


@needs_megatron
@pytest.mark.parametrize("depth", [1, 2])
def test_everything_is_restored_by_an_exception(depth: int) -> None:
    import megatron.core.models.gpt.gpt_model  # noqa: F401

    with megatron_on_cpu():
        pass
    before, expected = Snapshot(), expected_changes()

    def fail_inside() -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(depth):
                stack.enter_context(megatron_on_cpu())
            assert before.changes() == expected
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail_inside()
    assert before.changes() == set()


@needs_megatron
def test_what_asks_for_cuda_gets_the_cpu() -> None:
    with megatron_on_cpu():
        from megatron.core.pipeline_parallel import schedules

        made = [
            schedules.torch.zeros([], dtype=torch.int, device="cuda"),
            schedules.torch.ones(2, device=torch.device("cuda", 0)),
            schedules.torch.tensor([1.0], device="cuda"),
            torch.empty(2, device=torch.cuda.current_device()),
            torch.ones(2).cuda(),
            torch.ones(2).cuda(torch.cuda.current_device(), non_blocking=True),
        ]
        assert [tensor.device.type for tensor in made] == ["cpu"] * len(made)
        assert made[0].dtype == torch.int
        assert schedules.torch.zeros(1, device="meta").device.type == "meta"
        assert schedules.torch.distributed is torch.distributed
        assert torch.ones(2).type() == "torch.cuda.FloatTensor"
        assert torch.ones(2).type(torch.float64).dtype == torch.float64
        torch.cuda.synchronize()


# --- what runs inside -----------------------------------------------------------------------------


def step(options: TinyGPT) -> Step:
    with model_parallel(options):
        model = build(options)
        return gather(model, train(model))


@functools.cache
def one_rank_step(options: TinyGPT) -> Step:
    """The two ranks are data-parallel and get the same batches, so each computes it all."""
    return run_ranks(2, step, options)[0]


def assert_same_step(result: Step, expected: Step, tolerance: float = TOLERANCE) -> None:
    """Losses, and gradients relative to the largest element of each."""
    assert len(result.losses) == len(expected.losses) > 0
    for one, other in zip(result.losses, expected.losses, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=0)
    assert result.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        largest = gradient.abs().max().item()
        assert 0 < largest < float("inf"), name
        torch.testing.assert_close(
            result.gradients[name],
            gradient,
            rtol=0,
            atol=tolerance * largest,
            msg=lambda text, name=name: f"{name}: {text}",
        )


MODELS = {
    "untied": TinyGPT(),
    "tied": TinyGPT(tied=True),
    "MTP": TinyGPT(mtp_layers=1),
    "tied MTP": TinyGPT(tied=True, mtp_layers=2),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP 2": (2, {"tensor_parallel": 2}),
    "TP 2 SP": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "PP 2": (2, {"pipeline_parallel": 2}),
    "TP 2 SP PP 2": (4, {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2}),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@needs_megatron
@every_layout
@pytest.mark.parametrize("model", MODELS)
def test_training_step_equals_one_rank(model: str, layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    options = MODELS[model]
    for result in run_ranks(world_size, step, replace(options, **parallel)):
        assert_same_step(result, one_rank_step(options))


@needs_megatron
@every_layout
def test_bf16_is_as_close_to_fp32_as_on_one_rank(layout: str) -> None:
    """Half-precision training under Float16Module; rounding differs from layout to layout."""

    def error(result: Step) -> float:
        truth = one_rank_step(TinyGPT()).gradients
        return max(
            ((result.gradients[name] - gradient).norm() / gradient.norm()).item()
            for name, gradient in truth.items()
        )

    world_size, parallel = LAYOUTS[layout]
    options = TinyGPT(dtype=torch.bfloat16)
    result = run_ranks(world_size, step, replace(options, **parallel))[0]
    assert 0 < error(result) <= 2 * error(one_rank_step(options))


@needs_megatron
def test_dropout_and_its_recomputation_follow_the_rng_tracker() -> None:
    """Recomputing a layer in backward has to draw the same dropout again."""
    layout = {"tensor_parallel": 2, "sequence_parallel": True}
    dropout = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    recompute = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    kept = run_ranks(2, step, TinyGPT(**layout, transformer=dropout))[0]
    again = run_ranks(2, step, TinyGPT(**layout, transformer={**dropout, **recompute}))[0]
    assert_same_step(again, kept)
    largest = max(
        (kept.gradients[name] - gradient).abs().max().item()
        for name, gradient in one_rank_step(TinyGPT()).gradients.items()
    )
    assert largest > 0.01  # dropout did something


def tracked_draws() -> list[float]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with model_parallel(TinyGPT(tensor_parallel=2)):
        tracker = get_cuda_rng_tracker()
        draws = [torch.rand(1).item()]
        for _ in range(2):
            with tracker.fork():
                draws.append(torch.rand(1).item())
        draws.append(torch.rand(1).item())
        return draws


@needs_megatron
def test_tracker_forks_differ_between_tensor_parallel_ranks_only() -> None:
    (before, one, two, after), (other_before, other_one, other_two, other_after) = run_ranks(2, tracked_draws)
    assert (before, after) == (other_before, other_after)
    assert len({before, one, two, after, other_one, other_two}) == 6


def without_mask(module: Any, batch: Batch) -> Any:
    return forward_with_labels(module, replace(batch, attention_mask=None))  # type: ignore[arg-type]


def step_without_mask(options: TinyGPT) -> Step:
    with model_parallel(options):
        model = build(options)
        return gather(model, train(model, forward=without_mask))


@needs_megatron
def test_no_attention_mask_is_the_causal_one() -> None:
    assert_same_step(run_ranks(2, step_without_mask, TinyGPT())[0], one_rank_step(TinyGPT()))


def adam_steps(options: TinyGPT, number: int) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor], float]]:
    """Weights by Megatron's Adam, those by torch's, and Megatron's gradient norm, step by step."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    def whole(model: TinyModel) -> dict[str, Tensor]:
        weights = {name: parameter.detach().float() for name, parameter in parameters(model).items()}
        return gather(model, Step([{}], weights)).gradients

    clip, rate = 1.0, 1e-2
    with model_parallel(options):
        model = build(options)
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=rate,
                weight_decay=0.0,
                clip_grad=clip,
                log_num_zeros_in_grad=True,
                bf16=options.dtype == torch.bfloat16,
                params_dtype=options.dtype,
                use_distributed_optimizer=options.data_parallel.get("use_distributed_optimizer", False),
            ),
            [model.wrapped],
        )
        # Weights start from what the model rounded them to; gradients come from a plain twin.
        twin = build(replace(options, data_parallel={}))
        mine = {name: torch.nn.Parameter(weight) for name, weight in whole(model).items()}
        adam = torch.optim.AdamW(mine.values(), lr=rate, weight_decay=0.0)
        for _ in range(number):
            for parameter, ours in zip(parameters(twin).values(), parameters(model).values(), strict=True):
                parameter.data.copy_(ours.data)
            for name, gradient in gather(twin, train(twin)).gradients.items():
                mine[name].grad = gradient
            torch.nn.utils.clip_grad_norm_(mine.values(), clip)
            adam.step()
            train(model)
            updated, norm, _ = optimizer.step()
            assert updated
            yield whole(model), {name: weight.detach().clone() for name, weight in mine.items()}, norm


def check_adam(options: TinyGPT, number: int, tolerance: float) -> None:
    norms = []
    for ours, expected, norm in adam_steps(options, number):
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=1e-6)
        norms.append(norm)
    assert norms[0] > norms[-1] > 1  # it learns, and gradients were clipped in every step


ADAMS: dict[str, tuple[TinyGPT, float]] = {
    "fp32 TP 2 SP": (TinyGPT(tensor_parallel=2, sequence_parallel=True), 1e-5),
    "fp32 PP 2 tied": (TinyGPT(pipeline_parallel=2, tied=True), 1e-5),
    "fp32 DP 2 distributed": (TinyGPT(data_parallel={"use_distributed_optimizer": True}), 1e-5),
    # Megatron's fp32 copy of a weight is rounded to bf16 (half an ulp: 2^-9) at the end of a step.
    "bf16 TP 2 SP": (TinyGPT(tensor_parallel=2, sequence_parallel=True, dtype=torch.bfloat16), 2**-8),
    "bf16 DP 2 distributed": (
        TinyGPT(dtype=torch.bfloat16, data_parallel={"use_distributed_optimizer": True}),
        2**-8,
    ),
}


@needs_megatron
@pytest.mark.parametrize("case", ADAMS)
def test_megatrons_adam_with_clipping_equals_torchs(case: str) -> None:
    options, tolerance = ADAMS[case]
    run_ranks(2, check_adam, options, 3, tolerance)

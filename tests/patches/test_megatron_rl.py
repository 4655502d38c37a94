"""The patched Megatron-RL of a real checkout, on the CPU: its functions against GRPO written out in fp64."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from patches import apply
from tests.megatron.parity import assert_as_near_as, errors, forward_without_labels
from tests.megatron.test_rl import arguments
from tests.megatron.tiny_gpt import Batch, Step, TinyGPT, build, gather, make_batch, model_parallel, train
from tests.ranks import run_ranks

if "MEGATRON_LM" not in os.environ:
    pytest.skip("needs MEGATRON_LM, a checkout of Megatron-LM", allow_module_level=True)
CHECKOUT = Path(os.environ["MEGATRON_LM"])
VERSIONS = apply.targets()["megatron_rl"]
try:
    apply.version_of(CHECKOUT, VERSIONS)
except apply.Refused as refusal:
    pytest.skip(f"no patch for it: {refusal}", allow_module_level=True)
for package in ("wandb", "tensorboard", "openai", "fastapi", "uvicorn"):
    pytest.importorskip(package, reason="megatron.rl imports it")

GRPO = dict(clamp_eps_lower=0.2, clamp_eps_upper=0.25, kl_beta=0.1)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The checkout's megatron/rl, patched; the rest of megatron comes from where it is installed."""
    folder = tmp_path_factory.mktemp("patched")
    for path in (CHECKOUT / "megatron" / "rl").rglob("*.py"):
        copy = folder / path.relative_to(CHECKOUT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (folder / "train_rl.py").write_bytes((CHECKOUT / "train_rl.py").read_bytes())
    apply.run("revert", folder, VERSIONS)
    apply.run("apply", folder, VERSIONS)
    (folder / "megatron" / "inference").symlink_to(CHECKOUT / "megatron" / "inference")
    return str(folder)


def rl_utils_of(folder: str) -> Any:
    if folder not in sys.path:
        sys.path.append(folder)
    import megatron.rl.rl_utils

    assert megatron.rl.rl_utils.__file__ is not None and megatron.rl.rl_utils.__file__.startswith(folder)
    return megatron.rl.rl_utils


@contextlib.contextmanager
def as_trained(rl_utils: Any, args: argparse.Namespace) -> Iterator[None]:
    """What Megatron's training loop would have set up: the arguments, and a timer for each range."""
    untimed = mock.Mock(return_value=contextlib.nullcontext())
    with mock.patch.multiple(rl_utils, get_args=lambda: args, get_nvtx_range=lambda: untimed):
        yield


class Unpacked(nn.Module):
    """Drops packed_seq_params, which Megatron-RL always gives and attention on the CPU does not take."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.config, self.pg_collection = module.config, None

    def forward(self, *args: Any, packed_seq_params: Any, **keywords: Any) -> Any:
        assert packed_seq_params.qkv_format == "thd"
        return self.module(*args, **keywords)


def others(batch: Batch) -> dict[str, Tensor]:
    """What GRPO takes beside the log-probs: [b, s - 1], some ratios clipped."""
    generator = torch.Generator().manual_seed(7)
    old, ref = (-4 + 0.5 * torch.randn(2, *batch.tokens[:, 1:].shape, generator=generator)).unbind()
    return {"old_logprobs": old, "ref_logprobs": ref, "advantages": torch.tensor([1.0, -0.5])}


def masked(loss: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    mask = batch.loss_mask[:, 1:]
    mean, shown = ((values * mask).sum() / mask.sum() for values in (loss, entropy))
    return mean, {"loss": mean.detach().clone(), "entropy": shown.detach().clone()}


def dense_loss(weight: float, logits: Tensor, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Any]:
    """GRPO's formula with the true entropy, on logits [b, s, V/tp]."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    log_p = gather_from_tensor_model_parallel_region(logits).to(dtype)[:, :-1].log_softmax(-1)
    log_probs = log_p.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    given = {name: value.to(dtype) for name, value in others(batch).items()}
    ratios, advantages = (log_probs - given["old_logprobs"]).exp(), given["advantages"].unsqueeze(-1)
    clipped = ratios.clamp(1 - GRPO["clamp_eps_lower"], 1 + GRPO["clamp_eps_upper"])
    difference = given["ref_logprobs"] - log_probs
    kl = difference.exp() - difference - 1
    policy = -torch.minimum(ratios * advantages, clipped * advantages)
    return masked(policy + GRPO["kl_beta"] * kl - weight * entropy, entropy, batch)


def dense_step(options: TinyGPT, weight: float, dtype: torch.dtype) -> Step:
    with model_parallel(options):
        model = build(options)
        loss = functools.partial(dense_loss, weight, dtype=dtype)
        return gather(model, train(model, forward=forward_without_labels, loss_function=loss))


def patched_step(options: TinyGPT, weight: float, folder: str) -> Step:
    from mcore_entropy.megatron.rl import swap_for_rl

    args = arguments(weight=weight)
    rl_utils = rl_utils_of(folder)

    def forward(module: Any, batch: Batch) -> Any:
        return rl_utils.get_logprobs(Unpacked(module), batch.tokens, batch.position_ids)

    def loss(log_probs: Tensor, batch: Batch) -> tuple[Tensor, Any]:
        total, _, _, entropy, *_ = rl_utils.calculate_grpo_loss(
            log_probs, entropy_weight=weight, **GRPO, **others(batch)
        )
        return masked(total, entropy, batch)

    with model_parallel(options), as_trained(rl_utils, args):
        model = build(options, prepare=lambda core: swap_for_rl([core], args))
        return gather(model, train(model, forward=forward, loss_function=loss))


@pytest.mark.parametrize("weight", [0.0, 0.2])
def test_get_logprobs_and_grpo_loss(weight: float, patched: str) -> None:
    options = TinyGPT(tensor_parallel=2)
    truth = run_ranks(1, dense_step, TinyGPT(), weight, torch.float64)[0]
    stock = errors(run_ranks(2, dense_step, options, weight, torch.float32)[0], truth)
    ours = errors(run_ranks(2, patched_step, options, weight, patched)[0], truth)
    assert_as_near_as(stock, ours)


def batches_of_log_probs(options: TinyGPT, folder: str) -> tuple[Tensor, Tensor, Tensor]:
    """compute_logprobs_batch of a bf16 model; the exact log-probs of its bf16 logits, and stock's of them."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from mcore_entropy.megatron.rl import swap_for_rl

    args = arguments()
    rl_utils = rl_utils_of(folder)
    batch = make_batch(options)
    with model_parallel(options), as_trained(rl_utils, args):
        stock = build(options).wrapped
        stock.eval()
        logits = stock(
            batch.tokens, batch.position_ids, None, runtime_gather_output=True, fp32_output=False
        ).detach()
        selected = rl_utils.selective_log_softmax(logits[:, :-1], batch.tokens[:, 1:])
        model = Unpacked(build(options, prepare=lambda core: swap_for_rl([core], args)).wrapped)
        model.model_type = None
        log_probs = rl_utils.compute_logprobs_batch(
            model=model,
            data_loader=[(batch.tokens, batch.position_ids)],
            forward_backward_func=get_forward_backward_func(),
            packing_context=None,
            trajs_batch_size=options.micro_batch_size,
            seq_length=options.sequence_length,
            logprobs_batch_size=options.micro_batch_size,
            decoder_seq_length=options.sequence_length,
            dtype=torch.bfloat16,
            pp_group=parallel_state.get_pipeline_model_parallel_group(),
            is_correction=False,
        )
    log_p = logits[:, :-1].double().log_softmax(-1)
    return log_probs, log_p.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1), selected


def test_log_probs_of_a_bf16_model_are_fp32(patched: str) -> None:
    """Stock's are bf16, off by half a bf16 ulp of 4; ours differ from fp64 by their logits' rounding."""
    options = TinyGPT(tensor_parallel=2, dtype=torch.bfloat16)
    for log_probs, right, stock in run_ranks(2, batches_of_log_probs, options, patched):
        assert log_probs.dtype == torch.float32 and stock.dtype == torch.bfloat16
        ours, theirs = (log_probs - right).abs().max().item(), (stock - right).abs().max().item()
        assert ours < theirs, SimpleNamespace(ours=ours, theirs=theirs)

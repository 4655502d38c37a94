"""Tensor and sequence parallelism over NCCL, on two GPUs, against the fp64 truth of the whole vocabulary."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import mcore_entropy as me
from tests import reference as ref
from tests.unit import cases

ROWS, COLUMNS, RANKS = 512, 4096, 2


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    hidden, weight, _ = cases.make_linear(dtype, rows=ROWS, columns=COLUMNS, width=256)
    mask = torch.arange(ROWS) % 3 != 0
    return hidden, weight, cases.make_target((ROWS,), COLUMNS), mask, cases.make_upstream((ROWS,), dtype)


def rank_main(rank: int, folder: str, dtype: torch.dtype, sequence_parallel: bool) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=RANKS, device_id=torch.device("cuda", rank)
    )
    hidden, weight, target, mask, upstream = inputs(dtype)
    rows = slice(rank * ROWS // RANKS, (rank + 1) * ROWS // RANKS) if sequence_parallel else slice(None)
    own_hidden = hidden[rows].cuda().requires_grad_()
    shard = weight.chunk(RANKS)[rank].cuda().requires_grad_()
    result = me.linear_log_probs_and_entropy(
        own_hidden,
        shard,
        target.cuda(),
        mask=mask.cuda(),
        sequence_parallel=sequence_parallel,
        tp_group=dist.group.WORLD,
        chunk_size=200,
    )
    torch.autograd.backward([result.log_probs, result.entropy], [g.cuda() for g in upstream])
    out = {
        "log_probs": result.log_probs,
        "entropy": result.entropy,
        "hidden": own_hidden.grad,
        "weight": shard.grad,
    }
    torch.save({name: value.detach().cpu() for name, value in out.items()}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two CUDA devices")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=cases.dtype_name)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_fused_head(dtype: torch.dtype, sequence_parallel: bool) -> None:
    hidden, weight, target, mask, (g_lp, g_h) = inputs(dtype)
    given = {"mask": mask, "grad_log_probs": g_lp, "grad_entropy": g_h}
    truth = ref.truth_linear(hidden, weight, target, **given)
    eager = ref.eager_linear(hidden, weight, target, **given)
    wide = ref.eager_linear(hidden.float(), weight.float(), target, **given)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, dtype, sequence_parallel), nprocs=RANKS)
        results = [torch.load(f"{folder}/{rank}.pt") for rank in range(RANKS)]
    for result in results:
        cases.compare_values(result["log_probs"], truth.log_probs, wide.log_probs, "log_probs")
        cases.compare_values(result["entropy"], truth.entropy, wide.entropy, "entropy")
    whole = {"weight": torch.cat([result["weight"] for result in results])}
    if sequence_parallel:
        whole["hidden"] = torch.cat([result["hidden"] for result in results])
    else:
        assert torch.equal(results[0]["hidden"], results[1]["hidden"])
        whole["hidden"] = results[0]["hidden"]
    for name, gradient in whole.items():
        cases.compare_gradient(name, gradient, truth, eager)

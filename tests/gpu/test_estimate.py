"""`mcore-entropy estimate` against torch.cuda.max_memory_allocated, on this GPU.

Beyond 5 %: the allocator rounds each block up, by at most 2 MiB of the large ones.
"""

from __future__ import annotations

import gc
from itertools import product

import pytest
import torch

from mcore_entropy.backends.triton.machine import machine
from mcore_entropy.cli.estimate.fused_head import fused
from mcore_entropy.cli.estimate.logits_heads import chunked, eager
from mcore_entropy.cli.estimate.tiles import TorchTiles, TritonTiles
from mcore_entropy.cli.estimate.workload import Head, Workload
from tests.cli.measured import Case, run_once

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BLOCKS = 16 * 2**20  # eight large blocks, each rounded up
# By columns, and by tokens in several chunks; the last has columns that are no multiple of a tile's.
SHAPES = ((8192, 2048, 65536), (20000, 1024, 8192), (4096, 1000, 50257))

LOGITS = [
    Case(head, Workload(*shape, dtype, entropy=entropy))
    for head in ("eager", "chunked")
    for shape, dtype, entropy in product(SHAPES, (BF16, FP32), (True, False))
]
FUSED = [
    Case("fused", Workload(*shape, dtype, masked=masked, entropy=entropy, main_grad=main_grad))
    for shape, dtype, (masked, entropy), main_grad in product(
        SHAPES, (BF16, FP16, FP32), ((0.0, True), (0.0, False), (0.6, True)), (False, True)
    )
] + [
    Case("fused", Workload(8192, 2048, 65536, BF16), workspace_mib=64),
    Case("fused", Workload(8192, 2048, 65536, BF16), logits_budget_mib=512),
    Case("fused", Workload(8192, 2048, 65536, BF16, masked=0.6), logits_budget_mib=4096),
    Case("fused", Workload(20000, 1024, 8192, BF16, main_grad=True), chunk_size=2048),
]
TORCH = [
    Case("fused", Workload(8192, 2048, 65536, dtype, masked=masked), backend="torch")
    for dtype, masked in product((BF16, FP16, FP32), (0.0, 0.6))
]


def estimated(case: Case) -> Head:
    work, execution, device = case.work, case.execution, torch.device("cuda", 0)
    if case.head != "fused":
        return {"eager": eager, "chunked": chunked}[case.head](work)
    if case.backend == "torch":
        return fused(work, TorchTiles(work, execution, device), execution, case.chunk_size)
    return fused(work, TritonTiles(work, execution, machine(device), device), execution, case.chunk_size)


def allocated_peak(case: Case) -> int:
    """Bytes beyond the inputs, after a first run has made what libraries keep."""
    inputs = case.inputs(None, "cuda")
    run_once(case.head, inputs)
    inputs.hidden.grad = inputs.weight.grad = None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run_once(case.head, inputs)
    torch.cuda.synchronize()
    del results
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("case", [*LOGITS, *FUSED, *TORCH], ids=str)
def test_within_five_per_cent(case: Case) -> None:
    peak = estimated(case).peak
    assert peak.bytes == pytest.approx(allocated_peak(case), rel=0.05, abs=BLOCKS), peak

"""`mcore-entropy estimate` against the peaks of the three heads as they run on the CPU, on one rank and two.

The workspace is small, so that tiles do not hide the rest. Tests on a GPU: tests/gpu/test_estimate.py.
"""

from __future__ import annotations

import functools

import pytest
import torch

from mcore_entropy.cli.estimate.cards import card_of, tiles_of
from mcore_entropy.cli.estimate.fused_head import fused
from mcore_entropy.cli.estimate.logits_heads import chunked, eager
from mcore_entropy.cli.estimate.workload import Head, Workload
from tests.cli.measured import Case, live_peaks
from tests.ranks import run_ranks

FP32, BF16 = torch.float32, torch.bfloat16
# More tokens than columns, fewer, and a last chunk that is shorter. The second goes by columns in bf16.
MANY, FEW, UNEVEN = (4096, 64, 1024), (1024, 128, 8000), (2500, 96, 3000)


def logits_cases(ranks: int) -> list[Case]:
    return [
        Case(head, Workload(*shape, dtype, ranks, sequence_parallel, entropy=entropy))
        for head in ("eager", "chunked")
        for shape, dtype, entropy in (
            ((2500, 32, 1000), FP32, True),
            ((2500, 32, 1000), BF16, False),
            ((64, 1024, 4000), BF16, True),  # products outweigh the statistics
            ((20000, 8, 500), BF16, True),  # and here do the gradients of all chunks put together
        )
        for sequence_parallel in {False, ranks > 1}
    ]


def fused_cases(ranks: int) -> list[Case]:
    cases = [
        Case("fused", Workload(*shape, dtype, ranks, sequence_parallel, masked), 4, chunk_size)
        for shape, chunk_size in ((MANY, None), (FEW, 512), (UNEVEN, None))
        for dtype in (FP32, BF16)
        for masked in (0.0, 0.6)
        for sequence_parallel in {False, ranks > 1}
    ]
    cases += [
        Case("fused", Workload(*UNEVEN, BF16, ranks, entropy=False, main_grad=True), 4, 512),
        Case("fused", Workload(*FEW, BF16, ranks, main_grad=True), 1),
        # The last moment is the largest: rounding the weight's sum, and what autograd gets beside main_grad.
        Case("fused", Workload(2000, 256, 3500, BF16, ranks), 1, 256),
        Case("fused", Workload(256, 256, 16000, BF16, ranks, main_grad=True), 1, 128),
        Case("fused", Workload(3000, 32, 2000, torch.float16, ranks), 4),
        Case("fused", Workload(*UNEVEN, BF16, ranks, masked=1.0), 4),
        Case("fused", Workload(64, 16, 9000, FP32, ranks), 12),
    ]
    return cases


def estimated(case: Case) -> Head:
    work, execution = case.work, case.execution
    if case.head == "fused":
        return fused(work, tiles_of("auto", card_of("cpu"), work, execution), execution, case.chunk_size)
    return {"eager": eager, "chunked": chunked}[case.head](work)


CASES = {ranks: logits_cases(ranks) + fused_cases(ranks) for ranks in (1, 2)}


@functools.cache
def peaks(ranks: int) -> dict[Case, int]:
    """The largest of any rank, in bytes."""
    cases = CASES[ranks]
    if ranks == 1:
        return dict(zip(cases, live_peaks(cases), strict=True))
    # gloo's thread may hold a finished reduction's tensor a moment longer: the lower of two runs counts.
    runs = [run_ranks(ranks, live_peaks, cases, timeout=240) for _ in range(2)]
    return {
        case: min(max(of_ranks) for of_ranks in of_case)
        for case, *of_case in zip(cases, *(zip(*run, strict=True) for run in runs), strict=True)
    }


def name(case: Case) -> str:
    work = case.work
    flags = f"masked{work.masked:g}-" * bool(work.masked) + "sp-" * work.sequence_parallel
    flags += "main_grad-" * work.main_grad + "no_entropy-" * (not work.entropy)
    shape = f"{work.tokens}x{work.hidden_size}x{work.vocab_size}"
    return f"{case.head}-tp{work.tensor_parallel}-{shape}-{work.dtype}-{flags}{case.chunk_size}".replace(
        "torch.", ""
    )


@pytest.mark.parametrize("case", [*CASES[1], *CASES[2]], ids=name)
def test_within_five_per_cent(case: Case) -> None:
    peak = estimated(case).peak
    assert peak.bytes == pytest.approx(peaks(case.work.tensor_parallel)[case], rel=0.05), peak


def test_the_cases_meet_every_kind_of_moment() -> None:
    """A moment that is the largest of no case would be measured by none."""
    at_peak = [estimated(case).peak.name for case in [*CASES[1], *CASES[2]]]
    kinds = ("statistics", "the last chunk", "the chunks' gradients together", "products of the gradients")
    kinds += ("pass ", "rounding", "what autograd gets for main_grad", "forward")
    assert not [kind for kind in kinds if not any(name.startswith(kind) for name in at_peak)]

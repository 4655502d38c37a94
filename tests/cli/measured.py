"""Cases of `mcore-entropy estimate`, and what they take when they are run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

import mcore_entropy as me
from mcore_entropy.cli.estimate.workload import Workload
from tests.cli.heads import HEADS, Inputs
from tests.unit.test_memory import live_bytes


@dataclass(frozen=True)
class Case:
    """A workload, a head, and how it is run."""

    head: str
    work: Workload
    workspace_mib: int | None = None
    chunk_size: int | None = None
    logits_budget_mib: int = 0
    backend: str = "auto"

    @property
    def execution(self) -> me.Execution:
        return me.Execution(self.backend, self.workspace_mib, self.logits_budget_mib)

    def inputs(self, group: dist.ProcessGroup | None, device: str = "cpu") -> Inputs:
        work = self.work
        torch.manual_seed(0)
        hidden = torch.randn(work.tokens // work.sections, work.hidden_size, device=device).to(work.dtype)
        weight = torch.randn(work.columns, work.hidden_size, device=device) * work.hidden_size**-0.5
        weight = weight.to(work.dtype).requires_grad_()
        if work.main_grad:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
            weight.grad_added_to_main_grad = False
        return Inputs(
            hidden.requires_grad_(),
            weight,
            torch.randint(0, work.vocab_size, (work.tokens,), device=device),
            evenly_masked(work, device) if work.masked else None,
            group,
            work.sequence_parallel,
            work.entropy,
            self.chunk_size,
            self.execution,
            work.main_grad,
        )


def evenly_masked(work: Workload, device: str) -> torch.Tensor:
    """[N] bool with the share of False that the workload says, spread as evenly as possible."""
    share = 1 - work.masked
    place = torch.arange(work.tokens, device=device, dtype=torch.float64)
    return ((place + 1) * share).floor() > (place * share).floor()


def run_once(head: str, inputs: Inputs) -> object:
    """Forward and backward with upstream gradients for every result."""
    results = HEADS[head](inputs)
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])
    return results


def live_peak(case: Case) -> int:
    """Bytes of storages alive at the peak beyond the inputs, on this rank."""
    inputs = case.inputs(dist.group.WORLD if case.work.tensor_parallel > 1 else None)
    known = [inputs.hidden, inputs.weight, inputs.target]
    known += [] if inputs.mask is None else [inputs.mask]
    known += [inputs.weight.main_grad] if case.work.main_grad else []
    return live_bytes(lambda: run_once(case.head, inputs), known)


def live_peaks(cases: list[Case]) -> list[int]:
    return [live_peak(case) for case in cases]

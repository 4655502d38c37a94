"""Run tests on another backend than the device's own: MCORE_ENTROPY_TEST_BACKEND=npu_fused, as `make npu`.

"auto" then means that backend, here and in the processes of `run_ranks`; fp64, which Ascend's operator does
not take, gets the plain one. The operator is a stand-in on the CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os

import torch

from mcore_entropy.backends.interface import Backend
from mcore_entropy.execution import Execution
from mcore_entropy.functional import problem
from tests.npu.operator import registered

VARIABLE = "MCORE_ENTROPY_TEST_BACKEND"
_for_the_process = contextlib.ExitStack()


def install() -> None:
    """Do it for this process, if the variable asks for it; a second time changes nothing."""
    name = os.environ.get(VARIABLE)
    if name is None or hasattr(problem.select, "instead_of"):
        return
    _for_the_process.enter_context(registered())
    select = problem.select

    def instead(execution: Execution, device: torch.device, dtype: torch.dtype) -> Backend:
        if execution.backend == "auto":
            chosen = "npu" if dtype == torch.float64 else name
            execution = dataclasses.replace(execution, backend=chosen)
        return select(execution, device, dtype)

    instead.instead_of = select  # type: ignore[attr-defined]
    problem.select = instead

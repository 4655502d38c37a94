"""Checks of the backends on a device, against dense fp64 on the CPU; each is a line of a report.

N tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

import mcore_entropy as me

_TOKENS, _COLUMNS, _WIDTH = 96, 4099, 64
# The largest error allowed, as a share of the largest number; fp32 statistics whatever the input's dtype, but
# gradients in the input's.
_VALUES = 2e-6
_GRADIENTS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Result:
    """One check: what it was, whether it passed, and its error or what went wrong."""

    name: str
    passed: bool
    detail: str

    def line(self) -> str:
        return f"{'ok    ' if self.passed else 'FAILED'}  {self.name}: {self.detail}"


def run_checks(
    device: torch.device, backends: Sequence[str], dtypes: Sequence[torch.dtype], runs: int
) -> Iterator[Result]:
    """All checks on `device`, each as it ends; one that raises has failed, and the others go on.

    Args:
        backends: names for `Execution`, each checked by itself.
        dtypes: fp32, fp16, bf16.
        runs: how often the same call must give the same bits.
    """
    for backend, dtype in itertools.product(backends, dtypes):
        kind = f"{backend}, {str(dtype).removeprefix('torch.')}"
        for name, check in _checks(device, dtype, me.Execution(backend=backend), runs):
            try:
                error, allowed = check()
            except Exception as problem:  # whatever the device makes of it belongs into the report
                yield Result(f"{kind}, {name}", False, f"{type(problem).__name__}: {problem}")
            else:
                yield Result(f"{kind}, {name}", error <= allowed, f"error {error:.1e}, allowed {allowed:.0e}")


Check = Callable[[], tuple[float, float]]


def _checks(
    device: torch.device, dtype: torch.dtype, execution: me.Execution, runs: int
) -> Iterator[tuple[str, Check]]:
    """Pairs of a name and a check that gives its error and what is allowed."""
    for form in (_Logits, _Head):
        case = form(device, dtype, execution)
        yield f"{case.name}: values", case.value_error
        yield f"{case.name}: gradients", case.gradient_error
        yield f"{case.name}: the same bits in {runs} runs", partial(case.different_runs, runs)
    yield "a row of -inf but one", _Logits(device, dtype, execution).banned_error


class _Case:
    """Logits or a head, with a mask, a temperature for each token, and its truth."""

    name: str
    inputs: tuple[Tensor, ...]

    def __init__(self, device: torch.device, dtype: torch.dtype, execution: me.Execution) -> None:
        self._device, self._dtype, self._execution = device, dtype, execution
        generator = torch.Generator().manual_seed(0)
        self._target = torch.randint(_COLUMNS, (_TOKENS,), generator=generator)
        self._mask = torch.arange(_TOKENS) % 5 != 0
        self._temperature = torch.linspace(0.5, 2.0, _TOKENS)
        self._upstream = torch.randn(2, _TOKENS, generator=generator)
        self.inputs = tuple(x.to(dtype) for x in self.random_inputs(generator))

    def random_inputs(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def logits(self, *inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def ours(self, inputs: list[Tensor], **keywords: Any) -> me.TokenStatistics:
        raise NotImplementedError

    @cached_property
    def _truth(self) -> tuple[Tensor, list[Tensor]]:
        """Log-probs and entropy [2, N], and the gradients, dense in fp64."""
        inputs = [x.double().requires_grad_() for x in self.inputs]
        log_p = (self.logits(*inputs) / self._temperature.double()[:, None]).log_softmax(-1)
        log_probs = log_p.gather(1, self._target[:, None])[:, 0]
        both = torch.stack((log_probs, -(log_p.exp() * log_p).sum(1))) * self._mask
        return both.detach(), list(torch.autograd.grad((both * self._upstream).sum(), inputs))

    @cached_property
    def _first_run(self) -> tuple[Tensor, list[Tensor]]:
        return self._found()

    def _found(self) -> tuple[Tensor, list[Tensor]]:
        inputs = [x.to(self._device).requires_grad_() for x in self.inputs]
        statistics = self.ours(
            inputs,
            mask=self._mask.to(self._device),
            temperature=self._temperature.to(self._device),
            execution=self._execution,
        )
        assert statistics.entropy is not None
        both = torch.stack((statistics.log_probs, statistics.entropy))
        gradients = torch.autograd.grad((both * self._upstream.to(self._device)).sum(), inputs)
        return both.detach().cpu(), [gradient.cpu() for gradient in gradients]

    def value_error(self) -> tuple[float, float]:
        truth, found = self._truth[0], self._first_run[0]
        return _error(found, truth), _VALUES

    def gradient_error(self) -> tuple[float, float]:
        pairs = zip(self._first_run[1], self._truth[1], strict=True)
        return max(_error(found, truth) for found, truth in pairs), _GRADIENTS[self._dtype]

    def different_runs(self, runs: int) -> tuple[float, float]:
        """How many of the runs have other bits than the first; none may."""
        first = self._first_run
        different = 0
        for _ in range(runs):
            values, gradients = self._found()
            same = torch.equal(values, first[0]) and all(map(torch.equal, gradients, first[1]))
            different += not same
        return float(different), 0.0


class _Logits(_Case):
    name = "logits"

    def random_inputs(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (3 * torch.randn(_TOKENS, _COLUMNS, generator=generator),)

    def logits(self, *inputs: Tensor) -> Tensor:
        return inputs[0]

    def ours(self, inputs: list[Tensor], **keywords: Any) -> me.TokenStatistics:
        (logits,) = inputs
        return me.vocab_parallel_log_probs_and_entropy(logits, self._target.to(self._device), **keywords)

    def banned_error(self) -> tuple[float, float]:
        """Log-prob and entropy where one token alone is left: 0, and nothing that is not a number."""
        logits = torch.full((3, 17), -torch.inf, dtype=self._dtype)
        logits[torch.arange(3), torch.tensor([0, 7, 16])] = 2.0
        target = torch.tensor([0, 7, 16], device=self._device)
        found = me.vocab_parallel_log_probs_and_entropy(
            logits.to(self._device), target, execution=self._execution
        )
        assert found.entropy is not None
        both = torch.stack((found.log_probs, found.entropy)).cpu()
        return float(both.abs().nan_to_num(nan=torch.inf).max()), _VALUES


class _Head(_Case):
    name = "head"

    def random_inputs(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        hidden = torch.randn(_TOKENS, _WIDTH, generator=generator)
        return hidden, 3 * _WIDTH**-0.5 * torch.randn(_COLUMNS, _WIDTH, generator=generator)

    def logits(self, *inputs: Tensor) -> Tensor:
        hidden, weight = inputs
        return hidden @ weight.t()

    def ours(self, inputs: list[Tensor], **keywords: Any) -> me.TokenStatistics:
        hidden, weight = inputs
        return me.linear_log_probs_and_entropy(hidden, weight, self._target.to(self._device), **keywords)


def _error(found: Tensor, truth: Tensor) -> float:
    """The largest difference, as a share of the largest number; infinite for a NaN."""
    difference = (found.double() - truth).abs().max() / truth.abs().max()
    return float(difference.nan_to_num(nan=torch.inf))

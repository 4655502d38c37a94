"""The checks see small mistakes: each is put into the torch backend, and a plain case must then fail."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_entropy.backends import TorchBackend
from mcore_entropy.backends.pytorch import backend
from tests.properties.case import Case
from tests.properties.checks import check
from tests.properties.tensors import answers

LOGITS = Case("both", (4, 3), (50,), metrics=("max_prob", "sum_pi_squared", "varentropy"))
HEAD = replace(LOGITS, form="linear", width=8, trained=("bias", "hidden", "weight"), bias="plain")


def _uncentred(t: Any) -> None:
    """T as a difference of two sums that are large at an offset."""
    shift = t.maximum * t.sum_exp
    t.centred.add_(shift).sub_(shift)


STATISTICS: dict[str, tuple[Case, Callable[[Any], Any]]] = {
    "S off by a millionth": (LOGITS, lambda t: t.sum_exp.mul_(1 + 1e-6)),
    "S of the head off by a hundred-thousandth": (HEAD, lambda t: t.sum_exp.mul_(1 + 1e-5)),
    "T off by two millionths": (LOGITS, lambda t: t.centred.mul_(1 + 2e-6)),
    "T uncentred": (replace(LOGITS, rows=("offset",)), _uncentred),
    "Q off by four millionths": (LOGITS, lambda t: t.centred_squared.mul_(1 + 4e-6)),
    "R off by four millionths": (LOGITS, lambda t: t.exp_squared.mul_(1 + 4e-6)),
    "target of the neighbour": (LOGITS, lambda t: t.target_logit.copy_(t.target_logit.roll(1))),
}


@pytest.mark.parametrize("mistake", STATISTICS)
def test_mistakes_in_the_statistics_are_seen(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    case, change = STATISTICS[mistake]
    check(case, [answers(case)])
    right = TorchBackend.tile_statistics

    def wrong(*arguments: Any) -> Any:
        statistics = right(*arguments)
        change(statistics)
        return statistics

    monkeypatch.setattr(TorchBackend, "tile_statistics", staticmethod(wrong))
    with pytest.raises(AssertionError, match=r"at \("):
        check(case, [answers(case)])


GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rounded to bf16": lambda g: g.bfloat16().float(),
    "off by two hundred-thousandths": lambda g: g.mul_(1 + 2e-5),
    "one small number lost": lambda g: torch.where(g.abs() == g.abs().amin(-1, keepdim=True), 0.0, g),
}


@pytest.mark.parametrize("case", [LOGITS, HEAD], ids=lambda case: case.form)
@pytest.mark.parametrize("mistake", GRADIENTS)
def test_mistakes_in_the_gradient_are_seen(monkeypatch: pytest.MonkeyPatch, mistake: str, case: Case) -> None:
    right = backend.tile_gradient_

    @functools.wraps(right)
    def wrong(*arguments: Any) -> torch.Tensor:
        return GRADIENTS[mistake](right(*arguments))

    monkeypatch.setattr(backend, "tile_gradient_", wrong)
    with pytest.raises(AssertionError, match=r"gradient of \w+ at \("):
        check(case, [answers(case)])


def test_a_changed_input_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TorchBackend.logits_statistics

    def in_place(self: TorchBackend, logits: Any, *rest: Any) -> Any:
        statistics = right(self, logits, *rest)
        logits.whole.data[0, 0, 0] += 1.0  # past autograd's version counter
        return statistics

    monkeypatch.setattr(TorchBackend, "logits_statistics", in_place)
    with pytest.raises(AssertionError, match="input was changed"):
        answers(LOGITS)

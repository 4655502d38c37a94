"""The registered ops by themselves: `torch.library.opcheck`, and that no argument gets lost on the way in."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import mcore_entropy as me
from mcore_entropy.functional.ops.call import Call, Upstream, call_of
from mcore_entropy.functional.ops.linear import Head, linear_backward, linear_forward
from mcore_entropy.functional.ops.logits import logits_backward, logits_forward
from mcore_entropy.functional.problem import Keywords
from mcore_entropy.statistics import METRICS, Wanted
from tests.unit.cases import N, leaf, make_linear, make_logits, make_target, make_upstream

COLUMNS = 37
MASK = torch.arange(N) % 3 != 0
TARGET = make_target((N,), COLUMNS)


def test_a_call_survives_the_way_through_an_op() -> None:
    keywords = Keywords(
        wanted=Wanted.checked(False, METRICS),
        target=TARGET,
        mask=MASK,
        temperature=0.3,
        ignore_index=4,
        vocab_size=5,
        vocab_start_index=6,
        chunk_size=7,
        execution=me.Execution("torch", 8, 9, False, True),
    )
    # None is left at its default: a new field needs an argument of the ops, and a value here.
    for record in (keywords, keywords.execution):
        assert record is not None
        for field in dataclasses.fields(record):
            assert field.name == "wanted" or getattr(record, field.name) is not field.default
    found = call_of(None, keywords).keywords()
    for field in dataclasses.fields(Keywords):
        ours, given = getattr(found, field.name), getattr(keywords, field.name)
        assert ours is given or ours == given
    per_token = dataclasses.replace(keywords, temperature=torch.ones(N), wanted=Wanted(False, True))
    found = call_of(None, per_token).keywords()
    assert found.temperature is per_token.temperature and found.wanted == per_token.wanted


ALL = torch.ones(N, dtype=torch.bool)  # a row that is left out has NaN, for which opcheck has no "equal"


@pytest.mark.parametrize(
    ("dtype", "keywords"),
    [
        (torch.float32, Keywords(wanted=Wanted(target=False), temperature=0.5)),
        (
            torch.float32,
            Keywords(wanted=Wanted.checked(False, ("max_prob",)), target=TARGET, chunk_size=7),
        ),
        (
            torch.bfloat16,
            Keywords(wanted=Wanted(), target=TARGET, mask=ALL, temperature=torch.ones(N)),
        ),
    ],
    ids=["entropy", "log-probs and a metric", "both"],
)
def test_opcheck(dtype: torch.dtype, keywords: Keywords) -> None:
    call = call_of(None, keywords)
    x = leaf(make_logits(COLUMNS, dtype))
    torch.library.opcheck(logits_forward, (x, *call))
    torch.library.opcheck(logits_backward, (x.detach(), *call, *upstream_of(logits_forward(x, *call), call)))
    if not call.log_probs:
        return
    hidden, weight, bias = (leaf(x) for x in make_linear(dtype, columns=COLUMNS))
    for head, operands in (
        (Head(None, 0.9, 5.0, False, None, False), (hidden, weight, bias)),
        (Head(torch.zeros(COLUMNS, 32), 1.0, None, False, None, True, True), (hidden, weight, None)),
    ):
        torch.library.opcheck(linear_forward, (*operands, *head, *call))
        upstream = upstream_of(linear_forward(*operands, *head, *call), call)
        given = [None if x is None else x.detach() for x in operands]
        needed = True, True, operands[2] is not None
        torch.library.opcheck(linear_backward, (*given, *head, *call, *upstream, *needed))


def upstream_of(outputs: list[Tensor], call: Call) -> Upstream:
    maximum, log_sum, *entropy = (x.detach() for x in outputs[-2 - call.entropy :])
    grad_log_probs, grad_entropy = make_upstream((N,), maximum.dtype)
    return Upstream(
        maximum,
        log_sum,
        entropy[0] if entropy else None,
        grad_log_probs if call.log_probs else None,
        grad_entropy if call.entropy else None,
    )

"""What is run again and again: one call of each form with everything on, and a digest of all its bits."""

from __future__ import annotations

import hashlib

import torch

import mcore_entropy as me
from tests.comparison import assert_same_bits
from tests.metamorphic.calls import Call, Results, head_call, logits_call
from tests.unit.cases import INF, make_linear, make_logits

ROWS, COLUMNS, WIDTH = 80, 1100, 32
FORMS = ("logits", "head", "head with rows that are computed in vain")


def make(form: str, dtype: torch.dtype) -> Call:
    """Several tiles, chunks and threads' shares of work; masked and ignored tokens, -inf, temperatures."""
    if form == "logits":
        x = make_logits(COLUMNS, dtype, rows=ROWS)
        x[::7, ::3] = -INF
        call = logits_call(x)
    else:
        hidden, weight, bias = make_linear(dtype, rows=ROWS, columns=COLUMNS, width=WIDTH)
        bias[::11] = -INF
        call = head_call(hidden, weight, bias).with_options(softcap=10.0)
    tokens = torch.arange(ROWS)
    target = torch.where(tokens % 5 == 0, -100, call.target // 33 * 33 + 1)  # none at -inf
    call.target.copy_(target)
    execution = me.Execution(workspace_mib=1, compact_rows=form != FORMS[2])
    return call.with_options(mask=tokens % 4 != 0, temperature=torch.linspace(0.6, 1.5, ROWS)).computed(
        chunk_size=32, execution=execution
    )


def digest(results: Results) -> str:
    """The same for the same bits, whatever the process."""
    found = hashlib.sha256()
    for name in sorted(results):
        x = results[name].contiguous()
        found.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        found.update(bytes(x.view(-1).view(torch.uint8).tolist()))
    return found.hexdigest()


def assert_same_results(results: Results, others: Results, when: str) -> None:
    assert results.keys() == others.keys()
    for name, value in results.items():
        assert_same_bits(value, others[name], f"{name}, {when}")

"""torch's deterministic algorithms on more than two ranks: one all-gather, merged in rank order.

Legend: N tokens, V vocabulary over all ranks.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import reference as ref
from tests.comparison import assert_same_bits
from tests.distributed.cases import HIDDEN, Case, run
from tests.distributed.test_parity import SHARDS, check
from tests.ranks import run_ranks

CASES = [
    Case(shards, vocab_size=vocab_size, form=form, chunk_size=5, metrics=metrics, special=special)
    for shards, vocab_size in SHARDS[4].values()
    for form, metrics, special in (
        ("entropy", (), "none"),
        ("both", ref.METRICS, "none"),
        ("both", (), "bad rows"),
        ("linear", (), "none"),
    )
    if special == "none" or vocab_size is None
]


def run_deterministic(cases: list[Case]) -> list[dict[str, Any]]:
    """An all-reduce of anything but a hidden gradient is an error."""
    all_reduce = dist.all_reduce

    def of_hidden_gradient(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert tensor.dim() == 2 and tensor.shape[1] == HIDDEN, f"all-reduced: {tuple(tensor.shape)}"
        return all_reduce(tensor, *args, **kwargs)

    torch.use_deterministic_algorithms(True)
    try:
        with mock.patch.object(dist, "all_reduce", of_hidden_gradient):
            return run(cases)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("ranks", [4])
def test_four_ranks(ranks: int) -> None:
    first, second = (run_ranks(ranks, run_deterministic, CASES) for _ in range(2))
    for number, case in enumerate(CASES):
        check(case, [answers[number] for answers in first])
        for one, other in zip(first, second, strict=True):
            for name, value in one[number].items():
                assert_same_bits(value, other[number][name], f"{name} in another run, case {number}")

"""The same calls on two, three and four ranks: one generator, in the parent, draws for all of them."""

from __future__ import annotations

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from tests.properties.case import Case
from tests.properties.checks import check
from tests.properties.profile import examples
from tests.properties.strategies import FORMS_OF_LOGITS, cases
from tests.properties.tensors import answers_of_batch
from tests.ranks import run_ranks

CASES_A_CALL = 8
LIMIT = 60.0  # seconds: a rank that waits for the others is a failure


def check_on_ranks(ranks: int, batch: list[Case], checks: bool) -> None:
    by_rank = run_ranks(ranks, answers_of_batch, batch, checks, timeout=LIMIT)
    for case, *of_ranks in zip(batch, *by_rank, strict=True):
        note(f"{case}")
        check(case, of_ranks)


def batches(forms: tuple[str, ...], ranks: int) -> st.SearchStrategy[list[Case]]:
    drawn = cases(forms, ranks, many=False)
    return st.lists(drawn, min_size=1, max_size=CASES_A_CALL)


# The world size comes first, so that pools of processes are started once.
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_given_logits(ranks: int) -> None:
    @examples(6)
    @given(batches(FORMS_OF_LOGITS, ranks), st.booleans())
    def run(batch: list[Case], checks: bool) -> None:
        check_on_ranks(ranks, batch, checks)

    run()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_head(ranks: int) -> None:
    @examples(6)
    @given(batches(("linear",), ranks), st.booleans())
    def run(batch: list[Case], checks: bool) -> None:
        check_on_ranks(ranks, batch, checks)

    run()

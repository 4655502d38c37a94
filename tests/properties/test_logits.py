"""Given logits on one rank: drawn calls of the three functions against the fp64 truth."""

from __future__ import annotations

from hypothesis import Phase, given

from tests.properties.case import Case
from tests.properties.checks import check
from tests.properties.profile import examples
from tests.properties.strategies import FORMS_OF_LOGITS, cases
from tests.properties.tensors import answers


@examples(300, Phase.shrink)
@given(cases(FORMS_OF_LOGITS))
def test_given_logits(case: Case) -> None:
    check(case, [answers(case)])

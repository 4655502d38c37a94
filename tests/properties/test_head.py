"""The fused head on one rank: drawn calls against the fp64 truth."""

from __future__ import annotations

from hypothesis import given

from tests.properties.checks import check
from tests.properties.profile import examples
from tests.properties.strategies import Case, cases
from tests.properties.tensors import answers


@examples(300)
@given(cases(("linear",)))
def test_head(case: Case) -> None:
    check(case, [answers(case)])

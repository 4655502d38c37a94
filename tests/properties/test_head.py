"""The fused head on one rank: drawn calls against the fp64 truth."""

from __future__ import annotations

from hypothesis import Phase, given

from tests.properties.case import Case
from tests.properties.checks import check
from tests.properties.profile import examples
from tests.properties.strategies import cases
from tests.properties.tensors import answers


@examples(300, Phase.shrink)
@given(cases(("linear",)))
def test_head(case: Case) -> None:
    check(case, [answers(case)])

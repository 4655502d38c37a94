"""How many examples are run: few by default, and the same in every run.

``MCORE_ENTROPY_EXAMPLES=100`` runs a hundred times as many, others in every run; a failure prints its case.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, settings

FACTOR = int(os.environ.get("MCORE_ENTROPY_EXAMPLES", "1"))


def examples(count: int, *more: Phase) -> Callable[[Any], Any]:
    """Settings of a test with so many examples in CI; `more`: Phase.shrink, where examples are fast."""
    return settings(
        max_examples=count * FACTOR,
        derandomize=FACTOR == 1,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate, *more),
        report_multiple_bugs=False,
        # A test builds tensors and runs ranks; fixtures (fresh buffers hold NaN) serve all examples.
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.function_scoped_fixture,
        ],
    )

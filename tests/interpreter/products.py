"""The interpreter's matrix product with its terms in a fixed order, as a GPU has them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest


@contextlib.contextmanager
def products_in_order() -> Iterator[None]:
    """Let it add a row's terms in one order wherever the row lies.

    It asks numpy's BLAS, whose kernels for AVX-512 give the same row other bits at another place of a tile.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(_: Any, a: Any, b: Any, d: Any, *_options: Any) -> Any:
        total = d.data.copy()
        for k in range(a.data.shape[1]):
            total += a.data[:, k : k + 1].astype(total.dtype) * b.data[k : k + 1].astype(total.dtype)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    with mock.patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot):
        yield

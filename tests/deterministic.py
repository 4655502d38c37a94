"""torch's deterministic algorithms for the length of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def deterministic_algorithms(on: bool) -> Iterator[None]:
    """torch's deterministic algorithms, on or off, and what they were before after it."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)

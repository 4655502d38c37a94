"""Fresh buffers hold NaN in every test, and tests/gpu needs a GPU."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests import as_backend

GPU_FOLDER = Path(__file__).parent / "gpu"


def pytest_configure() -> None:
    # The tensors are small: a second thread gains little, and waits for ever where cores are busy.
    torch.set_num_threads(1)
    as_backend.install()
    # A shell that starts pytest in the background has it, and all that it starts, ignore a Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if GPU_FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, none is visible here"))


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def wrapper(*args: object, **kwargs: object) -> torch.Tensor:
        fresh = allocate(*args, **kwargs)
        if fresh.is_floating_point() and fresh.device.type != "meta":
            with torch.no_grad():
                fresh.fill_(torch.nan)
        return fresh

    return wrapper


def build_tables_of_dynamo() -> None:
    """Let torch.compile look torch's own functions up, which it does once, while they are torch's own."""
    torch.compile(torch.is_grad_enabled, backend="eager")()


@contextlib.contextmanager
def poisoned_buffers() -> Iterator[None]:
    """torch.empty, empty_like, empty_strided and Tensor.new_empty give NaN.

    Uninitialised memory is very often zero, and code that reads a buffer before it wrote it then
    looks right. torch's own `fill_uninitialized_memory` acts in deterministic mode only, which
    changes the kernels that are tested.
    """
    places = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided")]
    places += [(torch.Tensor, "new_empty"), (torch.Tensor, "new_empty_strided")]
    originals = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, original in originals:
        setattr(owner, name, _poisoned(original))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


@pytest.fixture(autouse=True)
def _nan_in_fresh_buffers() -> Iterator[None]:
    with poisoned_buffers():
        yield

"""The stand-in's schema is the operator's, as torch-npu's library has it; the library need not be loadable.

Without torch-npu installed: pip download --no-deps torch-npu, unzip the wheel, and name the folder in
MCORE_ENTROPY_TEST_TORCH_NPU.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch

from tests.npu.operator import NAME, SCHEMA


def library() -> Path | None:
    unpacked = os.environ.get("MCORE_ENTROPY_TEST_TORCH_NPU")
    if unpacked is not None:
        return Path(unpacked) / "torch_npu/lib/libtorch_npu.so"
    try:
        return Path(str(distribution("torch-npu").locate_file("torch_npu/lib/libtorch_npu.so")))
    except PackageNotFoundError:
        return None


@pytest.mark.skipif(library() is None, reason="needs torch-npu, or MCORE_ENTROPY_TEST_TORCH_NPU")
def test_schema() -> None:
    path = library()
    assert path is not None
    content = path.read_bytes()
    start = content.find(NAME.encode() + b"(Tensor input")
    assert start >= 0, f"{path} declares no {NAME}"
    declared = content[start : content.index(b"\0", start)].decode()
    assert str(torch._C.parse_schema(f"npu::{declared}")) == str(torch._C.parse_schema(f"npu::{SCHEMA}"))

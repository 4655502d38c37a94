"""The Triton backend under tensor and sequence parallelism, in Triton's interpreter on two gloo ranks."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "needs TRITON_INTERPRET=1 from the start, as make interpreter has it", allow_module_level=True
    )

from tests.distributed.cases import Case
from tests.distributed.test_parity import SHARDS, check_all


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_head(dtype: torch.dtype) -> None:
    """12 tokens a rank: chunks of 11 and 1 of each, of 4, and of all."""
    cases = [
        Case(shards, vocab_size=vocab_size, form="linear", dtype=dtype, sequence_parallel=True, **options)
        for (shards, vocab_size), options in zip(
            SHARDS[2].values(),
            (
                {"chunk_size": 22},
                {"chunk_size": 22, "mask": "half"},
                {"chunk_size": 8, "temperature": "per token"},
                {"bias": True, "softcap": 5.0},
                {"chunk_size": 22, "mask": "half", "compact_rows": False},
            ),
            strict=True,
        )
    ]
    check_all(2, cases)

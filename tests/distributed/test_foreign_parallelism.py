"""Heads that torch or transformers made tensor-parallel: seen as such, and usable once that is undone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from mcore_entropy.adapters.dtensor import dtensor_linear_log_probs_and_entropy, parallelize_lm_head
from mcore_entropy.adapters.foreign_parallelism import foreign_parallelism
from tests.ranks import run_ranks

V, H = 97, 16


def _head() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(H, V, bias=False)


def _under_torch() -> list[str | None]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain, ours = _head(), _head()
    parallelize_lm_head(ours, mesh)
    found = [foreign_parallelism(plain), foreign_parallelism(ours)]
    for layouts in (Replicate(), Shard(-1)):
        for local in (False, True):
            style = ColwiseParallel(output_layouts=layouts, use_local_output=local)
            found.append(foreign_parallelism(parallelize_module(_head(), mesh, style)))
    return found


def test_torch_s_styles_are_seen() -> None:
    for plain, ours, *theirs in run_ranks(2, _under_torch):
        assert plain is None
        assert ours is None
        assert len(theirs) == 4
        for said in theirs:
            assert "torch's parallelize_module" in said


def _under_transformers() -> dict[str, Any]:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    head, dense = _head(), _head()
    style = ALL_PARALLEL_STYLES["colwise_gather_output"]
    style.shard_param(head, "weight", mesh)
    style.install_forward(head, mesh)
    head._is_hooked = True  # type: ignore[assignment] # as apply_tensor_parallelism does
    said = foreign_parallelism(head)
    assert isinstance(head.weight, DTensor)
    del head.forward
    x = torch.randn(5, H, generator=torch.Generator().manual_seed(1))
    target = torch.arange(5)
    both = dtensor_linear_log_probs_and_entropy(x, head.weight, target)
    log_p: Tensor = torch.log_softmax(dense(x), -1)
    return {
        "said": said,
        "after": foreign_parallelism(head),
        "ours": both.log_probs.detach(),
        "dense": log_p.gather(-1, target[:, None])[:, 0].detach(),
    }


def test_transformers_tensor_parallelism_is_seen_and_can_be_taken_off() -> None:
    pytest.importorskip("transformers.distributed.tensor_parallel")
    for found in run_ranks(2, _under_transformers):
        assert "transformers' tensor parallelism" in found["said"]
        assert found["after"] is None
        torch.testing.assert_close(found["ours"], found["dense"], rtol=1e-5, atol=1e-5)

"""mcore_entropy.rl on a GPU: the truths of the CPU tests, and no host sync.

Legend: T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from mcore_entropy.rl import (
    entropy_statistics,
    next_token_targets,
    next_token_targets_of_shard,
    packed_sequence_mean,
    sequence_mean,
    token_mean,
)
from tests.unit.cases import DTYPES, dtype_name
from tests.unit.rl_cases import (
    assert_mean,
    make_values,
    sequence_mean_truth,
    targets_truth,
    token_mean_truth,
)

BOUNDS = [0, 0, 8, 32, 32, 48]


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    assert dist.group.WORLD is not None
    dist.all_reduce(torch.zeros(1, device=device))  # the first one sets NCCL up
    yield dist.group.WORLD
    torch.cuda.set_sync_debug_mode("default")
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_means(dtype: torch.dtype, world: dist.ProcessGroup) -> None:
    values, mask = make_values((48,), dtype)
    own, own_mask = values.cuda().requires_grad_(), mask.cuda()
    cu_seqlens = torch.tensor(BOUNDS).cuda()
    cp, dp = {"cp_group": world}, {"groups": (world,)}
    torch.cuda.set_sync_debug_mode("error")
    means = {
        "tokens": token_mean(own, own_mask, groups=(world,)),
        "rows": sequence_mean(own.view(4, 12), own_mask.view(4, 12), **cp, **dp),
        "packed": packed_sequence_mean(own, own_mask, cu_seqlens, **cp, **dp),
    }
    gradients = {name: torch.autograd.grad(mean, own)[0] for name, mean in means.items()}
    found = entropy_statistics(own, own_mask, threshold=1.0, groups=(world,))
    torch.cuda.set_sync_debug_mode("default")
    truths = {
        "tokens": token_mean_truth(values, mask),
        "rows": sequence_mean_truth(values, mask, range(0, 49, 12)),
        "packed": sequence_mean_truth(values, mask, BOUNDS),
    }
    for name, truth in truths.items():
        assert_mean(means[name].cpu(), gradients[name].cpu(), truth, values, mask, name)
    kept = values[mask].double().tolist()
    assert float(found.mean) == pytest.approx(sum(kept) / len(kept), rel=1e-5)
    assert float(found.share_above) == pytest.approx(sum(x > 1.0 for x in kept) / len(kept), rel=1e-6)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_targets(packed: bool, world: dist.ProcessGroup) -> None:
    tokens = torch.arange(48).view((1, 48) if packed else (3, 16))
    mask = tokens % 7 != 3
    bounds = BOUNDS if packed else [0, 16]
    own, own_mask, cu_seqlens = tokens.cuda(), mask.cuda(), torch.tensor(BOUNDS).cuda() if packed else None
    torch.cuda.set_sync_debug_mode("error")
    whole = next_token_targets(own, mask=own_mask, cu_seqlens=cu_seqlens)
    sharded = [
        next_token_targets_of_shard(own, layout=layout, cp_group=world, mask=own_mask, cu_seqlens=cu_seqlens)
        for layout in ("zigzag", "contiguous")
    ]
    torch.cuda.set_sync_debug_mode("default")
    truth = targets_truth(tokens, bounds, mask)
    for found in (whole, *sharded):
        assert torch.equal(found.cpu(), truth)


def test_packed_means_have_the_same_bits_every_time() -> None:
    values = torch.randn(1 << 20, device="cuda")
    mask = torch.rand(1 << 20, device="cuda") < 0.5
    cu_seqlens = torch.arange(0, (1 << 20) + 1, 1 << 14, device="cuda")
    first, *others = (packed_sequence_mean(values, mask, cu_seqlens) for _ in range(20))
    assert all(torch.equal(first, other) for other in others)

"""The benchmark on torchrun's ranks, with heads that fail or are wrong on one of them; its rows go to a file.

torchrun --standalone --nproc-per-node 2 -m tests.cli.planted FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_entropy.cli.benchmark.comparison import Comparison
from mcore_entropy.cli.benchmark.heads import EAGER, OURS, Head, Results, eager, ours
from mcore_entropy.cli.benchmark.problem import Inputs, Problem
from mcore_entropy.cli.benchmark.ranks import Group, Together

calls = 0


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("planted")


def fails_in_forward(inputs: Inputs, group: Group) -> Results:
    if dist.get_rank() == 1:
        raise RuntimeError("planted\nsecond line")
    return eager(inputs, group)


def fails_in_backward(inputs: Inputs, group: Group) -> Results:
    log_probs, entropy = eager(inputs, group)
    return (_FailsInBackward.apply(log_probs) if dist.get_rank() == 0 else log_probs), entropy


def wrong_on_one(inputs: Inputs, group: Group) -> Results:
    log_probs, entropy = ours(inputs, group)
    return log_probs, entropy * (1 + 1e-3 * dist.get_rank())


def fails_when_timed(inputs: Inputs, group: Group) -> Results:
    global calls
    calls += 1
    if calls == 5 and dist.get_rank() == 1:  # after check, memory, warm-up and one round
        raise RuntimeError("planted late")
    return eager(inputs, group)


def main() -> None:
    device = torch.device("cpu")
    problem = Problem(48, 16, 128, torch.float32, device, ranks=2, masked=0.25)
    planted = (fails_in_forward, fails_in_backward, wrong_on_one, fails_when_timed)
    heads = [*(Head(run.__name__, run) for run in planted), Head(EAGER, eager), Head(OURS, ours)]
    ranks = Together(device)
    comparison = Comparison(problem, ranks, [(head, None) for head in heads])
    comparison.check(lambda _: None)
    comparison.measure(2, lambda _: None)
    ranks.close()
    found = {row.name: [row.reason, len(row.forward_ms), row.timed] for row in comparison.rows}
    Path(f"{sys.argv[1]}.{ranks.rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

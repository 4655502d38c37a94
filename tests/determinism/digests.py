"""python -m tests.determinism.digests STORE: digests of all bits, on one rank and on two.

Two ranks, the second a fork of the first so that torch is imported once, meet in the file STORE. Each prints
a line for each case on two ranks, its own shards' gradients included; the first also one for each form on one
rank.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from tests.determinism.calls import FORMS, digest, make
from tests.distributed.cases import Case, run
from tests.metamorphic.calls import results_of

CASES = [
    Case((129, 60), "both", torch.bfloat16, mask="half", chunk_size=5),
    Case((129, 60), "linear", torch.bfloat16, sequence_parallel=True, softcap=5.0, chunk_size=5),
]


def lines_of(rank: int, store: str) -> list[str]:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    lines = [f"rank {rank}: {digest(results)}" for results in run(CASES)]
    dist.destroy_process_group()
    if rank == 0:
        calls = (make(form, torch.bfloat16) for form in FORMS[:2])
        lines += [digest(results_of(call, call.inputs)) for call in calls]
    return [*lines, f"seed {os.environ['PYTHONHASHSEED']}"]


def main(store: str) -> None:
    torch.set_num_threads(1)
    child = os.fork()
    text = "\n".join(lines_of(0 if child else 1, store)) + "\n"
    sys.stdout.write(text)  # in one piece, for both write to it
    sys.stdout.flush()
    if child and os.waitpid(child, 0)[1]:
        raise SystemExit("the other rank failed")


if __name__ == "__main__":
    main(sys.argv[1])

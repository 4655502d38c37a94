"""python -m tests.determinism.digests RANK STORE: digests of all bits, on one rank and on two.

Two of them meet in the file STORE. Rank 0 prints a line for each form on one rank, then each rank prints one
for each case on two, and PYTHONHASHSEED.
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


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    lines = []
    if rank == 0:
        calls = (make(form, torch.bfloat16) for form in FORMS[:2])
        lines = [digest(results_of(call, call.inputs)) for call in calls]
    lines += [digest(results) for results in run(CASES)]
    lines.append(f"PYTHONHASHSEED {os.environ['PYTHONHASHSEED']}")
    sys.stdout.write("\n".join(lines) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

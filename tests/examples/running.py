"""Examples as users run them: in processes of their own, under torchrun or without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_example(
    program: str, *arguments: str, ranks: int | None = 2, cwd: Path
) -> subprocess.CompletedProcess[str]:
    """`torchrun PROGRAM`, or `python PROGRAM` for ranks=None; on the CPU, in `cwd`."""
    # Under `torchrun -m pytest` the environment is that of a rank.
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cwd)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    launcher = []
    if ranks is not None:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / program), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )

"""Beside MindSpeed, whose rewriting of Megatron has to come before our layer, and what is said if it did not.

A stand-in does to Megatron what MindSpeed's adaptor does when it is imported, in processes of their own.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.megatron.tiny_gpt import needs_megatron

pytestmark = needs_megatron

# Replaces a method, as MindSpeed's patches do most of the time.
ADAPTOR = """
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

stock_forward = ColumnParallelLinear.forward


def forward(self, *args, **kwargs):
    ColumnParallelLinear.calls += 1
    return stock_forward(self, *args, **kwargs)


ColumnParallelLinear.calls = 0
ColumnParallelLinear.forward = forward
"""

PROGRAM = """
{first}
{second}
import torch
from mcore_entropy import EntropyConfig, swap_output_layer
from tests.megatron.tiny_gpt import TinyGPT, build, forward_with_labels, make_batch, model_parallel
from tests.ranks import run_ranks
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
options = TinyGPT()
with model_parallel(options):
    core = build(options).core
    {before_swap}
    handle = swap_output_layer(core, EntropyConfig())
    {after_swap}
    print(type(forward_with_labels(core, make_batch(options))).__name__)
    handle.restore()
    print(core.output_layer.__class__.__name__)
"""
OURS, THEIRS = "import mcore_entropy.megatron.output_layer", "import mindspeed.megatron_adaptor"


def run(tmp_path: Path, **places: str) -> subprocess.CompletedProcess[str]:
    package = tmp_path / "mindspeed"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "megatron_adaptor.py").write_text(textwrap.dedent(ADAPTOR))
    filled = {"first": "", "second": "", "before_swap": "", "after_swap": "", **places}
    program = PROGRAM.format(**filled)
    root = Path(__file__).parents[2]
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(root)!r}]\n{program}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_mindspeed_first(tmp_path: Path) -> None:
    """Our layer derives from the one MindSpeed has put in place."""
    done = run(tmp_path, first=THEIRS, second=OURS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["TokenStatistics", "ColumnParallelLinear"]


@pytest.mark.parametrize("place", ["second", "before_swap", "after_swap"])
def test_mindspeed_afterwards(place: str, tmp_path: Path) -> None:
    done = run(tmp_path, first=OURS, **{place: THEIRS})
    assert done.returncode != 0
    expected = "ValueError: MindSpeed: expected mindspeed.megatron_adaptor to be imported before"
    assert expected in done.stderr


# Replaces the class in every module that has it, as some of MindSpeed's features do, and MindSpeed's own
# `repatch` after the adaptor was imported, or an adaptor of another name.
REPLACED_CLASS = """
import sys
import megatron.core.tensor_parallel.layers as layers

stock = layers.ColumnParallelLinear
members = {name: member for name, member in vars(stock).items() if name not in ("__dict__", "__weakref__")}
replacement = type("Replacement", stock.__bases__, members)
for module in list(sys.modules.values()):
    for name, value in list(getattr(module, "__dict__", {}).items()):
        if value is stock and name != "stock":
            setattr(module, name, replacement)
"""


def test_a_class_replaced_afterwards(tmp_path: Path) -> None:
    done = run(tmp_path, first=f"{THEIRS}\n{OURS}", second=REPLACED_CLASS)
    assert done.returncode != 0
    assert "ValueError: output_layer: expected the ColumnParallelLinear that our layer derives" in done.stderr


def test_a_class_replaced_before(tmp_path: Path) -> None:
    done = run(tmp_path, first=f"{THEIRS}\n{REPLACED_CLASS}", second=OURS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["TokenStatistics", "Replacement"]

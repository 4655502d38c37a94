"""The Triton kernels compile for every architecture they are meant for, and fit into its shared memory.

No GPU is needed for that: Triton brings its assembler. It says nothing about results.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton: pip install 'mcore-entropy[triton]'")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted, not compiled", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mcore_entropy.backends.triton import head_kernels, machine, row_kernels, target_kernels

KIB = 1024
# Compute capability, and the shared memory that one program may have.
ARCHITECTURES = {80: 163 * KIB, 86: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
SUMS = dict(CENTRED=True, SQUARED=True, EXP_SQUARED=True)
TYPES = {
    **dict.fromkeys(("target", "starts", "out_rows", "kept_rows"), "*i64"),
    **dict.fromkeys(("scale", "softcap"), "fp32"),
    **dict.fromkeys(("logits", "hidden", "weight", "out"), "*bf16"),
    **dict.fromkeys(("exponents", "kept"), "*fp16"),
}
INTEGERS = ("n", "v", "H", "first", "tiles", "all_tiles", "first_tile", "at_once", "tiles_a_program")
FP32_OUT = (
    row_kernels.logits_statistics_kernel,
    row_kernels.merge_kernel,
    target_kernels.target_logit_kernel,
)


def device(architecture: int) -> machine.Machine:
    """As `machine.machine` would describe it."""
    return machine.Machine(
        multiprocessors=132, tma=architecture >= 90, large_tiles=ARCHITECTURES[architecture] > 200 * KIB
    )


def shared_memory(
    kernel: Any, architecture: int, constants: dict[str, Any], tile: machine.Tile | None = None, **types: str
) -> int:
    """Compile a kernel; the shared memory of one program in bytes."""

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in INTEGERS or name.endswith("_stride"):
            return "i32"
        if name == "out" and kernel in FP32_OUT:
            return "*fp32"
        return types.get(name) or TYPES.get(name, "*fp32")

    names = kernel.arg_names
    signature = {name: type_of(name) for name in names}
    aligned = [n for n, kind in signature.items() if kind.startswith("*") or kind == "i32"]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, attributes)
    options: dict[str, Any] = dict(enable_fp_fusion=True)
    if tile is not None:
        options |= dict(num_warps=tile.warps, num_stages=tile.stages)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    assert compiled.asm["cubin"]
    return int(compiled.metadata.shared)


@pytest.mark.parametrize(
    ("architecture", "everything"),
    [(80, False), (86, False), (90, False), (100, False), (120, False), (80, True), (90, True)],
)
def test_head(architecture: int, everything: bool) -> None:
    """Plain, and with a bias, a softcap, all metrics and kept logits."""
    here = device(architecture)
    for kernel, tile in (
        (head_kernels.linear_statistics_kernel, machine.statistics_tile(here)),
        (head_kernels.linear_gradient_kernel, machine.gradient_tile(here)),
    ):
        constants: dict[str, Any] = dict(
            BM=tile.rows, BN=tile.columns, BK=tile.depth, GROUP=tile.group, TMA=here.tma, UPCAST=False,
            BIAS=everything, SOFTCAP=everything,
        )  # fmt: skip
        if kernel is head_kernels.linear_statistics_kernel:
            constants |= SUMS if everything else dict(CENTRED=True, SQUARED=False, EXP_SQUARED=False)
            constants |= dict(WHOLE=not everything, KEEP=everything)
        else:
            constants["OUT"] = tl.bfloat16
        types = {}
        if here.tma:
            half = tile.columns // 2
            types = {
                "hidden": f"tensordesc<bf16[{tile.rows},{tile.depth}]>",
                "weight": f"tensordesc<bf16[{tile.columns},{tile.depth}]>",
                "kept": f"tensordesc<fp16[{tile.rows},{half}]>",
                "out": f"tensordesc<bf16[{tile.rows},{half}]>",
            }
        used = shared_memory(kernel, architecture, constants, tile, **types)
        assert used <= ARCHITECTURES[architecture], f"{kernel.__name__}: {used} bytes"


@pytest.mark.parametrize("ones", [(), ("n",), ("v", "tiles"), ("H", "first", "row_stride", "maxima_stride")])
def test_rows(ones: tuple[str, ...]) -> None:
    """An argument that is 1 is a constant to Triton, with another type."""
    block = dict(BLOCK=1024, SOFTCAP=True)
    lanes = dict(STEPS=8, LANES=256, CONTIGUOUS=True, SCALED=True, SOFTCAP=True)
    for kernel, constants in (
        (row_kernels.logits_statistics_kernel, dict(lanes, LISTED=True, TARGET=True, **SUMS)),
        (row_kernels.logits_gradient_kernel, dict(LISTED=False, TARGET=True, **block)),
        (row_kernels.merge_kernel, dict(ROWS=32, TILES=32, **SUMS)),
        (target_kernels.target_logit_kernel, dict(BIAS=True, **block)),
        (target_kernels.target_gradient_kernel, dict(ROWS=16, BIAS=True, **block)),
        (target_kernels.kept_gradient_kernel, dict(TILES=16, TILE=256, LISTED=True, SOFTCAP=True)),
    ):
        fixed = {name: 1 for name in ones if name in kernel.arg_names}
        shared_memory(kernel, 90, {**constants, **fixed})

"""Matrix products of this backend: half-precision operands, fp32 accumulation and fp32 results.

CUDA has such products (``out_dtype``). Elsewhere the operands are widened first, which is exact, and one
tile at a time. fp32 operands give IEEE products unless torch is told to use TF32; fp64 stays fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)
_LARGEST_EXPONENT = 14  # scaled fp16 gradients reach at most 2^15, half of what fp16 holds


def _multiplies_halves(device: torch.device) -> bool:
    """Whether the device multiplies half-precision matrices straight into fp32."""
    return device.type == "cuda"


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [n, k] times b [k, m] in the dtype of the statistics, [n, m]."""
    if a.dtype not in _HALF:
        return a @ b
    if _multiplies_halves(a.device):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def gradient_operand(gradient: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """An fp32 gradient tile as it is multiplied with operands of `dtype`, and the factor to undo its scale.

    Where the device multiplies halves, the tile is rounded to `dtype`. fp16 is scaled by a power of two
    before, since most gradients are below its smallest normal number.
    """
    if dtype not in _HALF or not _multiplies_halves(gradient.device):
        return gradient, None
    if dtype == torch.bfloat16:
        return gradient.to(dtype), None
    # Of the finite entries: a row of NaN must not decide the scale, and overflow, of its neighbours.
    largest = torch.where(gradient.isfinite(), gradient, 0.0).abs().amax()
    exponent = _LARGEST_EXPONENT - torch.where(largest > 0, largest, 1.0).log2().floor()
    scale = exponent.clamp(max=120.0).exp2()
    return (gradient * scale).to(dtype), scale.reciprocal()


def add_product_(out: Tensor, a: Tensor, b: Tensor, factor: Tensor | None) -> None:
    """out [n, m] += factor * a [n, k] @ b [k, m], out being fp32 or fp64."""
    if a.dtype == b.dtype and a.dtype in _HALF:
        result = torch.mm(a, b, out_dtype=torch.float32)
        out.add_(result if factor is None else result.mul_(factor))
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))

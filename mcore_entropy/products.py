"""Matrix products with half-precision operands, fp32 accumulation and fp32 results.

CUDA has such products (``out_dtype``). Elsewhere the operands are widened first, which is exact, and one
tile at a time. fp32 operands give IEEE products unless torch is told to use TF32; fp64 stays fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
_LARGEST_EXPONENT = 14  # scaled fp16 gradients reach at most 2^15, half of what fp16 holds


def multiplies_halves(device: torch.device) -> bool:
    """Whether the device multiplies half-precision matrices straight into fp32."""
    return device.type == "cuda"


def fp16_scale(largest: Tensor) -> Tensor:
    """The power of two that brings numbers of at most `largest` (one number) to at most 2^15."""
    exponent = _LARGEST_EXPONENT - torch.where(largest > 0, largest, 1.0).log2().floor()
    return exponent.clamp(max=120.0).exp2()


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [n, k] times b [k, m] in the dtype of the statistics, [n, m]."""
    if a.dtype not in HALF and b.dtype not in HALF:
        return a @ b
    if a.dtype == b.dtype and multiplies_halves(a.device):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def add_product_(out: Tensor, a: Tensor, b: Tensor, factor: Tensor | None) -> None:
    """out [n, m] += factor * a [n, k] @ b [k, m], out being fp32 or fp64."""
    if factor is not None:
        out.add_(product(a, b).mul_(factor))
    elif a.dtype == b.dtype and a.dtype in HALF and multiplies_halves(a.device):
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))


def store_product_(out: Tensor, a: Tensor, b: Tensor, factor: Tensor | None) -> None:
    """out [n, m] = factor * a [n, k] @ b [k, m], rounded once to out's half precision."""
    if factor is not None:
        out.copy_(product(a, b).mul_(factor))
    elif a.dtype == b.dtype == out.dtype and multiplies_halves(a.device):
        torch.mm(a, b, out=out)
    else:
        out.copy_(product(a, b))

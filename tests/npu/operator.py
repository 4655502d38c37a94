"""Ascend's ``npu_cross_entropy_loss`` on a CPU: its schema, and its documented contract.

With its traps: outputs are rounded to the input's dtype; a label outside [0, C), ``ignore_index`` too, is a
fault of the hardware; log_prob is not differentiable; loss has one element unless reduction is "none".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

NAME = "npu_cross_entropy_loss"
SCHEMA = (
    "npu_cross_entropy_loss(Tensor input, Tensor target, Tensor? weight=None, str reduction='mean', "
    "int ignore_index=-100, float label_smoothing=0., float lse_square_scale_for_zloss=0., "
    "bool return_zloss=False) -> (Tensor, Tensor, Tensor, Tensor)"
)
MOST_ROWS = 200_000


class Fault(RuntimeError):
    """What on the hardware would be an AI Core exception."""


def on_cpu(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
    return_zloss: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if input.dim() != 2 or input.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise Fault(f"input: [N, C] in fp16, bf16 or fp32, got {input.dtype} {tuple(input.shape)}")
    if target.dtype != torch.int64 or target.shape != input.shape[:1]:
        raise Fault(f"target: int64 [N], got {target.dtype} {tuple(target.shape)}")
    if input.shape[0] > MOST_ROWS:
        raise Fault(f"N: at most {MOST_ROWS}, got {input.shape[0]}")
    if not input.is_contiguous() or not target.is_contiguous():
        raise Fault("contiguous tensors")
    if bool(((target < 0) | (target >= input.shape[1])).any()):
        raise Fault("target: a label outside [0, C)")
    if weight is not None or label_smoothing or lse_square_scale_for_zloss or return_zloss:
        raise Fault("no weight, label smoothing or z-loss")
    x = input.detach().float()
    maximum = x.amax(1, keepdim=True)
    log_p = x - maximum - (x - maximum).exp().sum(1, keepdim=True).log()
    loss = -log_p.gather(1, target.unsqueeze(1)).squeeze(1)
    loss = {"none": loss, "mean": loss.mean().view(1), "sum": loss.sum().view(1)}[reduction]
    nothing = input.new_empty(0)
    return loss.to(input.dtype), log_p.to(input.dtype), nothing, nothing.clone()


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """torch.ops.npu.npu_cross_entropy_loss exists inside."""
    library = torch.library.Library("npu", "FRAGMENT")
    library.define(SCHEMA)
    library.impl(NAME, on_cpu, "CPU")
    try:
        yield
    finally:
        library._destroy()
        torch.ops.npu.__dict__.pop(NAME, None)

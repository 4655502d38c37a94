"""Where a weight gradient is accumulated: a buffer of its own, or Megatron's `main_grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WeightGradient:
    """Accumulates the gradient of a weight [V/tp, H] in fp32 (fp64 for fp64).

    With `into_main_grad` it goes straight into ``weight.main_grad``, as Megatron's gradient accumulation
    fusion does, without apex. A main_grad of another dtype gets the finished sum added once.
    """

    def __init__(self, weight: Tensor, into_main_grad: bool) -> None:
        if into_main_grad and getattr(weight, "main_grad", None) is None:
            raise ValueError(
                "weight: expected a main_grad for gradient accumulation fusion, got none; Megatron's "
                "DistributedDataParallel makes them: wrap the model in it, call a model that is not trained "
                "under torch.no_grad(), or turn gradient_accumulation_fusion off"
            )
        self._weight: Any = weight  # Megatron hangs its attributes on the parameter
        self._into_main_grad = into_main_grad

    def buffer(self, dtype: torch.dtype) -> Tensor:
        """What products are added to, [V/tp, H] in `dtype`; main_grad itself where it has that dtype."""
        if self._into_main_grad and self._weight.main_grad.dtype == dtype:
            main_grad: Tensor = self._weight.main_grad
            return main_grad
        return torch.zeros_like(self._weight, dtype=dtype, memory_format=torch.contiguous_format)

    def result(self, buffer: Tensor) -> Tensor | None:
        """What autograd gets for the weight once `buffer` is complete.

        With main_grad that is a placeholder: Megatron's hooks run when a gradient arrives, and ignore it.
        Only where the weight is tied (``zero_out_wgrad``) is it added to another gradient, so it is 0 then.
        """
        weight = self._weight
        if not self._into_main_grad:
            return buffer.to(weight.dtype)
        main_grad: Tensor = weight.main_grad
        if buffer is not main_grad:
            main_grad.add_(buffer)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        if getattr(weight, "zero_out_wgrad", False):
            return torch.zeros_like(weight)
        return torch.empty_like(weight)

"""Where a weight gradient is accumulated: a buffer of its own, or Megatron's `main_grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_entropy.products import add_product_, store_product_


class WeightGradient:
    """Where the gradient of a weight [V/tp, H] goes: to autograd, or straight into ``weight.main_grad``.

    The latter is what Megatron's gradient accumulation fusion does, here without apex. A main_grad of
    another dtype than the sum's gets the finished sum added once.
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

    def sum_costs_memory(self, dtype: torch.dtype) -> bool:
        """Whether a sum in `dtype` needs memory beside what autograd or main_grad have."""
        return not self._into_main_grad and bool(self._weight.dtype != dtype)

    def summed(self, dtype: torch.dtype) -> WeightSum:
        """For products of some tokens with every column, chunk by chunk: added up in `dtype`."""
        if self._into_main_grad and self._weight.main_grad.dtype == dtype:
            return WeightSum(self._weight.main_grad)
        return WeightSum(torch.zeros_like(self._weight, dtype=dtype, memory_format=torch.contiguous_format))

    def stored(self, counted: int) -> WeightSlices:
        """For products of all tokens with some of the `counted` columns: each comes, and is rounded, once."""
        gradient = torch.empty_like(self._weight, memory_format=torch.contiguous_format)
        gradient[counted:] = 0
        return WeightSlices(gradient)

    def result(self, gradient: Tensor) -> Tensor | None:
        """What autograd gets for the weight once `gradient` is complete.

        With main_grad that is a placeholder: Megatron's hooks run when a gradient arrives, and ignore it.
        Only where the weight is tied (``zero_out_wgrad``) is it added to another gradient, so it is 0 then.
        """
        weight = self._weight
        if not self._into_main_grad:
            return gradient.to(weight.dtype)
        main_grad: Tensor = weight.main_grad
        if gradient is not main_grad:
            main_grad.add_(gradient)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        if getattr(weight, "zero_out_wgrad", False):
            return torch.zeros_like(weight)
        return torch.empty_like(weight)


class WeightSum:
    """A gradient that products are added to."""

    def __init__(self, gradient: Tensor) -> None:
        self.gradient = gradient

    def take(self, columns: slice, tile: Tensor, hidden: Tensor, factor: Tensor | None) -> None:
        """The product of a tile [n, columns], transposed, with hidden [n, H]."""
        add_product_(self.gradient[columns], tile.t(), hidden, factor)


class WeightSlices(WeightSum):
    """A gradient whose rows are each written once."""

    def take(self, columns: slice, tile: Tensor, hidden: Tensor, factor: Tensor | None) -> None:
        store_product_(self.gradient[columns], tile.t(), hidden, factor)

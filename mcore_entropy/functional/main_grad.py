"""Where a weight gradient is accumulated: a buffer of its own, or Megatron's `main_grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_entropy.products import add_product_, store_product_


class WeightGradient:
    """Where the gradient of a weight [V/tp, H] goes: to autograd, or straight into main_grad if there is one.

    The latter is what Megatron's gradient accumulation fusion does, here without apex. A main_grad of
    another dtype than the sum's gets the finished sum added once.
    """

    def __init__(self, weight: Tensor, main_grad: Tensor | None) -> None:
        self._weight = weight
        self._main_grad = main_grad

    def sum_costs_memory(self, dtype: torch.dtype) -> bool:
        """Whether a sum in `dtype` needs memory beside what autograd or main_grad have."""
        return self._main_grad is None and self._weight.dtype != dtype

    def summed(self, dtype: torch.dtype) -> WeightSum:
        """For products of some tokens with every column, chunk by chunk: added up in `dtype`."""
        if self._main_grad is not None and self._main_grad.dtype == dtype:
            return WeightSum(self._main_grad)
        return WeightSum(torch.zeros_like(self._weight, dtype=dtype, memory_format=torch.contiguous_format))

    def stored(self, counted: int) -> WeightSlices:
        """For products of all tokens with some of the `counted` columns: each comes, and is rounded, once."""
        gradient = torch.empty_like(self._weight, memory_format=torch.contiguous_format)
        gradient[counted:] = 0
        return WeightSlices(gradient)

    def finished(self, gradient: Tensor) -> Tensor | None:
        """The complete gradient in the weight's dtype, or None once it is in main_grad."""
        if self._main_grad is None:
            return gradient.to(self._weight.dtype)
        if gradient is not self._main_grad:
            self._main_grad.add_(gradient)
        return None


def main_grad_of(weight: Tensor) -> Tensor:
    """``weight.main_grad``.

    Raises:
        ValueError: there is none.
    """
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ValueError(
            "weight: expected a main_grad for gradient accumulation fusion, got none; Megatron's "
            "DistributedDataParallel makes them: wrap the model in it, call a model that is not trained "
            "under torch.no_grad(), or turn gradient_accumulation_fusion off"
        )
    return main_grad


def placeholder_gradient(weight: Any) -> Tensor | None:
    """What autograd gets for a weight whose gradient is in main_grad: nothing, or what runs Megatron's hooks.

    Those ignore it. Only where the weight is tied (``zero_out_wgrad``) is it added to another gradient, so
    it is 0 then.
    """
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

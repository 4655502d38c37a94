"""Truths for mcore_entropy.rl, written over the whole data of all ranks, a token at a time.

Legend: T tokens of a row, n sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tests.unit.cases import NAN


def make_values(shape: tuple[int, ...], dtype: torch.dtype, share: float = 0.6) -> tuple[Tensor, Tensor]:
    """Values and a mask with about that share of True; what is masked out is NaN or infinite."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) + 1
    mask = torch.rand(shape, generator=generator) < share
    junk = torch.tensor([NAN, float("inf"), -float("inf")]).to(dtype)
    values[~mask] = junk[torch.randint(3, (int((~mask).sum()),), generator=generator)]
    return values, mask


def token_mean_truth(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of the True tokens in fp64, and its gradient; 0 without one."""
    kept = values.double()[mask]
    gradient = torch.zeros(values.shape, dtype=torch.float64)
    if not len(kept):
        return torch.zeros((), dtype=torch.float64), gradient
    gradient[mask] = 1 / len(kept)
    return kept.mean(), gradient


def sequence_mean_truth(values: Tensor, mask: Tensor, bounds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """[T] of sequences between bounds: the mean of their `token_mean_truth`, unless they have no token."""
    parts = [slice(first, last) for first, last in pairwise(bounds)]
    parts = [part for part in parts if mask[part].any()]
    gradient = torch.zeros(values.shape, dtype=torch.float64)
    means = []
    for part in parts:
        mean, own_gradient = token_mean_truth(values[part], mask[part])
        means.append(mean)
        gradient[part] = own_gradient / len(parts)
    return torch.stack(means).mean() if means else torch.zeros((), dtype=torch.float64), gradient


def targets_truth(
    tokens: Tensor, bounds: Sequence[int], mask: Tensor | None = None, ignore_index: int = -100
) -> Tensor:
    """[*, T] of sequences between bounds along T."""
    length = tokens.shape[-1]
    in_rows = (tokens.shape[:-1].numel(), length)
    rows = tokens.reshape(in_rows).tolist()
    real = [[True] * length for _ in rows] if mask is None else mask.reshape(in_rows).tolist()
    found = [[ignore_index] * length for _ in rows]
    for row, (row_tokens, row_real) in enumerate(zip(rows, real, strict=True)):
        for first, last in pairwise(bounds):
            for here in range(first, last - 1):
                if row_real[here] and row_real[here + 1]:
                    found[row][here] = row_tokens[here + 1]
    return torch.tensor(found, dtype=tokens.dtype).reshape(tokens.shape)


def assert_mean(
    mean: Tensor,
    gradient: Tensor,
    truth: tuple[Tensor, Tensor],
    values: Tensor,
    mask: Tensor,
    name: str = "mean",
) -> None:
    """A mean and a gradient of this rank against the truth.

    The sum is in fp32 or fp64 whatever the values' dtype: 8 ulp of the largest value that counts. The
    gradient is rounded to the values' dtype once, after a division and two products in fp32 or fp64.
    """
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    assert mean.dtype == dtype and gradient.dtype == values.dtype, name
    largest = float(values[mask].abs().max()) if bool(mask.any()) else 0.0
    torch.testing.assert_close(
        mean.detach().double(),
        truth[0],
        rtol=0.0,
        atol=8 * torch.finfo(dtype).eps * largest,
        msg=lambda text: f"{name}: {text}",
    )
    torch.testing.assert_close(
        gradient.double(),
        truth[1],
        rtol=torch.finfo(values.dtype).eps / 2 + 2 * torch.finfo(dtype).eps,
        atol=0.0,
        msg=lambda text: f"gradient of {name}: {text}",
    )

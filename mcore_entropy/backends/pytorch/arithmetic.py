"""The formulas of `mcore_entropy.statistics` on one tile of logits, as torch operations, mostly in place.

n tokens, v columns of a tile.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mcore_entropy.statistics import (
    LOWEST_DIFFERENCE,
    GradientCoefficients,
    LogitTransform,
    Normalizer,
    PartialStatistics,
    Wanted,
)


def scale_logits_(tile: Tensor, transform: LogitTransform | None, temperature: float | Tensor) -> Tensor:
    """z from raw logits [n, v], in place. `temperature`: a number or [n]."""
    if transform is not None:
        if transform.softcap is None:
            tile.mul_(transform.scale)
        else:
            _softcap_(tile, transform, transform.softcap, slope=False)
    if isinstance(temperature, Tensor):
        tile.div_(temperature.unsqueeze(1))
    elif temperature != 1.0:
        tile.div_(temperature)
    return tile


def _softcap_(tile: Tensor, transform: LogitTransform, softcap: float, slope: bool) -> Tensor | None:
    """The transform with a softcap, in place; on demand its slope without the scale, 1 - tanh^2.

    tanh alone would make an infinite logit, a banned token's -inf or an overflow, a plausible finite one.
    """
    infinities = torch.where(tile.isinf(), tile, 0.0)
    tanh = tile.mul_(transform.scale / softcap).tanh_()
    derivative = (1.0 + tanh).mul_(1.0 - tanh) if slope else None
    tanh.mul_(softcap).add_(infinities)
    return derivative


def tile_statistics_(z: Tensor, target: Tensor | None, wanted: Wanted) -> PartialStatistics:
    """Sums over the columns of one tile of scaled logits [n, v]; the tile is overwritten.

    `target`: the target's column in this tile, [n], or any number outside [0, v) where it is elsewhere.
    """
    tokens, columns = z.shape
    if columns == 0:
        return PartialStatistics.empty(tokens, wanted, like=z)
    target_logit = target_logit_of(z, target) if wanted.target else None
    maximum = z.amax(1)
    # A tile that is -inf everywhere: subtract 0, since -inf - (-inf) would be NaN.
    difference = z.sub_(torch.where(maximum == -math.inf, 0.0, maximum).unsqueeze(1))
    difference.clamp_(min=LOWEST_DIFFERENCE)
    exp = difference.exp()
    return PartialStatistics(
        maximum=maximum,
        sum_exp=exp.sum(1),
        target_logit=target_logit,
        centred=torch.linalg.vecdot(exp, difference) if wanted.centred else None,
        exp_squared=torch.linalg.vecdot(exp, exp) if wanted.exp_squared else None,
        # Last, since it overwrites the differences.
        centred_squared=torch.linalg.vecdot(exp, difference.square_()) if wanted.centred_squared else None,
    )


def target_logit_of(z: Tensor, target: Tensor | None) -> Tensor:
    """[n]; 0 where the target is not in this tile, as in `tile_statistics_`."""
    assert target is not None
    inside = (target >= 0) & (target < z.shape[1])
    column = torch.where(inside, target, 0)
    return torch.where(inside, z.gather(1, column.unsqueeze(1)).squeeze(1), 0.0)


def tile_gradient_(
    tile: Tensor,
    transform: LogitTransform | None,
    temperature: float | Tensor,
    normalizer: Normalizer,
    coefficients: GradientCoefficients,
    target: Tensor | None,
) -> Tensor:
    """Gradient with respect to raw logits [n, v], written over them; `target` as in `tile_statistics_`."""
    if tile.shape[1] == 0:  # a shard that is all padding
        return tile
    slope = None
    if transform is not None and transform.softcap is not None:
        slope = _softcap_(tile, transform, transform.softcap, slope=True)
        z = scale_logits_(tile, None, temperature)
    else:
        z = scale_logits_(tile, transform, temperature)
    log_p = z.sub_(normalizer.maximum.unsqueeze(1)).sub_(normalizer.log_sum.unsqueeze(1))
    log_p.clamp_(min=LOWEST_DIFFERENCE)
    p = log_p.exp()
    if coefficients.b is None:
        gradient = p.mul_(coefficients.a.unsqueeze(1))
    else:
        gradient = log_p.mul_(coefficients.b.unsqueeze(1)).add_(coefficients.a.unsqueeze(1)).mul_(p)
    if coefficients.c is not None:
        assert target is not None
        inside = (target >= 0) & (target < tile.shape[1])
        column = torch.where(inside, target, 0).unsqueeze(1)
        gradient.scatter_add_(1, column, torch.where(inside, coefficients.c, 0.0).unsqueeze(1))
    if slope is not None:
        gradient.mul_(slope)
    return gradient

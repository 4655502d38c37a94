"""Launches the row kernels: statistics and gradient of logits that exist."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_entropy.backends.interface import LogitRows, RowGradients, RowInputs, TokenSelection
from mcore_entropy.backends.triton import row_kernels
from mcore_entropy.statistics import PartialStatistics, Wanted

# One warp a row: 8 lanes a thread, one load of bf16, and no barrier. Columns apart have addresses of 64 bits,
# which take the registers.
_STATISTICS_STEPS, _STATISTICS_STEPS_APART, _STATISTICS_LANES = 8, 4, 256
_GRADIENT_BLOCK, _GRADIENT_WARPS = 2048, 4


def sum_flags(wanted: Wanted) -> dict[str, bool]:
    """Which sums the kernels compute. T comes before Q in memory, so Q brings T with it."""
    return dict(CENTRED=wanted.centred, SQUARED=wanted.centred_squared, EXP_SQUARED=wanted.exp_squared)


def named_sums(sums: Tensor, wanted: Wanted, target_logit: Tensor | None) -> PartialStatistics:
    """What a kernel stored, [sums, n], under its names."""
    maximum, sum_exp, *rest = sums.unbind(0)
    others = iter(rest)
    return PartialStatistics(
        maximum,
        sum_exp,
        target_logit,
        centred=next(others) if wanted.centred else None,
        centred_squared=next(others) if wanted.centred_squared else None,
        exp_squared=next(others) if wanted.exp_squared else None,
    )


def sum_count(wanted: Wanted) -> int:
    return 2 + sum(sum_flags(wanted).values())


@dataclass(frozen=True)
class Scaling:
    """Transform and temperature as the kernels take them: z = x * factor, x softcapped or raw.

    Attributes:
        factor: [n] fp32.
        is_one: whether every factor is known to be 1.
    """

    factor: Tensor
    scale: float
    softcap: float | None
    is_one: bool

    @staticmethod
    def of(inputs: RowInputs, rows: int, device: torch.device, live: Tensor | None = None) -> Scaling:
        """`live`: rows where it is False have a gradient of 0, whatever their temperature is."""
        transform, temperature = inputs.transform, inputs.temperature
        scale = 1.0 if transform is None else transform.scale
        softcap = None if transform is None else transform.softcap
        numerator = 1.0 if softcap is not None else scale  # the softcap contains the scale
        if isinstance(temperature, Tensor):
            factor = numerator / temperature
            factor = factor if live is None else torch.where(live, factor, 1.0)
            return Scaling(factor, scale, softcap, is_one=False)
        number = numerator / temperature
        factor = torch.full((rows,), number, dtype=torch.float32, device=device)
        return Scaling(factor, scale, softcap, is_one=number == 1.0)

    def numbers(self) -> tuple[float, float]:
        return self.scale, 1.0 if self.softcap is None else self.softcap


@dataclass(frozen=True)
class Coefficients:
    """The rows' numbers of the gradient as the kernels take them, [n] fp32 each; b is 0 where there is none.

    A dead row has the maximum +inf, which makes its p 0, and the logarithm 0.
    """

    maximum: Tensor
    log_sum: Tensor
    a: Tensor
    b: Tensor
    c: Tensor | None

    @staticmethod
    def of(gradients: RowGradients, multiplier: Tensor | None = None) -> Coefficients:
        """`multiplier`: one number on the device that the whole gradient is multiplied with."""

        def number(value: Tensor, in_dead_row: float, scaled: bool) -> Tensor:
            if scaled and multiplier is not None:
                value = value * multiplier
            return value if gradients.live is None else torch.where(gradients.live, value, in_dead_row)

        given, normalizer = gradients.coefficients, gradients.normalizer
        return Coefficients(
            number(normalizer.maximum, math.inf, scaled=False),
            number(normalizer.log_sum, 0.0, scaled=False),
            number(given.a, 0.0, scaled=True),
            torch.zeros_like(given.a) if given.b is None else number(given.b, 0.0, scaled=True),
            None if given.c is None else number(given.c, 0.0, scaled=True),
        )

    def pointers(self) -> tuple[Tensor, ...]:
        return self.maximum, self.log_sum, self.a, self.b


def logits_statistics(
    logits: LogitRows, tokens: TokenSelection, inputs: RowInputs, wanted: Wanted
) -> PartialStatistics:
    rows = tokens.count
    scaling = Scaling.of(inputs, rows, logits.device)
    sums = scaling.factor.new_empty(sum_count(wanted), rows)
    target_logit = scaling.factor.new_empty(rows) if wanted.target else None
    first, starts, _ = _places(logits, tokens)
    contiguous = logits.column_stride == 1
    if rows:
        row_kernels.logits_statistics_kernel[(rows,)](
            first,
            starts,
            inputs.target,
            scaling.factor,
            sums,
            target_logit,
            *scaling.numbers(),
            rows,
            logits.columns,
            logits.row_stride,
            logits.column_stride,
            STEPS=_STATISTICS_STEPS if contiguous else _STATISTICS_STEPS_APART,
            LANES=_STATISTICS_LANES,
            CONTIGUOUS=contiguous,
            LISTED=starts is not None,
            SCALED=not scaling.is_one,
            SOFTCAP=scaling.softcap is not None,
            TARGET=wanted.target,
            **sum_flags(wanted),
            num_warps=1,
            # A z that is a product must be rounded, like eager's, before the maximum is subtracted.
            enable_fp_fusion=scaling.is_one and scaling.softcap is None,
        )
    return named_sums(sums, wanted, target_logit)


def logits_gradient(
    logits: LogitRows, tokens: TokenSelection, inputs: RowInputs, gradients: RowGradients, out: Tensor
) -> None:
    """Write the gradient into the rows of `out` [N, v] that have the tokens' numbers."""
    rows, columns = tokens.count, logits.columns
    if not rows or not columns:
        return
    scaling = Scaling.of(inputs, rows, logits.device, gradients.live)
    coefficients = Coefficients.of(gradients)
    first, starts, numbers = _places(logits, tokens)
    row_kernels.logits_gradient_kernel[(rows, -(-columns // _GRADIENT_BLOCK))](
        first,
        starts,
        inputs.target,
        scaling.factor,
        *coefficients.pointers(),
        coefficients.c,
        out if numbers is not None else out[tokens.start :],
        numbers,
        *scaling.numbers(),
        columns,
        logits.row_stride,
        logits.column_stride,
        out.stride(0),
        BLOCK=_GRADIENT_BLOCK,
        LISTED=starts is not None,
        SOFTCAP=scaling.softcap is not None,
        TARGET=coefficients.c is not None,
        num_warps=_GRADIENT_WARPS,
        enable_fp_fusion=False,
    )


def _places(logits: LogitRows, tokens: TokenSelection) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Where the rows are: the first one and nothing else for a range of evenly spaced rows, else a list."""
    if tokens.rows is None and logits.evenly_spaced:
        return logits.from_token(tokens.start), None, None
    numbers = tokens.numbers(logits.device)
    return logits.whole, logits.starts(numbers), numbers

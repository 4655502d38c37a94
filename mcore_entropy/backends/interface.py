"""What a backend does: one device's part of the vocabulary, no collective, no autograd.

n tokens, v local columns that count (padding is cut off by the caller), H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mcore_entropy.execution import Execution
from mcore_entropy.statistics import (
    GradientCoefficients,
    LogitTransform,
    Normalizer,
    PartialStatistics,
    Wanted,
)


@dataclass(frozen=True)
class RowInputs:
    """What the rows of one call bring along beside their logits or hidden states.

    Attributes:
        target: the target's local column, [n] int64; any number outside [0, v) where the target is on
            another rank, ignored or invalid. None when no log-prob is wanted.
        temperature: a number, or [n] in the dtype of the statistics.
        transform: what the model does to its logits before the temperature.
    """

    target: Tensor | None
    temperature: float | Tensor
    transform: LogitTransform | None = None

    def rows(self, pick: Callable[[Tensor], Tensor]) -> RowInputs:
        """The inputs of the rows that `pick` takes out of every [n] tensor."""
        target = None if self.target is None else pick(self.target)
        temperature = pick(self.temperature) if isinstance(self.temperature, Tensor) else self.temperature
        return RowInputs(target, temperature, self.transform)

    def block(self, rows: slice) -> RowInputs:
        return self.rows(lambda per_row: per_row[rows])

    def target_from(self, column: int) -> Tensor | None:
        """The target's column counted from `column`, for a tile that starts there."""
        return None if self.target is None else self.target - column


@dataclass(frozen=True)
class RowGradients:
    """What the gradient of n rows needs: the vocabulary's normalizer, the coefficients, and live rows.

    Attributes:
        live: [n] bool; rows where it is False get a gradient of exactly 0, whatever their logits hold.
            None when every row is live.
    """

    normalizer: Normalizer
    coefficients: GradientCoefficients
    live: Tensor | None = None

    def rows(self, pick: Callable[[Tensor], Tensor]) -> RowGradients:
        """What the gradient of the rows needs that `pick` takes out of every [n] tensor."""

        def pick_if_there(per_row: Tensor | None) -> Tensor | None:
            return None if per_row is None else pick(per_row)

        a, b, c = self.coefficients.a, self.coefficients.b, self.coefficients.c
        return RowGradients(
            Normalizer(pick(self.normalizer.maximum), pick(self.normalizer.log_sum)),
            GradientCoefficients(pick(a), pick_if_there(b), pick_if_there(c)),
            pick_if_there(self.live),
        )

    def block(self, rows: slice) -> RowGradients:
        return self.rows(lambda per_row: per_row[rows])


@dataclass(frozen=True)
class KeptLogits:
    """Logits that a forward kept for its backward, of the first `columns` columns, in the backend's own form.

    Attributes:
        exponents: [n, columns] fp16, log2 of e^z relative to the row's maximum in the same tile of columns.
        maxima: [tiles, n] fp32, those maxima, before the temperature.
    """

    exponents: Tensor
    maxima: Tensor

    @property
    def columns(self) -> int:
        return self.exponents.shape[1]

    def block(self, start: int, stop: int) -> KeptLogits:
        """Tokens start to stop - 1, to be written."""
        return KeptLogits(self.exponents[start:stop], self.maxima[:, start:stop])


@dataclass(frozen=True)
class KeptRows:
    """The kept logits of the rows whose gradient is computed: `rows` [k] int64 says where, None: in order."""

    logits: KeptLogits
    rows: Tensor | None = None

    def block(self, rows: slice) -> KeptRows:
        if self.rows is None:
            return KeptRows(self.logits.block(rows.start, rows.stop))
        return KeptRows(self.logits, self.rows[rows])


class GradientTiles(Protocol):
    """The gradient for the logits of n rows, one slice of columns after the other.

    Attributes:
        slices: the slices that together are all v columns.
        factor: what every product with a tile has to be multiplied with (one number on the device), or None.
    """

    slices: Sequence[slice]
    factor: Tensor | None

    def tile(self, columns: slice) -> Tensor:
        """[n, columns] in the dtype in which it is multiplied; overwritten by the next call."""


class LogitRows:
    """Rows of logits [*, v] picked by token number, without ever copying the whole, whatever its layout."""

    def __init__(self, logits: Tensor) -> None:
        self.leading_shape = logits.shape[:-1]
        self.tokens = self.leading_shape.numel()
        self.columns = logits.shape[-1]
        self.device = logits.device
        self.dtype = logits.dtype
        self.whole = logits
        self.column_stride = logits.stride(-1)
        try:
            self._matrix: Tensor | None = logits.view(self.tokens, self.columns)
        except RuntimeError:  # the leading dimensions of a transposed tensor do not merge into one stride
            self._matrix = None

    @property
    def evenly_spaced(self) -> bool:
        """Whether one stride leads from each token's row to the next."""
        return self._matrix is not None

    @property
    def row_stride(self) -> int:
        """That stride, 0 where there is none."""
        return 0 if self._matrix is None else self._matrix.stride(0)

    def from_token(self, token: int) -> Tensor:
        """Evenly spaced rows from a token's on."""
        assert self._matrix is not None
        return self._matrix[token:]

    def starts(self, tokens: Tensor) -> Tensor:
        """The element of `whole` at which each token's row starts, [n] int64."""
        start = torch.zeros_like(tokens)
        for index, stride in zip(self._index(tokens), self.whole.stride(), strict=False):
            start += index * stride
        return start

    def _index(self, tokens: Tensor) -> tuple[Tensor, ...]:
        # torch.unravel_index would copy the shape to the device, which is a host sync.
        index = []
        for size in reversed(self.leading_shape):
            index.append(tokens % size)
            tokens = tokens // size
        return tuple(reversed(index))

    def read(self, tokens: Tensor) -> Tensor:
        """Rows of the given token numbers, [n, v]; a copy in the logits' dtype."""
        if self._matrix is not None:
            return self._matrix.index_select(0, tokens)
        return self.whole[self._index(tokens)]

    def read_range(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop), [n, v]; a view where the layout allows it."""
        if self._matrix is not None:
            return self._matrix[start:stop]
        return self.read(torch.arange(start, stop, device=self.device))


@dataclass(frozen=True)
class TokenSelection:
    """The tokens of one call: the range [start, stop), or those numbers of it that `rows` lists.

    Attributes:
        rows: [n] int64, offsets from start; None for the whole range.
    """

    start: int
    stop: int
    rows: Tensor | None = None

    @property
    def count(self) -> int:
        return self.stop - self.start if self.rows is None else self.rows.shape[0]

    def block(self, first: int, last: int) -> TokenSelection:
        """The selected tokens number first to last - 1."""
        if self.rows is None:
            return TokenSelection(self.start + first, self.start + last)
        return TokenSelection(self.start, self.stop, self.rows[first:last])

    def numbers(self, device: torch.device) -> Tensor:
        """The tokens' numbers, [n] int64."""
        if self.rows is None:
            return torch.arange(self.start, self.stop, device=device)
        return self.rows + self.start

    def read(self, logits: LogitRows) -> Tensor:
        if self.rows is None:
            return logits.read_range(self.start, self.stop)
        return logits.read(self.rows + self.start)

    def write(self, out: Tensor, values: Tensor) -> None:
        if self.rows is None:
            out[self.start : self.stop] = values
        else:
            out.index_copy_(0, self.rows + self.start, values.to(out.dtype))


class Backend(Protocol):
    """One device's kernels. Every method leaves its inputs unchanged and overwrites only what it returns."""

    name: str

    def check(self, execution: Execution, dtype: torch.dtype) -> None:
        """Raise ValueError for an option that this backend cannot honour for tensors of this dtype."""

    def logits_statistics(
        self,
        logits: LogitRows,
        tokens: TokenSelection,
        inputs: RowInputs,
        wanted: Wanted,
        execution: Execution,
    ) -> PartialStatistics:
        """Sums of the selected tokens' logits, [n]."""

    def logits_gradient(
        self,
        logits: LogitRows,
        tokens: TokenSelection,
        inputs: RowInputs,
        gradients: RowGradients,
        out: Tensor,
        execution: Execution,
    ) -> None:
        """Write the selected tokens' gradient into the rows of the same numbers of `out` [N, v]."""

    def linear_statistics(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: RowInputs,
        wanted: Wanted,
        execution: Execution,
        keep: KeptLogits | None = None,
    ) -> PartialStatistics:
        """Sums over the logits hidden [n, H] times weight [v, H] transposed, plus bias [v]; [n].

        `keep`: where to write the logits that its backward will find again.
        """

    def kept_logits(self, tokens: int, columns: int, like: Tensor, execution: Execution) -> KeptLogits | None:
        """Room for as many of the columns as ``execution.logits_budget_mib`` holds; None for none."""

    def most_rows(self, like: Tensor, execution: Execution) -> int:
        """How many rows one `linear_gradient_tiles` may have, so that tiles stay wide enough for speed."""

    def linear_gradient_tiles(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: RowInputs,
        gradients: RowGradients,
        execution: Execution,
        tokens: int,
        kept: KeptRows | None = None,
    ) -> GradientTiles:
        """The gradient for the same logits; at most `most_rows` rows.

        `tokens`: of the whole call, whatever part of them these rows are. The sums that exist beside the
        tiles grow with it.
        """

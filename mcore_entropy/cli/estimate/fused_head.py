"""The fused head's memory: the order of its backward, its sums, its chunks and its tiles.

The decisions are the product's own functions (`columns_first`, the chunks of `Problem`, the backends' sizes);
what is alive beside each other follows `HeadGradients`. n tokens of a chunk, k of them computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_entropy.backends.pytorch import TorchBackend
from mcore_entropy.cli.estimate.tiles import Tiles
from mcore_entropy.cli.estimate.workload import FP32, Head, Moment, Workload, moment
from mcore_entropy.execution import Execution
from mcore_entropy.functional.head_gradients import columns_first
from mcore_entropy.functional.linear_passes import default_chunk_size
from mcore_entropy.functional.problem import Problem
from mcore_entropy.parallel import TensorParallelGroup, VocabShard
from mcore_entropy.statistics import Wanted

# Bytes a token: the three numbers that are saved and the results; the target's column, coefficients and what
# makes them in backward.
_SAVED = 24
_BACKWARD = 48


@dataclass(frozen=True)
class _Pass:
    """One pass over the columns: its chunks' tokens, and those of them that are computed."""

    tokens: int
    rows: int
    largest_chunk: int
    chunks: int


def fused(work: Workload, tiles: Tiles, execution: Execution, chunk_size: int | None = None) -> Head:
    """`linear_log_probs_and_entropy`: tiles of logits, computed in forward and again in backward."""
    return _Fused(work, tiles, execution, chunk_size).head()


@dataclass(frozen=True)
class _Fused:
    work: Workload
    tiles: Tiles
    execution: Execution
    chunk_size: int | None

    def head(self) -> Head:
        work = self.work
        moments = [self._forward(), self._prepared(), self._gathered(), *self._passes(), self._finish()]
        live = work.live(work.tokens)
        kept = self.tiles.kept(live) / max(self.kept_whole, 1)
        flops = round((4 - kept) * work.product_flops(live))
        return Head("fused", tuple(one for one in moments if one is not None), flops)

    @property
    def kept_whole(self) -> int:
        """Bytes that keeping all logits in fp16 would take."""
        return self.work.live(self.work.tokens) * self.work.columns * 2

    @property
    def _problem(self) -> Problem:
        work = self.work
        return Problem(
            group=TensorParallelGroup(None, rank=0, size=work.tensor_parallel),
            shard=VocabShard(0, work.columns, work.columns * work.tensor_parallel),
            wanted=Wanted(entropy=work.entropy),
            backend=TorchBackend(),  # no chunk depends on it
            execution=self.execution,
            shape=torch.Size((work.tokens,)),
            chunk_size=self.chunk_size or default_chunk_size(self.tiles.device),
            sections=work.sections,
        )

    @property
    def by_columns(self) -> bool:
        work = self.work
        sum_costs_memory = not work.main_grad and work.dtype != torch.float32
        return sum_costs_memory and columns_first(
            work.tokens,
            work.columns,
            self.tiles.most_rows,
            hidden_wanted=True,
            gathered_itemsize=work.dtype.itemsize if work.sections > 1 else 0,
        )

    def _vectors(self, rows: int, itemsize: int) -> int:
        return rows * self.work.hidden_size * itemsize

    def _common(self, backward: bool) -> dict[str, int]:
        """What is there all the time."""
        work = self.work
        common = {
            "statistics": work.tokens * (_SAVED + _BACKWARD * backward),
            "kept logits": self.tiles.kept(work.live(work.tokens)),
        }
        if backward:
            common["gradient of hidden"] = work.hidden_bytes
        return common

    def _with_weight(self) -> dict[str, int]:
        """The same while passes run: the weight's gradient, or the fp32 sum for it."""
        work = self.work
        summed = not self.by_columns and not work.main_grad
        return self._common(backward=True) | {
            "gradient of weight": work.weight_bytes if self.by_columns else 0,
            "fp32 sum of weight's gradient": self._vectors(work.columns, FP32) if summed else 0,
        }

    def _forward(self) -> Moment:
        work = self.work
        chunks = self._problem.forward_chunks(masked=work.masked > 0)
        rows = work.live(max(chunk.tokens for chunk in chunks))
        return moment(
            "forward",
            {
                **self._common(backward=False),
                "gathered hidden": self._operand(rows, max(c.tokens for c in chunks), len(chunks) > 1),
                "tiles": self.tiles.statistics(rows),
            },
        )

    def _operand(self, rows: int, tokens: int, more: bool) -> int:
        """Copies of hidden states while k rows of n tokens are worked with; `more`: the next chunk's too."""
        work = self.work
        if work.sections == 1:
            return self._vectors(rows, work.dtype.itemsize) if work.masked else 0
        return self._vectors((rows if work.masked else tokens) + tokens * more, work.dtype.itemsize)

    def _all_passes(self) -> list[_Pass]:
        sizes = [chunk.tokens for chunk in self._problem.chunks()]
        if self.by_columns:
            return [_Pass(sum(sizes), sum(map(self.work.live, sizes)), max(sizes), len(sizes))]
        return [_Pass(size, self.work.live(size), size, 1) for size in sizes]

    def _prepared(self) -> Moment | None:
        """The first pass as it is prepared for all rows, before it is known that some are left out."""
        if self.work.sections > 1 or not self.work.masked:
            return None
        rows = self._all_passes()[0].tokens
        return moment(
            "the pass that is prepared for all rows",
            {
                **self._with_weight(),
                "fp32 sum of hidden's gradient": self._vectors(rows, FP32),
                "tiles": self.tiles.prepared(min(rows, self.tiles.most_rows)),
            },
        )

    def _gathered(self) -> Moment | None:
        """The hidden states of several chunks put together: they, and the whole."""
        only = self._all_passes()[0]
        copied = self.work.masked or self.work.sections > 1
        if not (self.by_columns and only.chunks > 1 and copied):
            return None
        twice = 2 * self._vectors(only.rows, self.work.dtype.itemsize)
        return moment("hidden states together", {**self._with_weight(), "gathered hidden": twice})

    def _passes(self) -> list[Moment]:
        passes = self._all_passes()
        return [self._of_pass(one, number, len(passes)) for number, one in enumerate(passes)]

    def _of_pass(self, one: _Pass, number: int, count: int) -> Moment:
        work = self.work
        reduced = work.tensor_parallel > 1
        in_flight = self._reduced(one.largest_chunk) if reduced and number else 0
        if reduced and one.chunks > 1:  # every chunk's reduction is started in the pass's last slice
            in_flight += self._reduced(one.tokens) - self._vectors(one.tokens, FP32) * (not work.masked)
        more = work.sections > 1 and not self.by_columns and number + 1 < count
        return moment(
            f"pass {number + 1} of {count}",
            {
                **self._with_weight(),
                "fp32 sum of hidden's gradient": self._vectors(one.rows, FP32),
                "sums on their way": in_flight,
                "gathered hidden": self._operand(one.rows, one.tokens, more),
                "tiles": self.tiles.gradient(one.rows, stored=self.by_columns),
            },
        )

    def _reduced(self, tokens: int) -> int:
        """A chunk's sum while it is reduced: all its rows and, under sequence parallelism, the rank's own."""
        own = tokens // self.work.sections if self.work.sections > 1 else 0
        return self._vectors(tokens + own, FP32)

    def _finish(self) -> Moment:
        """The sum as it is rounded to the weight's dtype; or what autograd gets beside main_grad."""
        work = self.work
        if work.main_grad:
            return moment(
                "what autograd gets for main_grad",
                {**self._common(backward=True), "placeholder for autograd": work.weight_bytes},
            )
        rounded = 0 if self.by_columns or work.dtype == torch.float32 else work.weight_bytes
        return moment("rounding", {**self._with_weight(), "gradient of weight": rounded or work.weight_bytes})

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

# Bytes a token, as measured (tests/cli/measured.py): the numbers that are saved and the results, and in
# backward the target's column, the coefficients and what makes them.
_FORWARD, _FORWARD_ENTROPY = 24, 8
_BACKWARD, _BACKWARD_ENTROPY = 40, 16


@dataclass(frozen=True)
class _Pass:
    """One pass over the columns: the tokens of its chunks, and how many of them are computed."""

    chunks: tuple[int, ...]
    rows: int

    @property
    def tokens(self) -> int:
        return sum(self.chunks)


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
        per_token = _FORWARD + _FORWARD_ENTROPY * work.entropy
        if backward:
            per_token = _BACKWARD + _BACKWARD_ENTROPY * work.entropy
        common = {
            "statistics": work.tokens * per_token,
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
        chunks = [chunk.tokens for chunk in self._problem.forward_chunks(masked=work.masked > 0)]
        following = chunks[1] if len(chunks) > 1 else 0
        rows = work.live(chunks[0])
        return moment(
            "forward",
            {
                **self._common(backward=False),
                "gathered hidden": self._operand(rows, chunks[0], following),
                "tiles": self.tiles.statistics(rows),
            },
        )

    def _operand(self, rows: int, tokens: int, following: int) -> int:
        """Copies of hidden states while k rows of n tokens are worked with, and of the next chunk."""
        work = self.work
        if work.sections == 1:
            return self._vectors(rows, work.dtype.itemsize) if work.masked else 0
        return self._vectors((rows if work.masked else tokens) + following, work.dtype.itemsize)

    def _all_passes(self) -> list[_Pass]:
        chunks = [chunk.tokens for chunk in self._problem.chunks()]
        if self.by_columns:
            return [_Pass(tuple(chunks), sum(map(self.work.live, chunks)))]
        return [_Pass((size,), self.work.live(size)) for size in chunks]

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
        if not (self.by_columns and len(only.chunks) > 1 and copied):
            return None
        twice = 2 * self._vectors(only.rows, self.work.dtype.itemsize)
        return moment("hidden states together", {**self._with_weight(), "gathered hidden": twice})

    def _passes(self) -> list[Moment]:
        passes = self._all_passes()
        moments = []
        for number, one in enumerate(passes):
            before = passes[number - 1].tokens if number else 0
            following = passes[number + 1].tokens if number + 1 < len(passes) else 0
            moments += self._of_pass(one, f"pass {number + 1} of {len(passes)}", before, following)
        return moments

    def _of_pass(self, one: _Pass, name: str, before: int, following: int) -> list[Moment]:
        """Its peak, and its end, where all its reductions have begun; `before`: tokens of the last pass."""
        reduced = self.work.tensor_parallel > 1
        on_their_way = self._reduced(before) if reduced else 0
        common = {
            **self._with_weight(),
            "fp32 sum of hidden's gradient": self._vectors(one.rows, FP32),
            "gathered hidden": self._operand(one.rows, one.tokens, following),
        }
        tiles = self.tiles.gradient(one.rows, stored=self.by_columns)
        peak = moment(name, {**common, "sums on their way": on_their_way, "tiles": tiles})
        if not reduced:
            return [peak]
        # Rows left out are put back for a reduction; the sum itself is reduced in place.
        own = self._reduced(one.tokens) - (0 if self.work.masked else self._in_place(one.tokens))
        end = {"sums on their way": on_their_way + own, "tiles": self.tiles.operand(one.rows)}
        return [peak, moment(f"{name}, its end", {**common, **end})]

    def _in_place(self, tokens: int) -> int:
        """What `_reduced` counts of the sum that is there anyway."""
        held = self.work.sections == 1 or self._input_is_held
        return self._vectors(tokens, FP32) if held else 0

    def _reduced(self, tokens: int) -> int:
        """Chunks' sums while they are reduced: in place, or under sequence parallelism to the rank's part."""
        if self.work.sections == 1:
            return self._vectors(tokens, FP32)
        held = tokens if self._input_is_held else 0
        return self._vectors(held + tokens // self.work.sections, FP32)

    @property
    def _input_is_held(self) -> bool:
        """NCCL holds on to a reduce-scatter's input until it is waited for, gloo does not."""
        return self.tiles.device.type == "cuda"

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

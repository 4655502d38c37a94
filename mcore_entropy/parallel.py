"""The tensor-parallel group: which columns a rank holds, how tokens are cut, and every collective.

N tokens, n tokens of one chunk, H hidden size. Under sequence parallelism each of the group's R ranks
holds N / R consecutive tokens of the hidden states; everything per token is full length.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

# Private, and the only way from a name to its group.
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined, unused-ignore]

from mcore_entropy.statistics import PartialStatistics


@dataclass(frozen=True)
class TensorParallelGroup:
    """A process group with this rank's place in it; ``process_group`` None is an unsharded vocabulary."""

    process_group: dist.ProcessGroup | None
    rank: int
    size: int

    @staticmethod
    def single_rank() -> TensorParallelGroup:
        """An unsharded vocabulary. To `resolve` it stays one, beside an initialised Megatron too."""
        return TensorParallelGroup(None, rank=0, size=1)

    @staticmethod
    def resolve(tp_group: GroupArgument) -> TensorParallelGroup:
        """The group to use: the one given, else Megatron's where it is initialised, else a single rank.

        Raises:
            ValueError: tp_group is no process group, or this rank is not in it.
        """
        if isinstance(tp_group, TensorParallelGroup):
            return tp_group
        if tp_group is None:
            tp_group = _megatron_group()
            if tp_group is None:
                return TensorParallelGroup.single_rank()
        if not isinstance(tp_group, dist.ProcessGroup):
            raise ValueError(
                "tp_group: expected a torch.distributed.ProcessGroup that this rank is in, or None, got "
                f"{tp_group!r}; dist.new_group gives ranks outside the group a placeholder, not a group"
            )
        return TensorParallelGroup(tp_group, rank=dist.get_rank(tp_group), size=dist.get_world_size(tp_group))

    @staticmethod
    def named(name: str | None) -> TensorParallelGroup:
        """The group of this `name`; an unsharded vocabulary for None."""
        if name is None:
            return TensorParallelGroup.single_rank()
        return TensorParallelGroup.resolve(_resolve_process_group(name))  # type: ignore[arg-type, unused-ignore]

    @property
    def name(self) -> str | None:
        """What `named` finds the group by."""
        return None if self.process_group is None else self.process_group.group_name


# A group as callers inside the package may name it: resolved already, or a public function's tp_group.
GroupArgument: TypeAlias = dist.ProcessGroup | TensorParallelGroup | None


def _megatron_group() -> dist.ProcessGroup | None:
    # Not imported here: whoever initialised Megatron's groups has imported it.
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return None
    group: dist.ProcessGroup | None = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    return group


@dataclass(frozen=True)
class VocabShard:
    """This rank's part of the vocabulary.

    Attributes:
        start: global index of the rank's first column.
        columns: number of columns the rank holds.
        vocab_size: columns at or beyond this global index count as p = 0.
    """

    start: int
    columns: int
    vocab_size: int

    @property
    def counted(self) -> int:
        """How many of the rank's columns, from its first, belong to the vocabulary."""
        return min(max(self.vocab_size - self.start, 0), self.columns)

    @staticmethod
    def resolve(
        columns: int, vocab_size: int | None, vocab_start_index: int | None, group: TensorParallelGroup
    ) -> VocabShard:
        """The shard for `columns` local columns; the arguments are those of the public functions.

        Raises:
            ValueError: the arguments contradict each other or the number of columns.
        """
        for name, value in (("vocab_size", vocab_size), ("vocab_start_index", vocab_start_index)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise ValueError(f"{name}: expected an int or None, got {value!r}")
        if vocab_size is not None and vocab_size <= 0:
            raise ValueError(f"vocab_size: expected a positive number of columns, got {vocab_size}")
        if vocab_start_index is None:
            total = columns * group.size
            if total == 0:
                raise ValueError("vocab_size: expected a vocabulary of at least one column, got none")
            if vocab_size is None:
                vocab_size = total
            elif vocab_size > total:
                raise ValueError(
                    f"vocab_size: expected at most the {total} columns that {group.size} equal shards of "
                    f"{columns} hold, got {vocab_size}; uneven shards need vocab_start_index as well"
                )
            return VocabShard(group.rank * columns, columns, vocab_size)
        if vocab_size is None:
            raise ValueError(
                "vocab_start_index: expected together with vocab_size, got vocab_size=None; uneven shards "
                "do not tell one rank how large the vocabulary is"
            )
        if vocab_start_index < 0:
            raise ValueError(f"vocab_start_index: expected 0 or more, got {vocab_start_index}")
        if group.size == 1 and (vocab_start_index != 0 or vocab_size > columns):
            raise ValueError(
                f"vocab_start_index and vocab_size: expected one rank to hold columns 0 to {vocab_size}, got "
                f"{columns} columns from {vocab_start_index}; is tp_group missing?"
            )
        return VocabShard(vocab_start_index, columns, vocab_size)


@dataclass(frozen=True)
class TokenChunk:
    """Tokens that share a reduction: the rows [start, stop) of each of `sections` equal token ranges.

    There is one section, except under sequence parallelism, where each rank's shard of the sequence is one:
    then a chunk needs an equal piece of every shard, and the gathered hidden states come in this order.
    """

    start: int
    stop: int
    sections: int
    tokens_per_section: int

    @property
    def tokens(self) -> int:
        return self.sections * (self.stop - self.start)

    def following(self) -> TokenChunk | None:
        """The next chunk, of at most as many tokens."""
        stop = min(2 * self.stop - self.start, self.tokens_per_section)
        if stop == self.stop:
            return None
        return TokenChunk(self.stop, stop, self.sections, self.tokens_per_section)

    def take(self, per_token: Tensor) -> Tensor:
        """This chunk's rows of [N], as [n], contiguous; a view where there is one section."""
        sections = per_token.view(self.sections, self.tokens_per_section)
        # Not reshape: one row a section is a view with the stride of a section, and kernels expect stride 1.
        return sections[:, self.start : self.stop].contiguous().view(-1)

    def put(self, per_token: Tensor, values: Tensor) -> None:
        """Write [n] to this chunk's rows of [N]."""
        sections = per_token.view(self.sections, self.tokens_per_section)
        sections[:, self.start : self.stop] = values.view(self.sections, self.stop - self.start)


def token_chunks(tokens: int, chunk_size: int, sections: int = 1) -> Iterator[TokenChunk]:
    """Cut N tokens into chunks of at most `chunk_size`, and at least one token of every section."""
    per_section = tokens // sections
    step = max(chunk_size // sections, 1)
    for start in range(0, per_section, step):
        yield TokenChunk(start, min(start + step, per_section), sections, per_section)


class Pending:
    """The result of a collective that may still run: on a GPU beside the work that is launched meanwhile."""

    def __init__(self, result: Tensor, work: dist.Work | None = None) -> None:
        self._result = result
        self._work = work

    def result(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._result


class StatisticsReduction:
    """Statistics of the whole vocabulary from every rank's part: one MAX and one packed SUM all-reduce.

    The MAX starts at once, the SUM with `start_sum`, so that other work can be launched in between.

    A backend's MAX may drop a NaN (gloo's does). The rank that holds it rescales its sums by NaN, so the
    SUM carries it to every rank.
    """

    def __init__(self, partial: PartialStatistics, group: TensorParallelGroup) -> None:
        self._partial = partial
        self._group = group
        maximum = partial.maximum.clone()
        work = dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group.process_group, async_op=True)
        self._maximum = Pending(maximum, work)
        self._sums: Pending | None = None

    def start_sum(self) -> None:
        if self._sums is None:
            self._partial = self._partial.rescaled(self._maximum.result())
            sums = self._partial.packed_sums()
            work = dist.all_reduce(sums, group=self._group.process_group, async_op=True)
            self._sums = Pending(sums, work)

    def result(self) -> PartialStatistics:
        self.start_sum()
        assert self._sums is not None
        return self._partial.with_sums(self._sums.result())


class OrderedStatisticsReduction:
    """The same result from one all-gather, merged in rank order: the same bits whatever the network does."""

    def __init__(self, partial: PartialStatistics, group: TensorParallelGroup) -> None:
        self._partial = partial
        self._group = group
        mine = torch.stack(list(partial.present().values()))
        everyone = mine.new_empty(group.size * mine.shape[0], mine.shape[1])
        work = dist.all_gather_into_tensor(everyone, mine, group=group.process_group, async_op=True)
        self._everyone = Pending(everyone, work)

    def start_sum(self) -> None:
        """Nothing to start: there is one collective."""

    def result(self) -> PartialStatistics:
        names = list(self._partial.present())
        first, *others = (
            PartialStatistics(**dict(zip(names, rank, strict=True)))
            for rank in self._everyone.result().view(self._group.size, len(names), -1).unbind(0)
        )
        for other in others:
            first = first.merge(other)
        return first


class NoReduction:
    """One rank has the whole vocabulary."""

    def __init__(self, partial: PartialStatistics) -> None:
        self._partial = partial

    def start_sum(self) -> None:
        """Nothing to start."""

    def result(self) -> PartialStatistics:
        return self._partial


Reduction: TypeAlias = StatisticsReduction | OrderedStatisticsReduction | NoReduction


def start_reduction(partial: PartialStatistics, group: TensorParallelGroup, deterministic: bool) -> Reduction:
    """Begin to bring the ranks' parts together.

    The sum of two numbers does not depend on their order. Of more it does, and then `deterministic` or
    torch's deterministic algorithms ask for the ordered form.
    """
    if group.size == 1:
        return NoReduction(partial)
    if group.size > 2 and (deterministic or torch.are_deterministic_algorithms_enabled()):
        return OrderedStatisticsReduction(partial, group)
    return StatisticsReduction(partial, group)


def start_gather(hidden: Tensor, group: TensorParallelGroup) -> Pending:
    """All ranks' rows [n / R, H], in rank order, as [n, H]: one all-gather."""
    gathered = hidden.new_empty(group.size * hidden.shape[0], hidden.shape[1])
    work = dist.all_gather_into_tensor(
        gathered, hidden.contiguous(), group=group.process_group, async_op=True
    )
    return Pending(gathered, work)


def start_hidden_reduction(partial: Tensor, chunk: TokenChunk, group: TensorParallelGroup) -> Pending:
    """The sum over ranks of a chunk's [n, H], in place: one all-reduce, none on a single rank.

    Under sequence parallelism this rank's rows [n / R, H] of it: one reduce-scatter.
    """
    if group.size == 1:
        return Pending(partial)
    if chunk.sections == 1:
        return Pending(partial, dist.all_reduce(partial, group=group.process_group, async_op=True))
    shard = partial.new_empty(partial.shape[0] // group.size, partial.shape[1])
    work = dist.reduce_scatter_tensor(shard, partial, group=group.process_group, async_op=True)
    return Pending(shard, work)


def checks_enabled() -> bool:
    """Whether ``MCORE_ENTROPY_CHECKS=1`` asks for what costs a comparison of ranks or a host sync."""
    return os.environ.get("MCORE_ENTROPY_CHECKS", "0") == "1"

"""The comparison: every head is checked against fp64, those that are right are measured, in turn.

What becomes of a head is decided by all ranks together: one that fails or is wrong on any of them is measured
on none, and its reason is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from mcore_entropy.cli.benchmark.heads import Head
from mcore_entropy.cli.benchmark.machine import available_bytes
from mcore_entropy.cli.benchmark.measure import Step
from mcore_entropy.cli.benchmark.problem import Inputs, Problem, UserError
from mcore_entropy.cli.benchmark.ranks import HeadFailed, Ranks
from mcore_entropy.cli.benchmark.truth import Truth, wrong

Progress = Callable[[str], None]


@dataclass
class Row:
    """What is known of a head.

    Attributes:
        reason: why it was not measured, or None.
        errors: against fp64, the largest of all ranks'; empty where it did not run.
        forward_ms, backward_ms: of each round, the slowest rank's.
        peak_bytes: the largest of all ranks'.
    """

    name: str
    gives: tuple[str, ...]
    reason: str | None = None
    errors: dict[str, float] = field(default_factory=dict)
    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)
    peak_bytes: int | None = None

    @property
    def step_ms(self) -> list[float]:
        """Forward and backward, of each round."""
        return [sum(both) for both in zip(self.forward_ms, self.backward_ms, strict=True)]

    @property
    def timed(self) -> bool:
        return bool(self.forward_ms) and self.reason is None

    def ratios_to(self, other: Row) -> list[float]:
        """Of this step's time to another's, round by round."""
        return [mine / theirs for mine, theirs in zip(self.step_ms, other.step_ms, strict=True)]


@dataclass
class _Entrant:
    """A head that is still in."""

    row: Row
    step: Step
    iterations: int = 1


class Comparison:
    """The heads on one problem; every method is called by all ranks."""

    def __init__(
        self,
        problem: Problem,
        ranks: Ranks,
        heads: Iterable[tuple[Head, str | None]],
    ) -> None:
        """heads: each with the reason why it is left out, or None."""
        self._problem, self._ranks = problem, ranks
        self._heads = list(heads)
        self.rows = [Row(head.name, head.gives, reason) for head, reason in self._heads]
        self._entrants: list[_Entrant] = []

    def check(self, progress: Progress) -> None:
        """Run every head once and compare it with fp64.

        Raises:
            UserError: the inputs or what is right do not fit.
        """
        channel = self._ranks.channel("inputs")
        made: list[tuple[Inputs, Truth]] = []

        def make() -> int:
            inputs = Inputs.random(self._problem, self._ranks.rank)
            made.append((inputs, Truth.of(inputs, channel.group)))
            return available_bytes()

        progress("fp64 truth")
        try:
            available = min(channel.attempt(make))
        except HeadFailed as error:
            raise UserError(f"the inputs of {self._problem.describe()} cannot be made: {error}") from error
        inputs, truth = made.pop()
        for row, (head, _) in zip(self.rows, self._heads, strict=True):
            progress(f"check {head.name}")
            row.reason = row.reason or self._too_large(head, available)
            if row.reason is None:
                channel = self._ranks.channel(head.name)
                entrant = _Entrant(row, Step(head, inputs, channel))
                self._check(entrant, truth)

    def _too_large(self, head: Head, available: int) -> str | None:
        """Before the CPU's memory is exhausted, which ends the process and not only the head."""
        needed = head.tensors_of_logits * self._problem.logits_bytes * self._problem.ranks
        if self._problem.device.type != "cpu" or needed <= available:
            return None
        return f"not tried: it needs about {needed / 2**30:.0f} GiB, and {available / 2**30:.0f} are free"

    def _check(self, entrant: _Entrant, truth: Truth) -> None:
        step, row = entrant.step, entrant.row

        def errors() -> dict[str, float]:
            return truth.errors(row.gives, step.run(), step.channel.group)

        try:
            found = entrant.step.channel.attempt(errors)
        except HeadFailed as error:
            row.reason = str(error)
        else:
            row.errors = {name: max(errors[name] for errors in found) for name in found[0]}
            row.reason = wrong(row.errors, self._problem.dtype)
        step.inputs.free()
        if row.reason is None:
            self._entrants.append(entrant)

    def measure(self, rounds: int, progress: Progress) -> None:
        """Peak memory, then time, of the heads that are right; times in turn, in alternating order."""
        for entrant in self._entrants:
            progress(f"memory of {entrant.row.name}")
            self._attempt(entrant, self._remember_peak)
        for entrant in self._entrants:
            progress(f"warm up {entrant.row.name}")
            self._attempt(entrant, self._choose_iterations)
        for number in range(rounds):
            for entrant in self._entrants if number % 2 else reversed(self._entrants):
                progress(f"round {number + 1} of {entrant.row.name}")
                self._attempt(entrant, self._time)

    def steps(self, rounds: int) -> int:
        """How often `check` and `measure` report progress, at most."""
        return 1 + len(self._heads) * (3 + rounds)

    def _attempt(self, entrant: _Entrant, measurement: Callable[[_Entrant], None]) -> None:
        """Unless the head is out already; where it fails, on any rank, it is out on all."""
        if entrant.row.reason is None:
            try:
                measurement(entrant)
            except HeadFailed as error:
                entrant.row.reason = str(error)
            entrant.step.inputs.free()

    def _remember_peak(self, entrant: _Entrant) -> None:
        entrant.row.peak_bytes = max(entrant.step.channel.attempt(entrant.step.peak_bytes))

    def _choose_iterations(self, entrant: _Entrant) -> None:
        seconds = max(entrant.step.channel.attempt(entrant.step.seconds))
        entrant.iterations = entrant.step.iterations(seconds)

    def _time(self, entrant: _Entrant) -> None:
        times = entrant.step.channel.attempt(lambda: entrant.step.milliseconds(entrant.iterations))
        forward, backward = max(times, key=sum)
        entrant.row.forward_ms.append(forward)
        entrant.row.backward_ms.append(backward)

"""A step's time and peak memory: forward, then backward with gradients for everything the head gives."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mcore_entropy.cli.benchmark.heads import Head, Results
from mcore_entropy.cli.benchmark.problem import Inputs
from mcore_entropy.cli.benchmark.ranks import Channel

# A GPU's clock follows the power of what ran just before: each head runs as long untimed before it is timed.
_ACCELERATOR_SECONDS = 0.05
_MOST_ITERATIONS = 50


class _WallMark:
    """torch.cuda.Event's two methods, for a device that computes before it returns."""

    def record(self) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, later: _WallMark) -> float:
        return 1e3 * (later._seconds - self._seconds)


@contextlib.contextmanager
def _quiet_profiler() -> Iterator[None]:
    """It writes lines of its own to the process's stderr, past sys.stderr."""
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


@dataclass(frozen=True)
class Step:
    """A head on its inputs."""

    head: Head
    inputs: Inputs
    channel: Channel

    def run(self) -> Results:
        """Forward and backward; gradients are in the inputs."""
        self.inputs.free()
        results = self.head.run(self.inputs, self.channel.group)
        torch.autograd.backward(results, self._upstream(results))
        return results

    def iterations(self, seconds: float) -> int:
        """How often to run it in a row, when once takes so long on the slowest rank."""
        if self._device.type == "cpu":
            return 1
        return min(max(round(_ACCELERATOR_SECONDS / max(seconds, 1e-9)), 1), _MOST_ITERATIONS)

    def seconds(self) -> float:
        """Of one whole step by the wall clock."""
        self._synchronize()
        started = time.perf_counter()
        self.run()
        self._synchronize()
        return time.perf_counter() - started

    def milliseconds(self, iterations: int) -> list[float]:
        """Of a forward and of a backward, the mean of some in a row."""
        self.inputs.free()
        if self._device.type != "cpu":
            for _ in range(iterations):
                self.run()
        if self.channel.group is not None:
            dist.barrier(self.channel.group)
        marks = []
        for _ in range(iterations):
            self.inputs.free()
            start, middle, end = self._mark(), self._mark(), self._mark()
            start.record()
            results = self.head.run(self.inputs, self.channel.group)
            middle.record()
            torch.autograd.backward(results, self._upstream(results))
            end.record()
            marks.append((start, middle, end))
        self._synchronize()
        forward = sum(start.elapsed_time(middle) for start, middle, _ in marks)
        backward = sum(middle.elapsed_time(end) for _, middle, end in marks)
        return [forward / iterations, backward / iterations]

    def peak_bytes(self) -> int:
        """What a step holds at its peak beyond the inputs, the gradients it ends with included."""
        self.inputs.free()
        gc.collect()
        if self._device.type == "cpu":
            return self._traced_peak()
        memory = torch.get_device_module(self._device)
        self._synchronize()
        memory.empty_cache()
        memory.reset_peak_memory_stats()
        before = memory.memory_allocated()
        self.run()
        self._synchronize()
        return int(memory.max_memory_allocated() - before)

    def _traced_peak(self) -> int:
        """From the CPU allocator's own trace, which slows the step down and is never timed."""
        with _quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            self.run()
        events = trace.profiler.kineto_results.events()
        now = peak = 0
        for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
            now += event.nbytes()
            peak = max(peak, now)
        return peak

    def _upstream(self, results: Results) -> list[Tensor]:
        upstream = {
            "log_probs": self.inputs.upstream[0],
            "entropy": self.inputs.upstream[1],
        }
        return [
            upstream[name].to(result.dtype) if name in upstream else torch.ones_like(result)
            for name, result in zip(self.head.gives, results, strict=True)
        ]

    def _mark(self) -> Any:
        if self._device.type == "cpu":
            return _WallMark()
        return torch.get_device_module(self._device).Event(enable_timing=True)

    def _synchronize(self) -> None:
        torch.get_device_module(self._device).synchronize()

    @property
    def _device(self) -> torch.device:
        return self.inputs.hidden.device

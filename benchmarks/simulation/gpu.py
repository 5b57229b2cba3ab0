"""The GPU of a simulated training process: a stream that works off what is launched, and what is measured of it.

What CUDA events would say comes from dpex's own `GpuStall`, over marks on the simulated stream. What NVML would say is
the share of the last second in which a kernel ran, looked at once a second; the kernel of an all-reduce runs while it
waits for the other ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulation.event_loop import EventLoop, SharedResource
from benchmarks.simulation.world import Gpu
from dpex.system.gpu.nvml import PERIOD_S
from dpex.system.gpu.stall import GpuStall, GpuSteps

PARTS = 4
"""A step is launched, and runs, in so many parts, so that the GPU begins before the last of it is launched."""


@dataclass(eq=False)
class Mark:
    """An event on the stream. at: when the stream came to it, None before."""

    at: float | None = None


class AllReduce:
    """Where ranks wait for each other, step by step."""

    def __init__(self, loop: EventLoop, ranks: int, seconds: float) -> None:
        self._loop, self._ranks, self._seconds = loop, ranks, seconds
        self._there: list[Callable[[], None]] = []

    def arrive(self, then: Callable[[], None]) -> None:
        """A rank has come to it; ``then`` happens at its end."""
        self._there.append(then)
        if len(self._there) == self._ranks:
            there, self._there = self._there, []
            for each in there:
                self._loop.after(self._seconds, each)


class Stream:
    """Kernels and marks in their order; `dpex.system.gpu.stall.Events` on it. busy_s: kernels ran for so long."""

    def __init__(self, loop: EventLoop, all_reduce: AllReduce, *, has_events: bool) -> None:
        self._loop, self._all_reduce, self._has_events = loop, all_reduce, has_events
        self._queue: deque[Mark | Callable[[], None]] = deque()
        self._running_since: float | None = None
        self._busy_s = 0.0
        self._waiters: deque[tuple[int, Callable[[], None]]] = deque()
        self.pending = 0

    @property
    def busy_s(self) -> float:
        """See the class."""
        running_s = 0.0 if self._running_since is None else self._loop.now - self._running_since
        return self._busy_s + running_s

    def run(self, seconds: float) -> None:
        """Launch a kernel of that length."""
        self._launch(lambda: self._loop.after(seconds, self._ended))

    def reduce(self) -> None:
        """Launch the kernel that waits for the other ranks."""
        self._launch(lambda: self._all_reduce.arrive(self._ended))

    def when_pending(self, most: int, then: Callable[[], None]) -> None:
        """Go on once no more kernels than that are launched and not done."""
        if self.pending <= most:
            then()
        else:
            self._waiters.append((most, then))

    def _launch(self, begin: Callable[[], None]) -> None:
        self.pending += 1
        self._queue.append(begin)
        self._go_on()

    def _go_on(self) -> None:
        while self._queue and self._running_since is None:
            first = self._queue.popleft()
            if isinstance(first, Mark):
                first.at = self._loop.now
            else:
                self._running_since = self._loop.now
                first()

    def _ended(self) -> None:
        self._busy_s, self._running_since = self.busy_s, None
        self.pending -= 1
        self._go_on()
        while self._waiters and self.pending <= self._waiters[0][0]:
            self._waiters.popleft()[1]()

    # -- marks ---------------------------------------------------------------------------------------------------------

    def is_open(self) -> bool:
        """See `Events`."""
        return self._has_events

    def record(self, like: Mark | None = None) -> Mark:
        """See `Events`."""
        mark = Mark()
        self._queue.append(mark)
        self._go_on()
        return mark

    def is_passed(self, mark: Mark) -> bool:
        """See `Events`."""
        return mark.at is not None

    def apart_s(self, first: Mark, second: Mark) -> float:
        """See `Events`."""
        assert first.at is not None
        assert second.at is not None
        return second.at - first.at

    def share_stream(self, first: Mark, second: Mark) -> bool:
        """See `Events`."""
        return True

    def reuse(self, mark: Mark) -> None:
        """See `Events`."""


class GpuTrainer:
    """A training process with a GPU: its steps, and what events and NVML say of them. busy_ratio: by NVML."""

    def __init__(self, loop: EventLoop, cpus: SharedResource, gpu: Gpu, all_reduce: AllReduce) -> None:
        self._loop, self._cpus, self._gpu = loop, cpus, gpu
        self._stream = Stream(loop, all_reduce, has_events=gpu.has_events)
        self._events: GpuStall[Mark] = GpuStall(self._stream)
        self._entered: tuple[Mark | None, float] = (None, 0.0)
        self._steps = self._evaluations = 0
        self._busy_s = self._looked_at = 0.0
        self.busy_ratio: float | None = None
        if gpu.has_nvml:
            self._look()

    def _look(self) -> None:
        seconds, busy_s = self._loop.now - self._looked_at, self._stream.busy_s
        self.busy_ratio = (busy_s - self._busy_s) / seconds if seconds > 0 else 0.0
        self._busy_s, self._looked_at = busy_s, self._loop.now
        self._loop.after(PERIOD_S, self._look)

    @property
    def stall_s(self) -> float | None:
        """By CUDA events."""
        return self._events.stall_s

    @property
    def steps(self) -> GpuSteps:
        """By CUDA events."""
        return self._events.steps

    def enter(self) -> None:
        """The training process calls next()."""
        self._entered = self._events.enter(), self._loop.now

    def leave(self, *, starting: bool) -> None:
        """It has a batch."""
        mark, at = self._entered
        self._events.leave(mark, self._loop.now - at, starting=starting, over=False)

    def step(self, gpu_s: float, cpu_s: float, pause_s: float, then: Callable[[float, float], None]) -> None:
        """Launch a step; ``then`` happens when the training process goes on, with its CPU time and how long that
        queued for a CPU."""
        number, gpu = self._steps, self._gpu
        self._steps += 1
        gpu_s *= gpu.warm_up_factor if number < gpu.warm_up else 1.0
        launch_s = cpu_s + (0.0 if number else gpu.compile_s)
        evaluation_s, queued_s = self._evaluation_s(), 0.0

        def launched(part: int, began: float) -> None:
            nonlocal queued_s
            queued_s += max(0.0, self._loop.now - began - launch_s / PARTS)
            self._stream.run(gpu_s / PARTS)
            self._stream.when_pending(PARTS * gpu.queue, lambda: launch(part + 1))

        def launch(part: int) -> None:
            if part < PARTS:
                began = self._loop.now
                self._cpus.start(launch_s / PARTS, lambda: launched(part, began))
                return
            if gpu.all_reduce_s:
                self._stream.reduce()
            is_due = gpu.sync_every and not self._steps % gpu.sync_every
            if is_due or pause_s or evaluation_s:
                self._stream.when_pending(0, evaluate)
            else:
                then(launch_s, queued_s)

        def evaluate() -> None:
            if evaluation_s:
                self._stream.run(evaluation_s)
            self._stream.when_pending(0, lambda: self._loop.after(pause_s, lambda: then(launch_s, queued_s)))

        launch(0)

    def _evaluation_s(self) -> float:
        """Of an evaluation that is due after this step."""
        evaluation = self._gpu.evaluation
        if evaluation is None or self._loop.now < (self._evaluations + 1) * evaluation.every_s:
            return 0.0
        self._evaluations = int(self._loop.now / evaluation.every_s)
        return evaluation.seconds

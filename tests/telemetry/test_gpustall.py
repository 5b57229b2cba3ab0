"""GPU stall on a simulated stream, in virtual time, against what that stream itself did not do."""

from __future__ import annotations

import time
from itertools import islice, takewhile
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from families import Augmented
from hypothesis import given
from hypothesis import strategies as st
from inspection import engine_of, gpu_of
from waiting import ManualClock

from dpex import AutotuneConfig, DpexDataLoader
from dpex.system.gpu.stall import AT_ONCE, PENDING, SHARE, CudaEvents, GpuStall, cuda_stall

MS = 1 / 1024
"""A millisecond whose multiples floating point adds up exactly."""


class FakeMark:
    """An event that may be recorded anew."""

    def __init__(self) -> None:
        self.at_s = 0.0


class Stream:
    """A stream that works off what is queued, in order; and the `Events` on it."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.free_at = 0.0
        self.kernels: list[tuple[float, float]] = []
        self.idle: list[FakeMark] = []
        self.made = self.asked = self.recorded = 0
        self.capturing = False
        self.broken = False
        self.mark_s = 0.0

    def launch(self, seconds: float) -> None:
        start = max(self.free_at, self.clock())
        self.free_at = start + seconds
        self.kernels.append((start, self.free_at))

    def is_open(self) -> bool:
        return not self.capturing

    def record(self, like: FakeMark | None = None) -> FakeMark:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        assert not self.capturing
        if not self.idle:
            self.made += 1
            self.idle.append(FakeMark())
        self.recorded += 1
        if self.mark_s:
            self.clock.advance(self.mark_s)
        mark = self.idle.pop()
        mark.at_s = self.free_at = max(self.free_at, self.clock())
        return mark

    def is_passed(self, mark: FakeMark) -> bool:
        assert not self.capturing, "asked while a graph was captured"
        self.asked += 1
        return mark.at_s <= self.clock()

    def apart_s(self, first: FakeMark, second: FakeMark) -> float:
        assert max(first.at_s, second.at_s) <= self.clock(), "read before it was passed: this would have to wait"
        return second.at_s - first.at_s

    def share_stream(self, first: FakeMark, second: FakeMark) -> bool:
        return True

    def reuse(self, mark: FakeMark) -> None:
        assert mark not in self.idle
        self.idle.append(mark)


class Step(NamedTuple):
    """How long ``next()`` takes, what it queues on the stream then, and how long the host needs for that."""

    wait_s: float
    kernel_s: float
    host_s: float = 0.0


class Training:
    """A loop, and what the stream really missed while it was inside ``next()``."""

    def __init__(self, share: float | None = None) -> None:
        self.clock = ManualClock()
        self.stream = Stream(self.clock)
        self.gpu: GpuStall[FakeMark] = GpuStall(self.stream, share, self.clock)
        self.stays: list[tuple[float, float]] = []

    def visit(self, wait_s: float, *, starting: bool = False, over: bool = False, blocks: bool = False) -> None:
        entered = self.clock()
        mark = self.gpu.enter(starting=starting)
        if blocks:
            mark = self.gpu.block(mark)
        self.clock.advance(wait_s)
        self.gpu.leave(mark, self.clock() - entered, starting=starting, over=over)
        self.stays.append((entered, self.clock()))

    def step(self, step: Step, *, starting: bool = False, blocks: bool = False) -> None:
        self.visit(step.wait_s, starting=starting, blocks=blocks)
        self.clock.advance(step.host_s)
        self.stream.launch(step.kernel_s)

    def end(self) -> None:
        self.clock.advance(max(0.0, self.stream.free_at - self.clock()))
        self.visit(0.0, over=True)

    def missed_s(self) -> list[float]:
        """By stay: its length less the kernels in it."""
        found, kernels, first = [], self.stream.kernels, 0
        for since, until in self.stays:
            while first < len(kernels) and kernels[first][1] <= since:
                first += 1
            within = takewhile(lambda kernel, until=until: kernel[0] < until, islice(kernels, first, None))
            found.append((until - since) - sum(min(until, done) - max(since, start) for start, done in within))
        return found


steps = st.builds(
    Step,
    wait_s=st.integers(0, 40).map(lambda ms: ms * MS),
    kernel_s=st.integers(0, 40).map(lambda ms: ms * MS),
    host_s=st.integers(0, 10).map(lambda ms: ms * MS),
)


@given(st.lists(steps, min_size=1, max_size=PENDING))
def test_any_loop_gives_what_the_stream_missed(loop: list[Step]) -> None:
    training = Training()
    for number, step in enumerate(loop):
        training.step(step, starting=number == 0)
    training.end()
    first, *others = training.missed_s()
    assert (training.gpu.start_s, training.gpu.stall_s) == (first, sum(others))


def test_every_pass_has_a_start_of_its_own() -> None:
    training = Training()
    for _ in range(3):
        training.visit(100 * MS, starting=True)
        training.visit(1 * MS)
        training.visit(0.0, over=True)
    assert (training.gpu.start_s, training.gpu.stall_s) == (300 * MS, 3 * MS)


def test_a_gpu_far_behind_costs_neither_marks_nor_questions() -> None:
    training = Training()
    for _ in range(10 * PENDING):
        training.step(Step(0.0, 1.0))
    assert training.stream.made == 2 * PENDING + 1
    assert training.stream.asked <= 10 * PENDING  # one a call, which is answered "not yet"
    training.end()
    assert training.gpu.stall_s == 0.0
    before = training.stream.asked
    training.visit(0.0)
    assert training.stream.asked - before <= AT_ONCE + 1


def test_nothing_is_marked_or_asked_while_a_graph_is_captured() -> None:
    training = Training()
    training.visit(1 * MS)
    training.stream.capturing = True
    training.visit(50 * MS)
    assert training.stream.made == 2
    training.stream.capturing = False
    training.visit(0.0, over=True)
    assert training.gpu.stall_s == 1 * MS


def test_no_stall_is_longer_than_the_stay() -> None:
    """Another thread queued work on this stream between the two marks."""
    training = Training()
    mark = training.gpu.enter()
    training.stream.launch(100 * MS)
    training.clock.advance(1 * MS)
    training.gpu.leave(mark, 1 * MS, starting=False, over=False)
    training.end()
    assert training.gpu.stall_s == 1 * MS


@pytest.mark.parametrize("inside", [False, True])
def test_a_gpu_error_ends_only_the_stall_measurement(inside: bool) -> None:
    training = Training()
    training.visit(2 * MS)
    training.visit(1 * MS)
    mark = training.gpu.enter() if inside else None
    training.stream.broken = True
    training.gpu.leave(mark, 0.0, starting=False, over=False)
    for _ in range(3):
        training.visit(1 * MS)
    assert training.gpu.stall_s == 3 * MS
    assert training.stream.asked == 2


MARK_S = 12e-6


def run_for(training: Training, seconds: float, step: Step, every: int = 0, wait_s: float = 0.0) -> int:
    """Steps of a loop whose marks cost `MARK_S`; each ``every``-th waits ``wait_s``. Returns how many there were."""
    training.stream.mark_s = MARK_S
    number = 0
    while training.clock() < seconds:
        waits = every > 0 and number % every == every - 1
        training.step(step._replace(wait_s=wait_s) if waits else step, starting=number == 0, blocks=waits)
        number += 1
    training.end()
    return number


def test_marks_take_their_share_of_a_loop_with_short_steps() -> None:
    training = Training(SHARE)
    number = run_for(training, 2.0, Step(0.0001, 0.00005, host_s=0.001))
    assert 0.5 * SHARE < training.stream.recorded * MARK_S / 2.0 < 1.1 * SHARE
    assert training.stream.recorded * MARK_S / number < 15e-6
    assert training.gpu.stall_s == pytest.approx(sum(training.missed_s()), rel=0.2), "marks lengthen the stays"
    steps = training.gpu.steps
    assert steps.number == pytest.approx(number, rel=0.02)
    assert steps.mean_s == pytest.approx(0.00105, rel=0.02)


def test_every_visit_of_a_loop_with_long_steps_is_marked() -> None:
    training = Training(SHARE)
    number = run_for(training, 1.0, Step(0.001, 0.01, host_s=0.01))
    assert training.stream.recorded == 2 * (number + 1)


@pytest.mark.parametrize("every", [7, 50, 1000])
def test_a_rare_wait_is_a_stall_and_calls_without_wait_are_none(every: int) -> None:
    """Steps queue 1 ms as they end, so only what a wait of 20 ms lasts longer than that is a stall."""
    training = Training(SHARE)
    run_for(training, 1.5 if every < 1000 else 3.0, Step(0.0001, 0.001, host_s=0.001), every, wait_s=0.02)
    assert training.gpu.stall_s == pytest.approx(sum(training.missed_s()), rel=0.03)


def test_short_waits_of_every_visit_are_measured_at_their_share() -> None:
    training = Training(SHARE)
    number = run_for(training, 1.0, Step(0.0, 0.0002, host_s=0.0001), every=1, wait_s=0.0003)
    assert training.stream.recorded * MARK_S < 3 * 1.0 * SHARE
    assert training.stream.recorded < number
    assert training.gpu.stall_s == pytest.approx(sum(training.missed_s()), rel=0.15), "marks take a tenth of such waits"


def test_a_call_that_waits_twice_is_marked_at_its_first_wait() -> None:
    """For a worker, then for the thread that pins, as seen on an H100 where marks take long under a profiler."""
    training = Training(SHARE)
    training.stream.mark_s = 0.0003
    for number in range(100):
        entered = training.clock()
        mark = training.gpu.block(training.gpu.enter(starting=number == 0))
        training.clock.advance(0.0199)
        mark = training.gpu.block(mark)
        training.clock.advance(0.0001)
        training.gpu.leave(mark, training.clock() - entered, starting=number == 0, over=False)
        training.stays.append((entered, training.clock()))
        training.stream.launch(0.01)
    training.end()
    assert training.stream.recorded < 200, "some visits were skipped"
    assert training.gpu.stall_s == pytest.approx(sum(training.missed_s()[1:]), rel=0.05)


@given(st.lists(st.tuples(steps, st.booleans()), min_size=1, max_size=200))
def test_no_loop_stalls_longer_than_it_was_inside_next(loop: list[tuple[Step, bool]]) -> None:
    training = Training(SHARE)
    training.stream.mark_s = MARK_S
    before = 0.0
    for number, (step, blocks) in enumerate(loop):
        training.step(step._replace(wait_s=step.wait_s / 100), starting=number == 0, blocks=blocks)
        assert (training.gpu.stall_s or 0.0) >= before, "the sum never shrinks"
        before = training.gpu.stall_s or 0.0
    training.end()
    inside_s = sum(until - since for since, until in training.stays)
    assert 0.0 <= before <= (training.gpu.total_s or 0.0) <= inside_s + 1e-9


def test_a_pass_that_ends_with_skipped_visits_counts_them() -> None:
    training = Training(SHARE)
    training.stream.mark_s = 10 * MARK_S
    for number in range(10):
        training.visit(0.0001, starting=number == 0)
    made = training.stream.recorded
    training.visit(0.0001, over=True)
    assert training.stream.recorded == made, "the last visit was not marked"
    assert training.gpu.stall_s == pytest.approx(10 * 0.0001, rel=0.2)


@pytest.mark.parametrize(
    ("step", "took_ms"),
    [
        (Step(1 * MS, 20 * MS, host_s=2 * MS), 20),  # the loop runs ahead of the GPU
        (Step(30 * MS, 20 * MS, host_s=2 * MS), 22),  # the GPU starves: it has each step for itself
        (Step(1 * MS, 2 * MS, host_s=30 * MS), 32),  # launching is what takes long
    ],
)
def test_a_step_takes_what_the_slower_of_loop_and_gpu_takes(step: Step, took_ms: int) -> None:
    training = Training()
    for number in range(30):
        training.step(step, starting=number == 0)
        if step.host_s + step.kernel_s > step.wait_s and step.host_s > step.kernel_s:
            training.clock.advance(step.kernel_s)
    training.end()
    assert training.gpu.steps.number == 29
    assert training.gpu.steps.mean_s == pytest.approx(took_ms * MS, rel=0.07)


def test_what_lies_between_passes_is_no_step() -> None:
    training = Training()
    for _ in range(3):
        training.visit(1 * MS, starting=True)
        for _ in range(2):
            training.clock.advance(4 * MS)
            training.visit(1 * MS)
        training.visit(0.0, over=True)
        training.clock.advance(0.5)
    training.visit(0.0, over=True)
    assert training.gpu.steps.number == 8
    assert training.gpu.steps.seconds == 5 * 4 * MS


def test_an_evaluation_is_no_step_and_steps_that_become_slow_are() -> None:
    training = Training()
    for number in range(20):
        training.visit(1 * MS, starting=number == 0)
        training.clock.advance(4 * MS if number != 15 else 5.0)
    assert training.gpu.steps.mean_s == 4 * MS
    for _ in range(20):
        training.visit(1 * MS)
        training.clock.advance(2.0)
    training.end()
    assert training.gpu.steps.seconds > 30.0


@pytest.mark.parametrize("trouble", ["a graph is captured", "another stream"])
def test_marks_that_do_not_follow_each_other_make_no_step(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    training.visit(1 * MS)
    training.clock.advance(4 * MS)
    training.stream.capturing = trouble == "a graph is captured"
    training.visit(1 * MS)
    training.stream.capturing = False
    if trouble == "another stream":
        monkeypatch.setattr(training.stream, "share_stream", lambda first, second: False)
    training.clock.advance(4 * MS)
    for _ in range(2):
        training.visit(1 * MS)
    monkeypatch.undo()
    training.clock.advance(4 * MS)
    training.end()
    assert training.gpu.steps.seconds <= (4 + 4) * MS


class HostStream(Stream):
    """A stream on which nothing is queued: it misses all of every stay."""

    def __init__(self) -> None:
        super().__init__(time.perf_counter)  # type: ignore[arg-type]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[HostStream]:
    """One for each iterator that is made."""
    made: list[HostStream] = []

    def stall(share: float) -> GpuStall[Any]:
        made.append(HostStream())
        return GpuStall(made[-1], share)

    monkeypatch.setattr("dpex.engine.with_workers.cuda_stall", stall)
    return made


def test_an_idle_gpu_stalls_for_the_time_in_next(streams: list[HostStream]) -> None:
    with DpexDataLoader(Augmented(12, 0.002), num_workers=2, seeding="batch", autotune=AutotuneConfig()) as loader:
        iterator = iter(loader)
        for _ in iterator:
            pass
        engine = engine_of(iterator)
        stats = loader.stats()
        gpu = engine._plan.gpu
        assert stats.gpu_stall_s == gpu.stall_s == engine.reading().gpu_running_stall_s
        assert len(streams) == 1
        assert 0 < gpu.stall_s < stats.wait_s - stats.first_batch_s + 1e-9
        assert 0 < gpu.start_s < stats.first_batch_s + 1e-9


def test_a_visit_that_raises_is_left_too(streams: list[HostStream]) -> None:
    class Bad(Augmented):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise ValueError("bad sample")

    with DpexDataLoader(Bad(12), num_workers=1, seeding="batch", autotune=AutotuneConfig()) as loader:
        iterator = iter(loader)
        for _ in range(3):
            with pytest.raises(ValueError, match="bad sample"):
                next(iterator)
        kept = 2 * len(gpu_of(iterator)._pending) + 1  # and the latest return that was read
        assert len(streams[0].idle) + kept == streams[0].made


def test_cuda_is_not_initialised_by_being_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch believes it was built with CUDA, and nobody has used it."""
    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: True)
    monkeypatch.setattr("torch.cuda._lazy_init", lambda: pytest.fail("CUDA was initialised"))
    gpu = cuda_stall()
    assert gpu is not None
    assert gpu.enter() is None
    gpu.leave(None, 1.0, starting=False, over=True)
    assert gpu.stall_s is None


class FakeEvent:
    """Knows what it was recorded on."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.streams: list[SimpleNamespace] = []

    def record(self, stream: SimpleNamespace) -> None:
        self.streams.append(stream)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1500.0


class FakeCuda:
    """What `CudaEvents` asks torch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, used: set[int]) -> None:
        self.used, self.device = used, 0
        self.streams = {device: SimpleNamespace(device_index=device) for device in range(3)}
        monkeypatch.setattr("torch.cuda.Event", FakeEvent)
        monkeypatch.setattr("torch.cuda.current_stream", lambda device: self.streams[device])
        monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
        monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
        monkeypatch.setattr("torch.cuda.current_device", lambda: self.device)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
        monkeypatch.setattr("torch._C._cuda_hasPrimaryContext", lambda device: device in self.used, raising=False)


def test_events_stay_on_their_device_and_a_visit_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, events = FakeCuda(monkeypatch, {0, 1}), CudaEvents()
    mine = cuda.streams[0]
    assert events.is_open()
    first = events.record()
    cuda.streams[0] = other = SimpleNamespace(device_index=0)
    second = events.record(like=first)
    assert first.event.streams == second.event.streams == [mine]
    assert events.is_passed(second)
    assert events.apart_s(first, second) == 1.5
    assert events.share_stream(first, second)
    events.reuse(first)
    events.reuse(second)
    assert events.record().event.streams == [mine, other]
    cuda.device = 1
    assert events.is_open()
    elsewhere = events.record()
    assert elsewhere.event.streams == [cuda.streams[1]]
    assert not events.share_stream(first, elsewhere)


@pytest.mark.parametrize(
    ("used", "current", "marked"),
    [({0}, 0, 0), ({1}, 1, 1), ({1}, 0, 1), ({1, 2}, 2, 2), ({1, 2}, 0, None), (set(), 0, None)],
)
def test_no_event_is_made_on_a_device_that_nobody_uses(
    monkeypatch: pytest.MonkeyPatch, used: set[int], current: int, marked: int | None
) -> None:
    cuda, events = FakeCuda(monkeypatch, used), CudaEvents()
    cuda.device = current
    assert events.is_open() == (marked is not None)
    if marked is not None:
        assert events.record().stream is cuda.streams[marked]

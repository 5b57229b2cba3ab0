"""The thread that pins: the batches stay what they were, it goes no further than it may, and it always ends.

`parity.test_pinning` compares errors, timeouts and the device with torch's.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerator import Accelerator, pretended
from families import Augmented, assert_same, kill, seeded, stacked, worker_pids
from torch.utils.data import IterableDataset, get_worker_info
from torch_features import HAS_ACCELERATOR
from trainers import Forker
from waiting import ManualClock, until

import dpex.device.pinning
import dpex.engine.delivery
import dpex.engine.engine
from dpex import DpexDataLoader, WorkerDiedError
from dpex.device.feed import MOST, USUAL
from dpex.device.pinning import Pinner, _Job
from dpex.options import WorkerConfig
from dpex.schedule.schedule import Schedule

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")]
THREAD = "dpex-pin"


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    before = set(pin_threads())
    yield from pretended(monkeypatch)
    assert set(pin_threads()) <= before  # those that a failed test has left are not this one's


def pin_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def pinning(dataset: Any, workers: int = 2, **options: Any) -> DpexDataLoader[Any]:
    options = {"pin_memory": True, "generator": seeded(), **options}
    return DpexDataLoader(dataset, num_workers=workers, **options)


class Halves(IterableDataset[torch.Tensor]):
    """Worker k yields 100 k, 100 k + 1, ..., each with a random number."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        worker = info.id if info else 0
        for k in range(7 + 4 * worker):
            yield torch.tensor([100.0 * worker + k, random.random()])


# -- the same batches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Augmented(40), {"seeding": "batch"}),
        (Augmented(40, extra=2000), {"seeding": "batch", "worker_config": WorkerConfig(memory_budget=100_000)}),
        (Augmented(40, extra=2000), {"seeding": "worker", "worker_config": WorkerConfig(memory_budget=100_000)}),
        (Halves(), {"seeding": "batch", "persistent_workers": True}),
    ],
    ids=["small", "large", "large of logical workers", "stream"],
)
def test_same_batches_in_the_same_order(accelerator: Accelerator, dataset: Any, options: dict[str, Any]) -> None:
    """`parity.test_pinning` compares with torch's, under seeding="worker"."""
    runs = []
    for pin in (True, False):
        with pinning(dataset, batch_size=3, pin_memory=pin, **options) as loader:
            batches = [batch for _ in range(2) for batch in loader]
        runs.append(stacked(batches))
        assert {getattr(batch, "pinned_in", None) for batch in batches} == {THREAD if pin else None}
    assert_same(*runs)


def test_without_workers_the_consumer_pins_and_errors_come_as_they_are(accelerator: Accelerator) -> None:
    iterator = iter(pinning(Augmented(3), 0, seeding="batch"))
    assert next(iterator).pinned_in == threading.current_thread().name
    accelerator.before = _refuse
    with pytest.raises(ValueError, match=r"^refused$"):
        next(iterator)
    assert pin_threads() == []


def _refuse(_: Any) -> None:
    raise ValueError("refused")


RESIZES: dict[int, dict[str, int]] = {3: {"local": 4}, 8: {"prefetch": 1}, 20: {"local": 1}, 26: {"prefetch": 12}}


def test_resized_in_the_middle_of_an_epoch(accelerator: Accelerator) -> None:
    """The trainer's own random numbers are left alone, too."""
    runs = []
    for steps, workers in ((RESIZES, 2), ({}, 0)):
        loader = pinning(Augmented(150), workers, batch_size=4, seeding="batch", shuffle=True)
        rows, own = [], []
        torch.manual_seed(3)
        for number, batch in enumerate(loader):
            rows.append(batch)
            own.append(torch.rand(()))
            if number in steps:
                loader.resize(**steps[number])
        assert len(rows) == 38
        runs.append((stacked(rows), torch.stack(own)))
    assert_same(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


def test_a_killed_worker_s_warning_points_at_the_user_s_line(accelerator: Accelerator) -> None:
    iterator = iter(pinning(Augmented(60, 0.001), batch_size=2, seeding="batch"))
    next(iterator)
    kill(worker_pids(iterator, 2)[0])
    with pytest.warns(RuntimeWarning, match="The epoch goes on") as said:
        rest = stacked(iterator)
    assert rest[:, 0].tolist() == list(range(2, 60))
    assert {Path(warning.filename).name for warning in said} & {Path(__file__).name, "families.py"}


@pytest.mark.smoke
def test_persistent_workers_keep_one_thread_over_broken_off_epochs(accelerator: Accelerator) -> None:
    runs = []
    for pin in (True, False):
        with pinning(Augmented(50), pin_memory=pin, persistent_workers=True, shuffle=True) as loader:
            threads, rows = set(), []
            for most in (50, 1, 7, 50):
                for _, batch in zip(range(most), loader, strict=False):
                    rows.append(batch)
                    threads.update(pin_threads())
        assert len(threads) == pin
        runs.append(stacked(rows))
    assert_same(*runs)


# -- how far ahead -----------------------------------------------------------------------------------------------------


def collected(iterator: Any, count: int) -> None:
    """Let the engine take in what workers have made, until ``count`` batches are ready."""

    def enough() -> bool:
        with iterator._engine._lock:
            iterator._engine._collect()
        return bool(iterator._engine.schedule.ready >= count)

    until(enough)


LARGE = {"extra": 300_000}
"""Makes samples of more than a megabyte."""


def test_it_pins_ahead_of_the_consumer_but_not_far(accelerator: Accelerator) -> None:
    """Also what is made while the consumer is away."""
    iterator: Any = iter(pinning(Augmented(20, **LARGE), 1, prefetch_factor=8))
    next(iterator)
    for delivered in range(1, 5):
        until(lambda: accelerator.pinned == delivered + USUAL)  # noqa: B023
        collected(iterator, 8)
        assert accelerator.pinned == delivered + USUAL
        assert iterator._engine.stats().ready == 8  # nothing more was drawn for those that are pinned
        next(iterator)


def test_of_small_batches_it_pins_several_each_time_it_is_woken(accelerator: Accelerator) -> None:
    """It sleeps while more than half of what it may hold is left, however many batches are made."""
    pinner, schedule, listened = Pinner("cuda"), Schedule(prefetch=40), []

    def listen() -> list[int]:
        pinner.hand_over(schedule, pinner.ahead)
        listened.append(len(pinner._stock))
        return []

    for number in range(40):
        schedule.draw(number)
    for ticket in schedule.take(40):
        schedule.done(ticket.number, partial(torch.tensor, ticket.number), 1, 16_000)
    pinner.start(listen)
    until(lambda: listened == [USUAL, MOST, MOST])  # the size of batches is known from the first on
    del listened[:]
    taken = []
    for left in (MOST - 1, MOST - 2, MOST - 3, MOST // 2):
        assert listened == []
        job = pinner.first(schedule)
        assert schedule.pop()
        assert job is not None
        taken.append(int(job()))
        assert left in (len(pinner._stock), MOST // 2)
    until(lambda: listened == [MOST, MOST])
    assert (taken, accelerator.pinned) == ([0, 1, 2, 3], MOST + 4)
    pinner.close(nothing)


def test_the_thread_keeps_no_batch(accelerator: Accelerator) -> None:
    iterator = iter(pinning(Augmented(4), 1))
    seen: list[weakref.ref[Any]] = []
    accelerator.before = lambda batch: seen.append(weakref.ref(batch))
    batch = next(iterator)
    pinned = weakref.ref(batch)
    del batch
    assert pinned() is None
    until(lambda: all(ref() is None for ref in seen))


class WatchedClock(ManualClock):
    """Tells when the consumer looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def __call__(self) -> float:
        if threading.current_thread() is threading.main_thread():
            self.asked.set()
        return super().__call__()


def test_stats_tell_the_consumer_s_wait_not_the_thread_s(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, returned = WatchedClock(), threading.Event()

    def pin(batch: torch.Tensor) -> None:
        """The first batch takes 100 s while the consumer waits; the others take 100 s each while it works."""
        _opened(returned if batch[0, 0] else clock.asked)
        clock.advance(100)

    accelerator.before = pin
    iterator: Any = iter(pinning(Augmented(20, **LARGE), 1, prefetch_factor=8))
    for module in (dpex.engine.engine, dpex.engine.delivery, dpex.device.pinning):
        monkeypatch.setattr(module, "monotonic", clock)
    next(iterator)
    returned.set()
    until(lambda: accelerator.pinned == 1 + USUAL)
    accelerator.before = lambda batch: None
    next(iterator)
    stats = iterator._engine.stats()
    assert (stats.batches, stats.first_batch_s, stats.wait_s, stats.work_s) == (2, 100, 100, 100 * USUAL)


# -- interruptions -----------------------------------------------------------------------------------------------------


def _opened(gate: threading.Event) -> None:
    assert gate.wait(60.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_is_told(accelerator: Accelerator) -> None:
    """As with torch, for good: nothing is skipped, and there is no end to mistake it for."""

    def die(batch: torch.Tensor) -> None:
        if batch[0, 0] == 2:
            raise SystemExit

    accelerator.before = die
    iterator = iter(pinning(Augmented(6)))
    assert [int(next(iterator)[0, 0]) for _ in range(2)] == [0, 1]
    for _ in range(3):
        with pytest.raises(WorkerDiedError, match=r"^Pin memory thread exited unexpectedly$"):
            next(iterator)


def test_ctrl_c_interrupts_the_wait_and_loses_nothing(accelerator: Accelerator) -> None:
    gate, consumer = threading.Event(), threading.get_ident()

    def pin(_: Any) -> None:
        if not gate.is_set():
            signal.pthread_kill(consumer, signal.SIGINT)
            gate.wait(60.0)

    accelerator.before = pin
    iterator = iter(pinning(Augmented(6)))
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    gate.set()
    assert stacked(iterator)[:, 0].tolist() == list(range(6))


class Interrupted:
    """A payload that Ctrl-C strikes the first time it is read."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise KeyboardInterrupt
        return torch.tensor(3)


def nothing() -> Any:
    return []


def with_one_batch(payload: Callable[[], Any]) -> Schedule:
    schedule = Schedule(prefetch=1)
    schedule.draw(0)
    schedule.take(1)
    schedule.done(0, payload)
    return schedule


def test_a_batch_whose_reading_was_interrupted_is_read_again_and_then_never_more(accelerator: Accelerator) -> None:
    """Once it was read, the memory it lay in may be another batch's."""
    payload = Interrupted()
    pinner, schedule = Pinner("cuda"), with_one_batch(payload)
    pinner.start(nothing)
    with pytest.raises(KeyboardInterrupt):
        pinner.first(schedule)
    job = pinner.first(schedule)
    assert job is not None
    assert pinner.wait(job, float("inf"))
    job.open()
    assert int(job()) == 3
    assert payload.calls == 2
    pinner.close(nothing)


def test_a_job_that_was_queued_twice_is_pinned_once() -> None:
    pinned: list[int] = []
    job = _Job(lambda: 7)
    job.open()
    for _ in range(2):
        job.run(lambda value: pinned.append(value) or value, "")
    assert (job(), pinned) == (7, [7])


def test_a_batch_that_cannot_be_read_fails_in_its_place() -> None:
    job = _Job(lambda: [][1])
    job.open()
    job.run(pytest.fail, "")
    with pytest.raises(IndexError):
        job()


# -- ends --------------------------------------------------------------------------------------------------------------


def _exhausted() -> None:
    loader = pinning(Augmented(9))
    list(loader)
    assert pin_threads() == []
    del loader


def _broken_off() -> None:
    for _ in pinning(Augmented(90)):
        break


def _closed() -> None:
    loader = pinning(Augmented(90))
    iterator = iter(loader)
    next(iterator)
    loader.close()
    assert pin_threads() == []
    loader.close()
    with pytest.raises(RuntimeError, match="this iterator was closed"):
        next(iterator)


def _persistent() -> None:
    loader = pinning(Augmented(9), persistent_workers=True)
    list(loader)
    next(iter(loader))
    assert len(pin_threads()) == 1


def _training_fails() -> None:
    def train() -> None:
        for _ in pinning(Augmented(90)):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


def _sampler_fails_at_once() -> None:
    def indices() -> Iterator[int]:
        raise LookupError
        yield 0

    with pytest.raises(LookupError):
        iter(pinning(Augmented(90), sampler=indices()))


@pytest.mark.smoke
@pytest.mark.parametrize(
    "way", [_exhausted, _broken_off, _closed, _persistent, _training_fails, _sampler_fails_at_once]
)
def test_no_thread_is_left(accelerator: Accelerator, way: Callable[[], None]) -> None:
    way()
    assert pin_threads() == []


def test_no_thread_is_left_when_it_still_had_work(accelerator: Accelerator) -> None:
    """What was handed over is not pinned any more once the iterator is closed."""
    gate = threading.Event()
    iterator = iter(pinning(Augmented(20, **LARGE), 1, prefetch_factor=8))
    collected(iterator, 8)
    next(iterator)
    until(lambda: accelerator.pinned == 1 + USUAL)
    accelerator.before = lambda batch: _opened(gate)
    next(iterator)  # one more is handed over, and waits at the gate
    closing = threading.Thread(target=iterator._shutdown_workers)
    closing.start()
    gate.set()
    closing.join(60.0)
    assert pin_threads() == []


def test_waiting_for_a_closed_thread_is_an_error_not_a_hang(accelerator: Accelerator) -> None:
    pinner = Pinner("cuda")
    pinner.start(nothing)
    began, gate = threading.Event(), threading.Event()
    accelerator.before = lambda batch: began.set() or _opened(gate)
    first, second = (pinner.first(with_one_batch(nothing)) for _ in range(2))
    assert first is not None
    assert second is not None
    _opened(began)
    acts: list[str] = []
    closing = threading.Thread(target=lambda: pinner.close(lambda: acts.append("last")))
    closing.start()
    until(lambda: pinner._closed)
    gate.set()
    assert pinner.wait(first, float("inf"))
    with pytest.raises(RuntimeError, match="this iterator was closed"):
        pinner.wait(second, float("inf"))
    closing.join(60.0)
    pinner.close(lambda: acts.append("again"))
    assert acts == ["last"]


def test_an_iterator_in_a_cycle_may_be_collected_by_the_thread_itself(accelerator: Accelerator) -> None:
    """The finalizer then runs there, where it must not wait for itself."""
    gate = threading.Event()
    iterator: Any = iter(pinning(Augmented(20), 1, prefetch_factor=8))

    def pin(_: Any) -> None:
        if accelerator.pinned:
            _opened(gate)
            iterator._finalizer()

    accelerator.before = pin
    collected(iterator, 8)
    next(iterator)
    gate.set()
    until(lambda: pin_threads() == [])
    assert iterator._engine.closed


def test_a_forked_trainer(accelerator: Accelerator) -> None:
    """The child has no such thread: it can drop the iterator, and start anew; the parent does not notice."""
    iterator = iter(pinning(Augmented(30), batch_size=2))
    first = next(iterator)
    child = os.fork()
    if not child:
        code = 1
        try:
            del iterator
            code = 0 if stacked(pinning(Augmented(6)))[:, 0].tolist() == list(range(6)) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert stacked([first, *iterator])[:, 0].tolist() == list(range(30))


PREAMBLE = """
from accelerator import pretended
def begin(**options):
    global loader, iterator
    loader = DpexDataLoader(Augmented(400), num_workers=2, pin_memory=True, **options)
    iterator = iter(loader)
    return next(iterator)
"""
PRETEND = "import pytest; accelerator = next(made := pretended(pytest.MonkeyPatch()))"
EXITS = {
    "iterator alive": "batch = begin()",
    "persistent": "begin(persistent_workers=True)",
    "in a cycle": "begin(); loader.own = [loader, iterator]",
    "sys.exit": "begin(); sys.exit(0)",
    "busy": "accelerator.before = lambda batch: sum(range(100_000)); begin()",
}


def test_the_interpreter_ends_without_a_word(tmp_path: Path) -> None:
    with closing(Forker(tmp_path, PREAMBLE)) as forker:
        ended = {how: forker.run(f"{PRETEND}\n{body}") for how, body in EXITS.items()}
    assert ended == dict.fromkeys(EXITS, (0, "", ""))


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_torch_without_a_common_name_for_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.4 and 2.5, where the device's type may also be empty."""
    current: list[int] = []
    monkeypatch.delattr(torch, "accelerator", raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for device in ("", None, "cuda", "cuda:1"):
        pinner = Pinner(device)
        pinner.start(nothing)
        pinner.close(nothing)
    assert current == [3, 3, 3, 3]


def test_without_an_accelerator_there_is_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator if HAS_ACCELERATOR else torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="no accelerator is found") if HAS_ACCELERATOR else nullcontext():
        iterator = iter(pinning(Augmented(3)))
    assert pin_threads() == []
    assert len(list(iterator)) == 3


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_upcoming_is_what_pop_then_gives(in_order: bool, seed: int) -> None:
    choose = random.Random(seed)
    schedule = Schedule(prefetch=12, queues=3, in_order=in_order)
    for index in range(12):
        schedule.draw(index)
    for queue in range(3):
        schedule.take(12, queue)
    for number in choose.sample(range(12), 8):
        schedule.done(number, None)
    if choose.random() < 0.5:
        schedule.end_queue(1)
    for most in range(5):
        assert len(schedule.upcoming(most)) <= most
    promised = schedule.upcoming(99)
    for delivery in promised:
        schedule.replace(delivery.number, "new")
    assert [schedule.pop() for _ in promised] == [delivery._replace(payload="new") for delivery in promised]
    assert schedule.pop() is None

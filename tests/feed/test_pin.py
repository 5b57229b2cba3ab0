"""The thread that pins: the batches stay what they were, it goes no further than it may, and it always ends.

`parity.test_pinning` compares errors, timeouts and the device with torch's, and `test_leftovers` has all ways to end.
"""

import random
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerator import Accelerator, pretended
from families import Augmented, assert_same, kill, seeded, stacked, worker_pids
from forks import in_a_child
from inspection import collect, engine_of, finalize, shut_down
from torch_features import HAS_ACCELERATOR
from waiting import ManualClock, until

import dpex.device.pinning
import dpex.engine.delivery
import dpex.engine.engine
from dpex import DpexDataLoader, WorkerDiedError
from dpex.device.feed import USUAL
from dpex.device.pinning import Pinner
from dpex.options import WorkerConfig
from dpex.schedule.schedule import Schedule

THREAD = "dpex-pin"


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    before = set(pin_threads())
    yield from pretended(monkeypatch)
    until(lambda: set(pin_threads()) <= before)  # those that a failed test has left are not this one's


def pin_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def pinning(dataset: Any, workers: int = 2, **options: Any) -> DpexDataLoader[Any]:
    options = {"pin_memory": True, "generator": seeded(), **options}
    return DpexDataLoader(dataset, num_workers=workers, **options)


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Augmented(40), {"seeding": "batch"}),
        (Augmented(40, extra=2000), {"seeding": "batch", "worker_config": WorkerConfig(memory_budget=100_000)}),
        (Augmented(40, extra=2000), {"seeding": "worker", "worker_config": WorkerConfig(memory_budget=100_000)}),
    ],
    ids=["small", "large", "large of logical workers"],
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


def test_the_training_thread_pins_inline_and_raises_its_errors(accelerator: Accelerator) -> None:
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
    with pytest.warns(RuntimeWarning, match="Training continues") as said:
        rest = stacked(iterator)
    assert rest[:, 0].tolist() == list(range(2, 60))
    assert {Path(warning.filename).name for warning in said} & {Path(__file__).name, "families.py"}


def collected(iterator: Any, count: int) -> None:
    """Let the engine take in what workers have made, until ``count`` batches are ready."""

    until(lambda: collect(iterator) >= count)


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
        assert engine_of(iterator).stats().ready == 8  # nothing more was drawn for those that are pinned
        next(iterator)


@pytest.mark.smoke
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
    engine = [module for name, module in sys.modules.items() if name.startswith("dpex.engine.")]
    for module in (*(one for one in engine if hasattr(one, "monotonic")), dpex.device.pinning):
        monkeypatch.setattr(module, "monotonic", clock)
    next(iterator)
    returned.set()
    until(lambda: accelerator.pinned == 1 + USUAL)
    accelerator.before = lambda batch: None
    next(iterator)
    stats = engine_of(iterator).stats()
    assert (stats.batches, stats.first_batch_s, stats.work_s) == (2, 100, 100 * USUAL)
    assert stats.wait_s == pytest.approx(100, abs=50)  # with iter(), which was before this clock


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
            until(lambda: engine._tally.blocked_at and not engine._is_changing)  # the consumer waits
            signal.pthread_kill(consumer, signal.SIGINT)
            gate.wait(60.0)

    accelerator.before = pin
    iterator = iter(pinning(Augmented(6)))
    engine = engine_of(iterator)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    gate.set()
    assert stacked(iterator)[:, 0].tolist() == list(range(6))


def nothing() -> Any:
    return []


def with_one_batch(payload: Callable[[], Any]) -> Schedule:
    schedule = Schedule(prefetch=1)
    schedule.draw(0)
    schedule.issue_tickets(1)
    schedule.accept_result(0, payload)
    return schedule


def test_no_thread_is_left_when_it_still_had_work(accelerator: Accelerator) -> None:
    """What was handed over is not pinned any more once the iterator is closed."""
    gate = threading.Event()
    iterator = iter(pinning(Augmented(20, **LARGE), 1, prefetch_factor=8))
    collected(iterator, 8)
    next(iterator)
    until(lambda: accelerator.pinned == 1 + USUAL)
    accelerator.before = lambda batch: _opened(gate)
    next(iterator)  # one more is handed over, and waits at the gate
    closing = threading.Thread(target=shut_down, args=[iterator])
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
    with pytest.raises(RuntimeError, match=r"this iterator was closed: call iter\(loader\)"):
        pinner.wait(second, float("inf"))
    closing.join(60.0)
    pinner.close(lambda: acts.append("again"))
    assert acts == ["last"]


def test_the_pin_thread_may_collect_an_iterator_in_a_cycle(accelerator: Accelerator) -> None:
    """The finalizer then runs there, where it must not wait for itself."""
    gate = threading.Event()
    iterator: Any = iter(pinning(Augmented(20), 1, prefetch_factor=8))

    def pin(_: Any) -> None:
        if accelerator.pinned:
            _opened(gate)
            finalize(iterator)

    accelerator.before = pin
    collected(iterator, 8)
    next(iterator)
    gate.set()
    until(lambda: pin_threads() == [])
    assert engine_of(iterator).closed


def test_a_forked_trainer(accelerator: Accelerator) -> None:
    """The child has no such thread: it can drop the iterator, and start anew; the parent does not notice."""
    iterator: Any = iter(pinning(Augmented(30), batch_size=2))
    first = next(iterator)

    def start_anew() -> None:
        nonlocal iterator
        iterator = None
        assert stacked(pinning(Augmented(6)))[:, 0].tolist() == list(range(6))

    in_a_child(start_anew)
    assert stacked([first, *iterator])[:, 0].tolist() == list(range(30))


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
        schedule.issue_tickets(12, queue)
    for number in choose.sample(range(12), 8):
        schedule.accept_result(number, None)
    if choose.random() < 0.5:
        schedule.end_queue(1)
    for most in range(5):
        assert len(schedule.upcoming(most)) <= most
    promised = schedule.upcoming(99)
    for delivery in promised:
        schedule.replace(delivery.number, "new")
    assert [schedule.pop() for _ in promised] == [delivery._replace(payload="new") for delivery in promised]
    assert schedule.pop() is None

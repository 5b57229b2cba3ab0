"""The engine with a pool that makes nothing by itself: what it asks for, drops, counts and raises."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_pool import FakePool

from dpex.engine.delivery import ERRORS
from dpex.engine.draws import Draws
from dpex.engine.engine import Engine
from dpex.engine.plan import EnginePlan
from dpex.engine.snapshots import EngineView
from dpex.errors import BatchTimeoutError, ClusterError, WorkerDiedError
from dpex.measure.settings import REMOTE, Settings
from dpex.schedule.events import TicketMade, WorkerGone


def taken(engine: Engine) -> Any:
    """The next batch; an error in its place is raised."""
    value = engine.next()
    engine.schedule.in_hand.clear()
    if type(value) in ERRORS:
        raise getattr(value, "error", value)
    return value


def draws_of(indices: Sequence[int]) -> Draws:
    return Draws(indices, None, iter(indices), copies=False, is_stream=False)


def engine_on(pool: FakePool, prefetch: int = 4, remote: int = 0, **changes: Any) -> Engine:
    plan = {
        "logicals": 0,
        "iterable": False,
        "in_order": True,
        "timeout_s": 5.0,
        "may_group": False,
        "memory_budget": None,
        "make_pool": lambda name, count: pool,
    }
    return Engine(EnginePlan(**plan | changes), Settings(local=2, remote=remote, prefetch=prefetch))


def pool_of_two(**options: Any) -> FakePool:
    """Return a pool whose workers make nothing by themselves."""
    pool = FakePool(**options)
    pool.resize(2)
    pool.start()
    pool.poll().clear()
    return pool


def test_pools_end_if_a_later_one_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that, workers and memory stay until the process ends: nobody has an engine to close."""
    pool, closed, descriptors = FakePool(), [], len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(pool, "close", closed.append)

    def make_pool(name: str, count: int) -> FakePool:
        if name == REMOTE:
            raise ClusterError("nobody answers")
        return pool

    with pytest.raises(ClusterError, match="nobody answers"):
        engine_on(pool, remote=2, make_pool=make_pool)
    assert closed == [0.0]
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


@pytest.fixture
def pool() -> FakePool:
    return pool_of_two()


@pytest.fixture
def engine(pool: FakePool) -> Iterator[Engine]:
    made = engine_on(pool)
    made.begin_epoch(draws_of(range(20)))
    yield made
    made.close()


def says_made(pool: FakePool, number: int, value: Callable[[], Any], epoch: int = 0) -> None:
    """Let the result of a ticket arrive with the next `poll`."""
    pool.poll().append(TicketMade(epoch, number, 0, value))


def numbers_sent(pool: FakePool) -> list[int]:
    """Return the numbers of all tickets in the order of their messages."""
    boxes = [pool._queue, *(worker.inbox for worker in pool._workers.values())]
    return [ticket.number for box in boxes for message in box for ticket in message.tickets]


def decoded(log: list[int], number: int) -> Callable[[], str]:
    def value() -> str:
        log.append(number)
        return f"batch {number}"

    return value


def test_a_new_epoch_decodes_undelivered_batches_to_free_memory(engine: Engine, pool: FakePool) -> None:
    """Also what waits behind a batch that is not made yet. Decoding is what gives slots their taker, who lets go."""
    log: list[int] = []
    for number in (0, 1, 3):
        says_made(pool, number, decoded(log, number))
    taken(engine)
    assert log == [0]
    engine.begin_epoch(draws_of(range(20)))
    assert sorted(log) == [0, 1, 3]
    assert engine.schedule.ready == 0


def test_an_undecodable_undelivered_batch_blocks_no_new_epoch(engine: Engine, pool: FakePool) -> None:
    log: list[int] = []
    says_made(pool, 0, decoded(log, 0))
    says_made(pool, 1, lambda: 1 // 0)
    says_made(pool, 2, decoded(log, 2))
    taken(engine)
    engine.begin_epoch(draws_of(range(20)))
    assert log == [0, 2]


def test_a_batch_that_was_made_twice_is_decoded_and_dropped(engine: Engine, pool: FakePool) -> None:
    log: list[int] = []
    for number in (0, 0, 1):
        says_made(pool, number, decoded(log, number))
    assert taken(engine) == "batch 0"
    assert log == [0, 0]
    assert taken(engine) == "batch 1"


def test_results_of_an_earlier_epoch_are_not_delivered(engine: Engine, pool: FakePool) -> None:
    engine.begin_epoch(draws_of(range(20)))
    says_made(pool, 0, lambda: "old", epoch=0)
    says_made(pool, 0, lambda: "new", epoch=1)
    assert taken(engine) == "new"


@pytest.mark.parametrize(("lanes", "idle_ratio"), [(1, 0.0), (2, 0.25), (4, 0.625)])
def test_free_lanes_of_workers_count_as_idle(
    pool: FakePool, monkeypatch: pytest.MonkeyPatch, lanes: int, idle_ratio: float
) -> None:
    """Two workers hold the last three batches of a pass."""
    monkeypatch.setattr(pool, "at_work", lambda: 2)
    engine = engine_on(pool, lanes=lanes)
    engine.begin_epoch(draws_of(range(3)))
    assert engine.read_ahead() is not None
    assert engine._tally.idle_ratio == idle_ratio
    engine.close()


def errors(engine: Engine) -> dict[str, int]:
    return dict(engine.reading().errors)


@pytest.mark.filterwarnings("ignore:it was killed:RuntimeWarning")
def test_a_batch_that_kills_its_workers_counts_as_worker_error(engine: Engine, pool: FakePool) -> None:
    for _ in range(engine.schedule.max_tries):
        pool.poll().append(WorkerGone("local", 0, 0, (0,), 0, False, "it was killed", 4711))
        says_made(pool, 1, lambda: "batch 1")
        engine._collect()
    with pytest.raises(WorkerDiedError, match="Batch 0"):
        taken(engine)
    assert errors(engine) == {"worker": 1}
    assert taken(engine) == "batch 1"
    assert errors(engine) == {"worker": 1}


def test_workers_that_cannot_be_had_are_an_error_of_kind_worker(engine: Engine, pool: FakePool) -> None:
    pool.failed, pool.counts.running = "no worker can be started", 0
    for times in (1, 2):
        with pytest.raises(WorkerDiedError, match="no worker can be started"):
            taken(engine)
        assert errors(engine) == {"worker": times}


def test_a_timeout_is_an_error_of_its_own_kind(pool: FakePool) -> None:
    engine = engine_on(pool, timeout_s=0.01)
    engine.begin_epoch(draws_of(range(20)))
    with pytest.raises(BatchTimeoutError, match=r"timed out after 0\.01 seconds"):
        taken(engine)
    assert errors(engine) == {"timeout": 1}
    engine.close()


@pytest.mark.parametrize("logicals", [0, 2])
def test_an_incomplete_message_is_not_rechecked_for_each_batch(monkeypatch: pytest.MonkeyPatch, logicals: int) -> None:
    """It goes once it is complete, or nothing is ready any more."""
    pool = pool_of_two(shared=not logicals)
    engine = engine_on(pool, logicals=logicals, prefetch=8)
    engine.begin_epoch(draws_of(range(40)))
    for number in range(8):
        says_made(pool, number, decoded([], number))
    assert taken(engine) == "batch 0"
    engine.state.rules.group = 3
    engine._collected_at = math.inf
    issue, asked = engine.state.issue, 0

    def counting(*arguments: Any, **options: Any) -> None:
        nonlocal asked
        asked += 1
        issue(*arguments, **options)

    monkeypatch.setattr(engine.state, "issue", counting)
    for number in range(1, 6):
        assert taken(engine) == f"batch {number}"
    assert asked == 1  # when there was room for 3
    assert engine.state.placement.dirty == engine.state.placement.incomplete == ({0, 1} if logicals else {0})
    assert [taken(engine), taken(engine)] == ["batch 6", "batch 7"]
    assert (sorted(numbers_sent(pool)), engine.state.placement.dirty) == (list(range(15)), set())
    engine.close()


def test_a_pass_with_workers_keeps_at_least_one(engine: Engine) -> None:
    """Batches in flight would never be made, and ``next()`` would wait for ever."""
    for ask in (engine.resize, engine.request):
        with pytest.raises(ValueError, match="local=0, remote=0: an epoch with workers needs at least one"):
            ask(Settings())
    engine.request(Settings(local=1))


def test_no_request_is_lost_whenever_it_comes(engine: Engine) -> None:
    """A request comes at each line of the function that carries out another one."""
    latest = Settings(local=2, prefetch=4)

    def at_each_line(frame: Any, event: str, argument: Any) -> Any:
        nonlocal latest
        if frame.f_code is Engine._grant.__code__ and event == "line" and frame.f_lineno not in lines:
            lines.add(frame.f_lineno)
            latest = Settings(local=2, prefetch=10 + len(lines))
            engine.request(latest)
        return at_each_line

    lines: set[int] = set()
    before = sys.gettrace()
    sys.settrace(at_each_line)
    try:
        engine.request(latest)
        while engine.report().resizing:
            engine.read_ahead()
    finally:
        sys.settrace(before)
    assert len(lines) > 5
    assert engine.reading().settings == latest


def test_stats_may_be_read_while_a_pool_joins(engine: Engine, pool: FakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    read = EngineView._pool

    def joined(self: EngineView, one: Any) -> Any:
        engine._pools.by_name["remote"] = pool
        return read(self, one)

    monkeypatch.setattr(EngineView, "_pool", joined)
    assert set(engine.stats().pools) == {"local"}
    assert set(engine.stats().pools) == {"local", "remote"}

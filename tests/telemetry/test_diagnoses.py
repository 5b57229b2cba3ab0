"""Diagnoses for the endpoint: which stretch they are about, how seldom they are made; on a clock moved by hand."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field, replace

import pytest

from dpex import DpexDataLoader
from dpex.diagnose.facts import Subject
from dpex.diagnose.source import DiagnosisSource
from dpex.engine.loader_counters import LoaderCounters, Page
from dpex.measure.sums import PoolStats, Sums
from dpex.measure.wait_causes import CAUSES, READ, STARTUP
from dpex.telemetry.exporter import exporter
from dpex.telemetry.http.diagnoses import KEPT_S, Diagnoses, Stretch, TimedDiagnosis, as_html, as_json
from dpex.telemetry.loader_metrics import LoaderMetrics
from tests.unit.measure.test_ledger import Engine


@dataclass
class World:
    """One loader that does what it is told to, and what diagnoses it."""

    now: float = 100.0
    ledgers: list[LoaderMetrics] = field(default_factory=lambda: [LoaderMetrics("a")])

    def __post_init__(self) -> None:
        self.engine = Engine(pools={"local": PoolStats(running=2)})
        self.book = LoaderCounters()
        self.book.open(self.engine)
        self.ledgers[0].case = DiagnosisSource(book=self.book, subject=Subject(dataset="Photos"))
        self.diagnoses = Diagnoses(lambda: self.ledgers, clock=lambda: self.now, wall=lambda: 1e9 + self.now)

    def seconds(self, count: int, *, wait_s: float, workers: int = 2, batches: int = 10, cause: int = READ) -> None:
        """So many seconds in which the loop waited for so much of each."""
        for _ in range(count):
            self.now += 1.0
            now = self.engine.now
            waits = {CAUSES[cause]: wait_s}
            pool = now.pools["local"]
            self.engine.now = replace(
                now,
                causes=now.plus(Sums(causes=waits)).causes,
                work_s=now.work_s + 1.0 - wait_s,
                batches=now.batches + batches,
                pools={"local": replace(pool, running=workers, tickets=pool.tickets + batches, load_s=pool.load_s + 1)},
            )
            self.diagnoses.mark()

    def told(self, stretch: Stretch = "recent") -> TimedDiagnosis:
        found = self.diagnoses.of("a", stretch)
        assert found is not None
        (one,) = found
        return one


@pytest.fixture
def world() -> World:
    return World()


def test_now_is_half_a_minute_and_the_run_all_of_it(world: World) -> None:
    world.seconds(60, wait_s=0.5)
    world.seconds(35, wait_s=0.0)
    recent, run = world.told(), world.told("run")
    assert (recent.diagnosis.verdict.cause, recent.is_whole) == ("consumer", False)
    assert 30 <= recent.diagnosis.facts.wall_s < 36
    assert (run.diagnosis.verdict.cause, run.is_whole) == ("storage", True)
    assert run.diagnosis.facts.batches == 950


def test_a_slow_loop_is_judged_over_as_long_as_it_takes(world: World) -> None:
    world.seconds(100, wait_s=0.5, batches=1)
    recent = world.told()
    assert 50 <= recent.diagnosis.facts.batches < 56
    assert recent.diagnosis.verdict.cause == "storage"


def test_before_enough_is_known_it_is_about_all_there_is(world: World) -> None:
    world.seconds(4, wait_s=0.5)
    assert (world.told().is_whole, world.told().diagnosis.verdict.cause) == (True, "too-early")
    assert world.told().as_data()["level"] == "early"
    world.now += KEPT_S
    world.seconds(10, wait_s=0.5)
    assert (world.told().is_whole, world.told().as_data()["level"]) == (True, "bad")


def test_it_begins_with_the_present_workers_where_others_were_at_it_before(world: World) -> None:
    world.seconds(60, wait_s=0.5)
    world.seconds(17, wait_s=0.0, workers=6)
    assert 10 <= world.told().diagnosis.facts.wall_s <= 17
    assert world.told().diagnosis.verdict.cause == "consumer"


def test_time_between_passes_is_in_no_stretch(world: World) -> None:
    world.seconds(60, wait_s=0.5)
    for _ in range(1000):
        world.now += 1.0
        world.diagnoses.mark()
    assert 30 <= world.told().diagnosis.facts.wall_s < 36


def test_it_is_made_again_only_once_there_is_something_new_and_some_seconds_have_passed(world: World) -> None:
    world.seconds(60, wait_s=0.5)
    first = world.told()
    world.seconds(9, wait_s=0.5)
    assert world.told() is first
    world.seconds(1, wait_s=0.5)
    second = world.told()
    assert second is not first
    world.now += 1000.0
    assert world.told() is second
    world.seconds(1, wait_s=1.0, batches=0)  # it waits for a batch that does not come
    assert world.told() is not second


def test_after_a_reset_it_is_about_what_came_since(world: World) -> None:
    world.seconds(60, wait_s=0.5)
    world.book.restart()
    world.seconds(20, wait_s=0.0)
    for stretch in ("recent", "run"):
        assert world.told(stretch).diagnosis.facts.batches == 200
        assert world.told(stretch).diagnosis.verdict.cause == "consumer"


def test_loaders_come_and_go_and_may_have_the_name_of_one_before(world: World) -> None:
    world.ledgers.append(LoaderMetrics("b"))  # has no iterator yet
    world.seconds(60, wait_s=0.5)
    assert world.diagnoses.of("b", "run") is None
    assert [one.name for one in world.diagnoses.of(None, "run") or ()] == ["a"]
    other = Engine(batches=70, work_s=7.0)
    book = LoaderCounters()
    book.open(other)
    world.ledgers[0].case = DiagnosisSource(book=book, subject=Subject())
    world.now += KEPT_S
    assert world.told().diagnosis.facts.batches == 70
    world.ledgers.clear()
    assert world.diagnoses.of(None, "run") == []
    assert b"No loader of this process has been iterated yet" in as_html([])


def test_what_is_said_is_json_and_html(world: World) -> None:
    world.seconds(60, wait_s=0.2)
    world.seconds(1, wait_s=1.0, cause=STARTUP)
    told = world.told("run")
    (found,) = json.loads(as_json([told]))["loaders"]
    assert sum(part["ratio"] for part in found["shown"]["parts"]) == pytest.approx(1.0)
    assert [part["cause"] for part in found["shown"]["parts"]] == ["consumer", "storage", "startup"]
    titles = [section["title"] for section in found["shown"]["sections"]]
    assert "How do we know" in titles
    assert "Where the time goes" not in titles
    assert found["diagnosis"]["verdict"]["cause"] == "storage"
    page = as_html([told, world.told()]).decode()
    assert page.count("<h1>") == 2
    assert '<a href="/diagnosis?loader=a&amp;stretch=recent">' in page


def test_the_training_threads_run_queue_is_asked_about_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    look = "dpex.engine.loader_counters.run_queue.look"
    monkeypatch.setattr("dpex.engine.loader_counters.SHORT_S", 0.0)
    page = Page(Engine(batches=1))
    with pytest.MonkeyPatch.context() as patch:
        from dpex.system.run_queue import Queued

        def looked(pids: object, thread: int) -> Queued:
            asked.append(thread)
            return Queued()

        patch.setattr(look, looked)
        other = threading.Thread(target=page.read)
        other.start()
        other.join()
    assert asked == [threading.get_native_id()]


def test_a_real_loader_is_diagnosed_at_its_endpoint() -> None:
    with DpexDataLoader(list(range(400)), batch_size=4, num_workers=1, metrics_port=0, name="real") as loader:
        list(loader)
        assert loader.metrics_url == f"http://127.0.0.1:{exporter.port}/"
        (ledger,) = exporter.ledgers()
        assert ledger.case is not None
        assert ledger.case.diagnose().facts.batches == 100
        assert str(ledger.case.diagnose()) == str(loader.diagnose())
        assert loader.diagnose().full.startswith(str(loader.diagnose()))
    assert loader.metrics_url is None

"""Frames are differences that add up, histories forget, diagnoses are about a stretch; on a clock moved by hand."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from decisions import a_decision

from dpex.autotune.types import Decision, Outcome
from dpex.diagnose.diagnosis import DiagnosisSource
from dpex.diagnose.facts import Subject
from dpex.engine.snapshots import LoaderCounters
from dpex.measure.causes import READ, STARTUP, TIMED, TRANSFORM
from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import Reading
from dpex.measure.settings import Settings
from dpex.stats import LoaderStats
from dpex.telemetry.http import history as module
from dpex.telemetry.http.history import HistorySampler, Stretch, TimedDiagnosis
from dpex.telemetry.loader_metrics import LoaderMetrics
from tests.unit.measure.test_ledger import NOTHING, Engine


@dataclass
class World:
    """One loader whose engine says what it is told to, and a sampler on a clock that is moved by hand."""

    now: float = 100.0
    ledgers: list[LoaderMetrics] = field(default_factory=lambda: [LoaderMetrics("a", ("Photos", "16", "batch"))])

    def __post_init__(self) -> None:
        self.engine, self.book = Engine(), LoaderCounters()
        self.ledger.add_iterator(self.engine)
        self.book.add_iterator(self.engine)
        self.ledger.case = DiagnosisSource(book=self.book, subject=Subject(dataset="Photos"))
        self.sampler = HistorySampler(
            lambda: self.ledgers, {"rank": "3"}, clock=lambda: self.now, wall=lambda: 1e9 + self.now
        )

    @property
    def ledger(self) -> LoaderMetrics:
        return self.ledgers[0]

    def second(self, *, wait_s: float = 0.0, cause: int = TRANSFORM, work_s: float = 0.0, batches: int = 0) -> None:
        """A second in which that happened, and its frame."""
        self.now += 1.0
        now = self.engine.now
        more = Reading(causes={TIMED[cause]: wait_s}, work_s=work_s, batches=batches, samples=16 * batches)
        self.engine.now = now.plus(more)
        self.sampler.turn()

    def seconds(self, count: int, *, wait_s: float, workers: int = 2, batches: int = 10, cause: int = READ) -> None:
        """So many seconds in which the loop waited for so much of each."""
        for _ in range(count):
            made = PoolReading(running=workers, tickets=batches, load_s=1.0)
            pool = self.engine.now.pools.get("local", PoolReading()).then(made)
            self.engine.now = replace(self.engine.now, pools={"local": pool})
            self.second(wait_s=wait_s, cause=cause, work_s=1.0 - wait_s, batches=batches)

    def told(self, stretch: Stretch = "recent") -> TimedDiagnosis:
        (one,) = self.sampler.diagnoses("a", stretch) or ()
        return one

    def state(self, since: int = 0) -> dict[str, Any]:
        return json.loads(self.sampler.state(since))  # type: ignore[no-any-return]

    def loader(self, since: int = 0) -> dict[str, Any]:
        (found,) = self.state(since)["loaders"]
        return found  # type: ignore[no-any-return]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Its engine's counts are not added to by the load of this machine."""
    monkeypatch.setattr("dpex.engine.snapshots.SHORT_S", float("inf"))
    found = World()
    found.sampler.turn()
    return found


def rows(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(state["columns"], row, strict=True)) for row in state["loaders"][0]["frames"]]


def test_the_columns_name_every_cause_and_every_row_fits(world: World) -> None:
    state = world.state()
    assert [c for c in state["columns"] if c.startswith("wait_") and c != "wait_s"] == [f"wait_{c}_s" for c in TIMED]
    assert rows(state)[0]["number"] == 1
    assert (state["version"], state["process"]["rank"]) == (3, "3")


def test_frames_are_differences(world: World) -> None:
    for _ in range(3):
        world.second(wait_s=0.4, work_s=0.6, batches=10)
    state = world.state()
    assert [(row["wait_s"], row["work_s"], row["batches"], row["seconds"]) for row in rows(state)[1:]] == [
        (pytest.approx(0.4), pytest.approx(0.6), 10, 1.0)
    ] * 3
    assert [row["at"] for row in rows(state)] == [1e9 + 100, 1e9 + 101, 1e9 + 102, 1e9 + 103]
    now = state["loaders"][0]["now"]
    assert now["wait_ratio"] == 0.4
    assert (now["batches_per_second"], now["samples_per_second"]) == (10.0, 160.0)


def test_the_wait_is_one_number_wherever_it_is_told(world: World) -> None:
    """On the page, in `dpex top`, in the report above its line, and in ``stats()``: taking in is part of the wait."""
    for _ in range(5):
        world.engine.now = world.engine.now.plus(Reading(transfer_s=0.1))
        world.second(wait_s=0.27, work_s=0.63, batches=10)
    reading, wait = world.engine.now, pytest.approx(0.37)
    assert reading.wait_ratio == wait
    assert LoaderStats.of(reading, busy_s=0.0, first_batch_s=0.0).wait_ratio == wait
    assert world.loader()["now"]["wait_ratio"] == wait
    told = world.told("run")
    assert told.diagnosis.facts.wait_ratio == wait
    report, now = world.sampler.text([told], is_whole=True).split("Now: ")
    assert "37 %" in report
    assert "wait 37 %" in now


def test_now_is_five_seconds(world: World) -> None:
    for _ in range(10):
        world.second(wait_s=0.4, work_s=0.6, batches=10)
    assert world.loader()["now"]["wait_ratio"] == 0.4
    for _ in range(5):
        world.second(work_s=1.0, batches=10)
    assert world.loader()["now"]["wait_ratio"] == 0.0


def test_the_way_from_each_machine_is_told(world: World) -> None:
    assert (world.loader()["machines"], world.loader()["excluded"]) == ([], 0)
    for sent in (1000, 3500):
        node = PoolReading(links=1, sent_bytes=sent, resent_bytes=1500, sending_s=0.5, round_trip_s=0.02)
        remote = PoolReading(nodes={"a": node, "here": PoolReading(tickets=3)}, nodes_excluded=2)
        world.engine.now = replace(world.engine.now, pools={"remote": remote})
        world.now += 1.0
        world.sampler.turn()
    way = {"name": "a", "bytes_per_s": 2500.0, "bandwidth": 7000.0, "round_trip_s": 0.02, "loss": 0.3}
    assert (world.loader()["machines"], world.loader()["excluded"]) == ([way], 2)


def test_empty_running_and_idle(world: World) -> None:
    assert (world.loader()["state"], world.loader()["now"]["wait_ratio"]) == ("empty", None)
    world.second(wait_s=0.2, cause=STARTUP, batches=1)
    assert world.loader()["state"] == "running"
    for _ in range(6):
        world.second()
    assert (world.loader()["state"], world.loader()["now"]["batches_per_second"]) == ("idle", 0.0)


def test_batches_made_in_the_process_are_not_those_of_workers(world: World) -> None:
    for pool, is_in_process in (("inline", True), ("local", False)):
        world.engine.now = replace(world.engine.now, pools={pool: PoolReading()})
        world.second()
        assert world.loader()["in_process"] is is_in_process


def test_what_is_new(world: World) -> None:
    for _ in range(4):
        world.second(batches=1)
    assert [row["number"] for row in rows(world.state(3))] == [4, 5]
    assert rows(world.state(5)) == []
    assert rows(world.state(10**14)) == []


def test_ten_minutes_are_kept(world: World) -> None:
    for _ in range(module.KEEP + 50):
        world.second(batches=1)
    numbers = [row["number"] for row in rows(world.state())]
    assert (len(numbers), numbers[-1]) == (module.KEEP, module.KEEP + 51)


def test_reading_is_what_took_no_cpu(world: World) -> None:
    pool = PoolReading(load_s=3.0, load_cpu_s=1.0, collate_s=0.5, encode_s=0.25, tickets=10, running=2, wanted=3)
    world.engine.now = replace(NOTHING, pools={"local": pool}, ready=4, prefetch=9, batches=1)
    world.second(work_s=1.0)
    row = rows(world.state())[-1]
    seconds = [row[f"make_{stage}_s"] for stage in ("read", "transform", "collate", "encode")]
    assert seconds == [2.0, 1.0, 0.5, 0.25]
    levels = ("local_running", "local_wanted", "remote_running", "ready", "prefetch", "made")
    assert [row[name] for name in levels] == [2, 3, 0, 4, 9, 10]


def test_gpu_stall_is_none_until_somebody_measures_it(world: World) -> None:
    world.second(wait_s=0.5, work_s=0.5, batches=1)
    assert world.loader()["now"]["gpu_stall_ratio"] is None
    for stall_s in (0.0, 0.5):
        world.engine.now = replace(world.engine.now, gpu_stall_s=stall_s)
        world.second(wait_s=0.5, work_s=0.5, batches=1)
    assert [row["gpu_stall_s"] for row in rows(world.state())] == [None, None, 0.0, 0.5]
    assert world.loader()["now"]["gpu_stall_ratio"] == pytest.approx(0.1667)


@dataclass
class Tuner:
    decisions: Sequence[Decision]


DECISION = a_decision(old=Settings(local=2, prefetch=4), new=Settings(local=5, remote=1, prefetch=12))


def test_decisions_are_told_with_the_time_they_were_seen_at(world: World) -> None:
    world.ledger.tuner = tuner = Tuner([DECISION])
    world.second()
    judged = replace(DECISION, outcome=Outcome(rate=15.0, wait=0.08, kept=True, at=3.0))
    tuner.decisions = [judged, a_decision(at=2.0, predicted_rate=float("inf"), predicted_wait=float("nan"))]
    world.second()
    one, two = world.loader()["decisions"]
    assert (one["number"], one["at"], one["reason"]) == (1, 1e9 + 101, "too few")
    assert (one["from"]["text"], one["to"]["text"]) == ("2 local, prefetch 4", "5 local + 1 remote, prefetch 12")
    assert one["outcome"] == {"wait_ratio": 0.08, "batches_per_second": 15.0, "kept": True}
    assert (two["at"], two["outcome"]) == (1e9 + 102, None)
    assert two["predicted"] == {"wait_ratio": None, "batches_per_second": None}
    assert world.loader()["tuned"]


def test_a_new_loader_of_a_removed_ones_name_starts_empty(world: World) -> None:
    world.ledger.tuner = Tuner([DECISION])
    world.second(wait_s=0.5, work_s=0.5, batches=100)
    world.ledgers[0] = LoaderMetrics("a")
    world.ledger.add_iterator(Engine(batches=7))
    world.second()
    assert rows(world.state())[-1]["batches"] == 7
    assert world.loader()["decisions"] == []
    world.ledgers = []
    world.sampler.turn()
    assert world.state()["loaders"] == []


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
    world.seconds(11, wait_s=0.5)
    assert (world.told().is_whole, world.told().as_data()["level"]) == (True, "bad")


def test_a_diagnosis_begins_with_the_present_number_of_workers(world: World) -> None:
    world.seconds(60, wait_s=0.5)
    world.seconds(17, wait_s=0.0, workers=6)
    assert 10 <= world.told().diagnosis.facts.wall_s <= 17
    assert world.told().diagnosis.verdict.cause == "consumer"


def test_time_between_passes_is_in_no_stretch(world: World) -> None:
    world.seconds(60, wait_s=0.5)
    for _ in range(1000):
        world.second()
    assert 30 <= world.told().diagnosis.facts.wall_s < 36


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
    assert world.sampler.diagnoses("b", "run") is None
    assert [one.name for one in world.sampler.diagnoses(None, "run") or ()] == ["a"]
    book = LoaderCounters()
    book.add_iterator(Engine(batches=70, work_s=7.0))
    world.ledger.case = DiagnosisSource(book=book, subject=Subject())
    world.sampler.turn()
    assert world.told().diagnosis.facts.batches == 70
    world.ledgers.clear()
    world.sampler.turn()
    assert world.sampler.diagnoses(None, "run") == []


def test_what_the_page_shows_of_a_diagnosis(world: World) -> None:
    world.seconds(60, wait_s=0.2)
    world.seconds(1, wait_s=1.0, cause=STARTUP)
    found = json.loads(json.dumps(world.told("run").as_data(), allow_nan=False))
    assert sum(part["ratio"] for part in found["shown"]["parts"]) == pytest.approx(1.0)
    assert [part["cause"] for part in found["shown"]["parts"]] == ["consumer", "storage", "startup"]
    assert "How do we know" in [section["title"] for section in found["shown"]["sections"]]
    assert found["diagnosis"]["verdict"]["cause"] == "storage"

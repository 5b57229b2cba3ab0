"""Frames are differences that add up, histories forget, and answers say what is known; on a clock of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from test_ledger import NOTHING, Engine

from dpex.autotune.types import Decision, Outcome, Settings
from dpex.measure.consumer_time import LaneSums, Spent
from dpex.measure.stall_causes import CAUSES, STARTUP, TRANSFORM
from dpex.telemetry.http import history as module
from dpex.telemetry.http.frames import Frame, latest
from dpex.telemetry.http.history import Sampler
from dpex.telemetry.loader_metrics import Ledger

HOSTILE = '<script>alert("x")</script>\u2028 & \\'


@dataclass
class World:
    """One loader whose engine says what it is told to, and a sampler on a clock that is moved by hand."""

    now: float = 100.0
    ledgers: list[Ledger] = field(default_factory=lambda: [Ledger("a", ("Photos", "16", "batch"))])

    def __post_init__(self) -> None:
        self.engine = Engine()
        self.ledger.watch(self.engine)
        self.sampler = Sampler(lambda: self.ledgers, {"rank": "3"}, clock=lambda: self.now, wall=lambda: 1e9 + self.now)

    @property
    def ledger(self) -> Ledger:
        return self.ledgers[0]

    def second(self, *, wait_s: float = 0.0, cause: int = TRANSFORM, work_s: float = 0.0, batches: int = 0) -> None:
        """A second in which that happened, and its frame."""
        self.now += 1.0
        now = self.engine.now
        causes = list(now.spent.causes)
        causes[cause] += wait_s
        spent = Spent(tuple(causes), now.spent.transfer_s, now.spent.work_s + work_s)
        self.engine.now = replace(now, spent=spent, batches=now.batches + batches, samples=now.samples + 16 * batches)
        self.sampler.turn()

    def state(self, since: int = 0) -> dict[str, Any]:
        return json.loads(self.sampler.state(since))  # type: ignore[no-any-return]

    def loader(self, since: int = 0) -> dict[str, Any]:
        (found,) = self.state(since)["loaders"]
        return found  # type: ignore[no-any-return]


@pytest.fixture
def world() -> World:
    found = World()
    found.sampler.turn()
    return found


def rows(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(state["columns"], row, strict=True)) for row in state["loaders"][0]["frames"]]


def test_the_columns_name_every_cause_and_every_row_fits(world: World) -> None:
    state = world.state()
    assert [c for c in state["columns"] if c.startswith("wait_") and c != "wait_s"] == [f"wait_{c}_s" for c in CAUSES]
    assert rows(state)[0]["number"] == 1
    assert (state["version"], state["process"]["rank"]) == (2, "3")


def test_frames_are_differences(world: World) -> None:
    for _ in range(3):
        world.second(wait_s=0.4, work_s=0.6, batches=10)
    state = world.state()
    assert [(row["wait_s"], row["work_s"], row["batches"], row["seconds"]) for row in rows(state)[1:]] == [
        (pytest.approx(0.4), pytest.approx(0.6), 10, 1.0)
    ] * 3
    assert [row["at"] for row in rows(state)] == [1e9 + 100, 1e9 + 101, 1e9 + 102, 1e9 + 103]
    now = state["loaders"][0]["now"]
    assert (now["stall_ratio"], now["work_ratio"], now["transfer_ratio"]) == (0.4, 0.6, 0.0)
    assert (now["batches_per_second"], now["samples_per_second"]) == (10.0, 160.0)


def test_now_is_five_seconds(world: World) -> None:
    for _ in range(10):
        world.second(wait_s=0.4, work_s=0.6, batches=10)
    assert world.loader()["now"]["stall_ratio"] == 0.4
    for _ in range(5):
        world.second(work_s=1.0, batches=10)
    assert world.loader()["now"]["stall_ratio"] == 0.0


def test_empty_running_and_idle(world: World) -> None:
    assert (world.loader()["state"], world.loader()["now"]["stall_ratio"]) == ("empty", None)
    world.second(wait_s=0.2, cause=STARTUP, batches=1)
    assert world.loader()["state"] == "running"
    for _ in range(6):
        world.second()
    assert (world.loader()["state"], world.loader()["now"]["batches_per_second"]) == ("idle", 0.0)


def test_what_is_new(world: World) -> None:
    for _ in range(4):
        world.second(batches=1)
    assert [row["number"] for row in rows(world.state(3))] == [4, 5]
    assert rows(world.state(5)) == []
    assert rows(world.state(10**14)) == []


def test_the_same_question_is_answered_once_a_second(world: World) -> None:
    first = world.sampler.state(0)
    assert world.sampler.state(0) is first
    for since in range(3 * module.MOST_ANSWERS):
        world.sampler.state(since)
    assert len(world.sampler._answers) <= module.MOST_ANSWERS
    world.second()
    assert world.sampler.state(0) != first


def test_ten_minutes_are_kept(world: World) -> None:
    for _ in range(module.KEEP + 50):
        world.second(batches=1)
    numbers = [row["number"] for row in rows(world.state())]
    assert (len(numbers), numbers[-1]) == (module.KEEP, module.KEEP + 51)


def test_stages_are_per_batch_and_reading_is_what_took_no_cpu(world: World) -> None:
    lane = LaneSums(load_s=3.0, load_cpu_s=1.0, collate_s=0.5, encode_s=0.25, services=(4, 6), running=2, wanted=3)
    world.engine.now = replace(NOTHING, lanes={"local": lane}, ready=4, window=9, batches=1)
    world.second(work_s=1.0)
    found = world.loader()
    assert found["now"]["stages_s"] == {"read": 0.2, "transform": 0.1, "collate": 0.05, "serialize": 0.025}
    row = rows(world.state())[-1]
    levels = (row["local_running"], row["local_wanted"], row["remote_running"], row["ready"], row["limit"], row["made"])
    assert levels == (2, 3, 0, 4, 9, 10)


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


def decision(**changes: Any) -> Decision:
    return replace(
        Decision(
            at=1.5,
            old=Settings(local=2, depth=4),
            new=Settings(local=5, remote=1, depth=12),
            reason="too few",
            text="57 % of the time is lost",
            evidence={},
            predicted_rate=14.62,
            predicted_stall=0.15,
        ),
        **changes,
    )


def test_decisions_are_told_with_the_time_they_were_seen_at(world: World) -> None:
    world.ledger.tuner = tuner = Tuner([decision()])
    world.second()
    judged = decision(outcome=Outcome(rate=15.0, stall=0.08, kept=True, at=3.0))
    tuner.decisions = [judged, decision(predicted_rate=float("inf"), predicted_stall=float("nan"))]
    world.second()
    one, two = world.loader()["decisions"]
    assert (one["number"], one["at"], one["reason"]) == (1, 1e9 + 101, "too few")
    assert (one["from"]["text"], one["to"]["text"]) == ("2 local, depth 4", "5 local + 1 remote, depth 12")
    assert one["outcome"] == {"stall_ratio": 0.08, "batches_per_second": 15.0, "kept": True}
    assert (two["at"], two["outcome"]) == (1e9 + 102, None)
    assert two["predicted"] == {"stall_ratio": None, "batches_per_second": None}
    assert world.loader()["tuned"]


def test_a_loader_that_went_is_forgotten_and_one_of_its_name_begins_anew(world: World) -> None:
    world.ledger.tuner = Tuner([decision()])
    world.second(wait_s=0.5, work_s=0.5, batches=100)
    world.ledgers[0] = Ledger("a")
    world.ledger.watch(Engine(batches=7))
    world.second()
    assert rows(world.state())[-1]["batches"] == 7
    assert world.loader()["decisions"] == []
    world.ledgers = []
    world.sampler.turn()
    assert world.state()["loaders"] == []


def test_names_reach_the_page_as_json_only() -> None:
    world = World(ledgers=[Ledger(HOSTILE, (HOSTILE, "1", "batch"))])
    world.sampler.turn()
    assert (world.loader()["name"], world.loader()["info"]["dataset"]) == (HOSTILE, HOSTILE)


def test_latest_is_the_shortest_end_that_suffices() -> None:
    frames = [Frame(n, 0.0, 1.0, 2, *([0] * (len(Frame._fields) - 4))) for n in range(10)]
    assert [one.number for one in latest(frames, 3.0)] == [7, 8, 9]
    assert latest(frames, 99.0) == frames
    assert latest([], 1.0) == []

"""What follows from the end of a worker: which tickets are made again, given up or counted, and what is said."""

from __future__ import annotations

import pytest
from fakelane import FakeLane

from dpex.core.placement import Place
from dpex.core.prefetch import Pace
from dpex.core.schedule import Schedule
from dpex.engine.assignment import Tenancy
from dpex.engine.dispatch import Dispatch
from dpex.engine.failures import Casualties
from dpex.errors import WorkerDiedError
from dpex.pools.base import CRASHES_IN_A_ROW, Gone


class Scene:
    """Six tickets with the workers of a lane, and what takes in their ends."""

    def __init__(self, *, logicals: int = 0, iterable: bool = False, tickets: int = 6) -> None:
        self.lane = FakeLane()
        lanes = {"local": self.lane}
        self.dirty: set[int] = set()
        self.tenancy = Tenancy(logicals, iterable, lanes, self.dirty)
        pace = Pace(base_window=8, logical=logicals > 0, stretch=False, memory_budget=None)
        self.dispatch = Dispatch(lanes, self.tenancy, pace, self.dirty, logical=logicals > 0)
        self.dispatch.add_lane("local")
        self.casualties = Casualties(self.tenancy, self.dispatch, self.dirty, iterable=iterable)
        self.schedule = Schedule(window=tickets, queues=logicals)
        for number in range(tickets):
            self.dirty.add(self.schedule.draw([number]).queue)
        self.dispatch.issue(self.schedule, 0, starving=True)

    def gone(self, *lost: int, guilty: int | None = None, expected: bool = False) -> WorkerDiedError | None:
        event = Gone(0, lost, guilty, expected, "worker 0 was killed", 4711)
        return self.casualties.gone(self.schedule, self.lane, event)

    def dies_with(self, *lost: int, guilty: int | None = None) -> WorkerDiedError | None:
        with pytest.warns(RuntimeWarning, match=r"worker 0 was killed.*The epoch goes on"):
            return self.gone(*lost, guilty=guilty)

    def send_again(self) -> list[int]:
        before = len(self.lane.numbers_sent)
        self.dispatch.issue(self.schedule, 0, starving=True)
        return self.lane.numbers_sent[before:]


def test_tickets_of_a_dead_worker_are_made_again_and_counted_one_by_one() -> None:
    scene = Scene()
    assert scene.dies_with(1, 3, 4) is None
    assert (scene.casualties.deaths["local"], scene.casualties.remade) == (1, 3)
    assert scene.dispatch.load == {"local": 3}
    assert scene.send_again() == [1, 3, 4]
    assert scene.dispatch.load == {"local": 6}
    scene.dies_with(4)
    assert (scene.casualties.deaths["local"], scene.casualties.remade) == (2, 4)


def test_a_death_without_tickets_is_a_death_and_nothing_else() -> None:
    scene = Scene()
    with pytest.warns(RuntimeWarning) as caught:
        scene.gone()
    assert "is made again" not in str(caught[0].message)
    assert (scene.casualties.deaths["local"], scene.casualties.remade, scene.send_again()) == (1, 0, [])


def test_tickets_that_are_not_open_any_more_are_neither_made_nor_counted_again() -> None:
    scene = Scene()
    scene.schedule.done(2, lambda: "made elsewhere")
    scene.dies_with(2, 5, 77)
    assert scene.casualties.remade == 1
    assert scene.send_again() == [5]


@pytest.mark.filterwarnings("error")
def test_a_worker_that_was_asked_to_leave_did_not_die() -> None:
    scene = Scene()
    assert scene.gone(0, 1, expected=True) is None
    assert (scene.casualties.deaths.total(), scene.casualties.remade) == (0, 0)
    assert scene.send_again() == [0, 1]


def test_a_ticket_that_was_with_three_workers_as_they_died_is_given_up_and_not_counted_as_made_again() -> None:
    scene = Scene()
    for _ in range(scene.schedule.max_tries - 1):
        scene.dies_with(0, 1, guilty=0)
        assert scene.send_again() == [0, 1]
    scene.gone(0, 1, guilty=0)
    assert scene.casualties.remade == 2 + 2 + 1
    assert scene.send_again() == [1]
    error = scene.schedule.pop().payload()
    assert isinstance(error, WorkerDiedError)
    assert "Batch 0 (dataset indices [0]) killed 3 workers" in str(error)


def test_too_many_deaths_in_a_row_end_the_epoch() -> None:
    scene = Scene()
    scene.lane.crashes = CRASHES_IN_A_ROW + scene.lane.counts.wanted
    assert scene.dies_with(0) is None
    scene.lane.crashes += 1
    error = scene.dies_with(0)
    assert isinstance(error, WorkerDiedError)
    assert f"{scene.lane.crashes} workers in a row died" in str(error)
    assert scene.gone(0, expected=True) is None


def test_a_running_stream_cannot_go_on_elsewhere() -> None:
    scene = Scene(logicals=2, iterable=True, tickets=4)
    assert scene.tenancy.tenants(Place("local", 0)) == {0}
    assert scene.gone(0, 2) is None  # its error has a place: that of the stream's next batch
    error = scene.schedule.pop().payload()
    assert isinstance(error, WorkerDiedError)
    assert "stream 0 of the IterableDataset cannot go on elsewhere" in str(error)
    assert [ticket.number for ticket in scene.schedule.issued()] == [1, 3]

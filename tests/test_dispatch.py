"""Which lane a ticket is sent to, what a refusal leaves behind, and what counts as being on its way."""

from __future__ import annotations

from fakelane import FakeLane

from dpex.core.prefetch import Pace
from dpex.core.schedule import Schedule
from dpex.engine.assignment import Tenancy
from dpex.engine.dispatch import Dispatch


def dispatch_to(*lanes: FakeLane, logicals: int = 0) -> tuple[Dispatch, set[int]]:
    """A dispatch for these lanes, and its queues with something to send."""
    by_name = {lane.name: lane for lane in lanes}
    dirty: set[int] = set()
    tenancy = Tenancy(logicals, False, by_name, dirty)
    pace = Pace(base_window=8, logical=logicals > 0, stretch=False, memory_budget=None)
    made = Dispatch(by_name, tenancy, pace, dirty, logical=logicals > 0)
    for name in by_name:
        made.add_lane(name)
    return made, dirty


def drawn(count: int, dirty: set[int], queues: int = 0) -> Schedule:
    """A schedule with that many tickets to send."""
    schedule = Schedule(window=count, queues=queues)
    for number in range(count):
        dirty.add(schedule.draw([number]).queue)
    return schedule


def test_tickets_that_a_lane_refuses_are_sent_once_it_takes_them() -> None:
    lane = FakeLane(accepts=False)
    dispatch, dirty = dispatch_to(lane)
    schedule = drawn(4, dirty)
    dispatch.issue(schedule, 0, starving=True)
    assert (lane.sent, schedule.pending(), dispatch.load) == ([], 4, {"local": 0})
    assert dirty, "nobody would try again"
    lane.accepts = True
    dispatch.issue(schedule, 0, starving=True)
    assert (lane.numbers_sent, schedule.pending(), dispatch.load) == ([0, 1, 2, 3], 0, {"local": 4})
    assert not dirty


def test_tickets_of_a_logical_worker_that_are_refused_are_sent_once_they_are_taken() -> None:
    lane = FakeLane(accepts=False)
    dispatch, dirty = dispatch_to(lane, logicals=2)
    schedule = drawn(4, dirty, queues=2)
    dispatch.issue(schedule, 0, starving=True)
    assert (lane.sent, [schedule.pending(queue) for queue in (0, 1)]) == ([], [2, 2])
    assert dirty == {0, 1}
    lane.accepts = True
    dispatch.issue(schedule, 0, starving=True)
    assert lane.sent == [([0], 0, 0), ([2], 0, 0), ([1], 0, 1), ([3], 0, 1)]
    assert (dirty, dispatch.load) == (set(), {"local": 4})


def test_what_came_back_is_not_on_its_way_any_more() -> None:
    lane = FakeLane()
    dispatch, dirty = dispatch_to(lane)
    dispatch.issue(drawn(3, dirty), 0, starving=True)
    loads = []
    for number in (1, 1, 0, 99, 2):  # one twice, and one that was never sent
        dispatch.arrived(number)
        loads.append(dispatch.load["local"])
    assert loads == [2, 2, 1, 1, 0]


def test_the_lane_with_the_least_on_its_way_by_worker_is_next() -> None:
    near, far = FakeLane("local", (0,)), FakeLane("remote", (0, 1, 2))
    dispatch, dirty = dispatch_to(near, far)
    dispatch.issue(drawn(8, dirty), 0, starving=True)
    assert dispatch.load == {"local": 2, "remote": 6}
    for number in near.numbers_sent:
        dispatch.arrived(number)
    dispatch.issue(drawn(1, dirty), 0, starving=True)
    assert dispatch.load == {"local": 1, "remote": 6}


def test_a_lane_without_workers_is_sent_nothing() -> None:
    near, far = FakeLane("local", ()), FakeLane("remote", (0,))
    dispatch, dirty = dispatch_to(near, far)
    dispatch.issue(drawn(2, dirty), 0, starving=True)
    assert (near.sent, far.numbers_sent) == ([], [0, 1])


def test_nothing_is_on_its_way_in_a_new_epoch() -> None:
    lane = FakeLane()
    dispatch, dirty = dispatch_to(lane)
    dispatch.issue(drawn(3, dirty), 0, starving=True)
    dispatch.new_epoch()
    assert dispatch.load == {"local": 0}
    dispatch.arrived(0)  # a result of the epoch before
    assert dispatch.load == {"local": 0}


def test_queues_that_wait_for_the_rest_of_a_message_are_told_until_somebody_starves() -> None:
    lane = FakeLane()
    dispatch, dirty = dispatch_to(lane, logicals=2)
    dispatch._pace.group = 2
    schedule = drawn(5, dirty, queues=2)
    dispatch.issue(schedule, 0, starving=True)
    for number in (5, 6):
        dirty.add(schedule_more(schedule, number))
    schedule.done(0, None)
    dispatch.issue(schedule, 0, starving=False)
    assert [numbers for numbers, _, _ in lane.sent] == [[0, 2], [4], [1, 3]]
    assert dispatch.incomplete == dirty == {0, 1}
    dispatch.issue(schedule, 0, starving=True)
    assert lane.numbers_sent[-2:] == [6, 5]
    assert dispatch.incomplete == dirty == set()


def schedule_more(schedule: Schedule, number: int) -> int:
    """Draw one more than the window held; returns its queue."""
    schedule.set_window(schedule.window + 1)
    return schedule.draw([number]).queue

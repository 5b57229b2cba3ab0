"""What is kept of a logical worker, for a death and for a later run."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from dpex.schedule.progress import LogicalLog, LogicalPoint, MadeTicket, TicketRuns


def made(*numbers: int, epoch: int = 0) -> list[MadeTicket]:
    return [MadeTicket(epoch, number, f"index {number}") for number in numbers]


def log_of(*numbers: int, is_stream: bool = False) -> LogicalLog:
    log = LogicalLog(is_stream=is_stream)
    for ticket in made(*numbers):
        log.add_made(*ticket)
    return log


def test_states_are_kept_from_the_latest_one_delivered() -> None:
    log = log_of(0, 2, 4, 6)
    for number in (0, 2, 4, 6):
        log.add_state(0, number, f"after {number}")
    log.forget_before(0, 5)
    assert log.point(0, 5) == LogicalPoint(state="after 4")
    assert log.point(0, 7) == LogicalPoint(state="after 6")
    assert log.latest() == ("after 6", [])
    assert log.point(0, 3) == LogicalPoint(again=()), "it can no longer be told"


def test_what_is_told_again_after_a_death_says_nothing_new() -> None:
    log = log_of(0, 2)
    log.add_state(0, 2, "after 2")
    log.add_state(0, 0, "after 0")
    log.add_made(*made(2)[0])
    assert log.latest() == ("after 2", [])


def test_a_second_state_after_one_ticket_replaces_the_first() -> None:
    log = log_of(0, 2)
    log.add_state(0, 2, "after 2, without the dataset's")
    log.add_state(0, 2, "after 2")
    assert log.latest() == ("after 2", [])
    assert log.point(0, 3) == LogicalPoint(state="after 2")


def test_batches_of_a_stream_without_a_state_are_counted() -> None:
    log = log_of(0, 2, 4, is_stream=True)
    assert not log.is_known
    assert log.point(0, 3, delivered=2) == LogicalPoint(batches=2)
    later = LogicalLog(is_stream=True)
    later.resume_at(LogicalPoint(batches=2, state="reads 2 batches again"))
    assert not later.is_known
    assert later.latest() == ("reads 2 batches again", [])
    later.add_made(*made(4)[0])
    assert later.point(0, 5, delivered=1) == LogicalPoint(batches=3)
    for each in (log, later):
        each.begin_epoch()
        assert (each.point(1, 0), each.latest()) == (LogicalPoint(), (None, []))


def stream_tickets(*numbers: int, epoch: int = 0) -> list[MadeTicket]:
    return [MadeTicket(epoch, number, [None, None]) for number in numbers]


def test_equal_steps_are_one_run() -> None:
    made = [*stream_tickets(*range(1, 3001, 3)), *stream_tickets(3000, 3002), *stream_tickets(3004, epoch=1)]
    runs = TicketRuns([*made, MadeTicket(1, 3005, "x")])
    assert [(run.epoch, run.numbers) for run in runs.runs] == [
        (0, range(1, 3001, 3)),
        (0, range(3000, 3003, 2)),
        (1, range(3004, 3005)),
        (1, range(3005, 3006)),
    ]


@given(steps=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3), st.booleans()), max_size=60))
def test_they_are_those_of_a_deque(steps: list[tuple[int, int, bool]]) -> None:
    """0 begins an epoch, 4 takes the first away, all else is a step to the next."""
    plain: deque[MadeTicket] = deque()
    runs, epoch, number = TicketRuns(), 0, 0
    for kind, step, is_full in steps:
        if kind == 0:
            epoch, number = epoch + 1, 0
        elif kind == 4 and plain:
            plain.popleft()
            runs.popleft()
        else:
            number += step
            made = MadeTicket(epoch, number, [None] * (2 if is_full else 1))
            plain.append(made)
            runs.append(made)
        assert list(runs) == list(plain)
        assert bool(runs) == bool(plain)
        if plain:
            assert (runs[0], runs[-1]) == (plain[0], plain[-1])
    runs.clear()
    assert not runs

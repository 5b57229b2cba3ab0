"""Tickets of a stream in few words: they are those of a list, whatever is added and taken away."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpex.schedule.progress import MadeTicket, TicketRun, TicketRuns


def tickets(*numbers: int, epoch: int = 0, index: Any = (None, None)) -> list[MadeTicket]:
    return [MadeTicket(epoch, number, list(index)) for number in numbers]


def test_equal_steps_are_one_run() -> None:
    runs = TicketRuns(tickets(*range(1, 3001, 3))).runs
    assert runs == [TicketRun(0, 1, [None, None], 3, 1000)]


def test_another_step_and_another_epoch_are_other_runs() -> None:
    made = [*tickets(0, 3, 6, 8, 10), *tickets(12, 14, epoch=1)]
    runs = TicketRuns(made)
    assert [(run.epoch, run.first, run.step, run.length) for run in runs.runs] == [
        (0, 0, 3, 3),
        (0, 8, 2, 2),
        (1, 12, 2, 2),
    ]
    assert list(runs) == made


@pytest.mark.parametrize("index", [[None], [None, 1], "x", [0, 1]])
def test_only_what_is_asked_of_streams_alike_is_taken_together(index: Any) -> None:
    made = [*tickets(0), MadeTicket(0, 1, index)]
    assert len(TicketRuns(made).runs) == 2
    assert list(TicketRuns(made)) == made
    assert len(TicketRuns([MadeTicket(0, 0, None), MadeTicket(0, 1, None)]).runs) == 1


@given(
    steps=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3), st.booleans()), max_size=60),
)
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

"""What follows where a sample takes too long: made again elsewhere, then without the sample, or given up."""

from typing import Any

import pytest

from dpex.errors import SampleTimeoutError
from dpex.schedule.events import Notice, WorkerGone
from dpex.schedule.sample_policy import HANGS, LeavingOut
from tests.unit.schedule.test_engine_state import Table, made

WHY = "worker 7 was ended, as loading sample 5 took longer\nIt was here:\n  a stack"


def hangs(table: Table, worker: int, ticket: int, place: int, *others: int) -> list[Any]:
    lost = (ticket, *others)
    return table.tell(WorkerGone("local", worker, 0, lost, ticket, False, WHY, 7, hung=place))


def test_a_ticket_with_a_hanging_sample_is_remade_and_no_death() -> None:
    table = Table()
    table.send(3)
    assert hangs(table, 0, 0, 2, 1) == [Notice(f"{WHY}. Its 2 batches will be made again. Training continues.")]
    assert table.send() == [("local", None, [0]), ("local", None, [1])]
    ticket = table.state.schedule.ticket(0)
    assert ticket is not None
    assert (ticket.deaths, ticket.index) == (0, "index 0")


def test_one_that_hangs_in_a_second_worker_goes_on_without_it() -> None:
    table = Table(tolerates=True)
    table.send(1)
    for worker in range(HANGS):
        hangs(table, worker, 0, 2)
        assert table.send() == [("local", None, [0])]
    ticket = table.state.schedule.ticket(0)
    assert ticket is not None
    first_line = WHY.partition("\n")[0]
    assert ticket.index == LeavingOut(index="index 0", places={2: first_line})
    for worker in range(HANGS):  # another sample of the same batch
        hangs(table, worker, 0, 3)
        table.send()
    assert ticket.index == LeavingOut(index="index 0", places={2: first_line, 3: first_line})


@pytest.mark.parametrize("tolerates", [False, True])
def test_a_ticket_that_cannot_do_without_it_is_given_up(tolerates: bool) -> None:
    """An error of a sample is that of its batch; or what has the place of a sample that hung hangs, too."""
    table = Table(tolerates=tolerates)
    table.send(2)
    for worker in range(HANGS * (1 + tolerates)):
        answer = hangs(table, worker, 0, 2, 1)
        table.send()
    assert answer == []
    error = table.result()
    assert isinstance(error, SampleTimeoutError)
    assert "batch 0" in str(error)
    assert ("on_error='skip'" in str(error)) != tolerates
    assert ("give a longer timeout_s" in str(error)) == tolerates
    table.tell(made(1))
    assert table.result() == "batch 1"
    assert table.state.placement.load == {"local": 0}


def test_the_same_worker_counts_once() -> None:
    """Its end may be handed in twice."""
    table = Table()
    table.send(1)
    for _ in range(3):
        hangs(table, 0, 0, 2)
    assert table.send() == [("local", None, [0])]
    assert table.result() is None

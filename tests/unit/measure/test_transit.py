"""How long batches were on their way from a remote worker, by the trainer's clock alone."""

from dataclasses import replace
from typing import Any

import pytest

from dpex.measure.batch_times import BatchTimes, made_on_node
from dpex.measure.pool_reading import PoolReading
from dpex.pools.agent.pool import AgentHandle
from dpex.schedule.schedule import Ticket


@pytest.fixture
def agent() -> AgentHandle:
    nowhere: Any = None
    return AgentHandle(number=1, place="a node", link=nowhere)


def send(agent: AgentHandle, at: float, *numbers: int, worker: int | None = None) -> None:
    agent.sent([Ticket(number, None, 0) for number in numbers], numbers[0], worker, at)


def answer(agent: AgentHandle, number: int, here_s: float, at: float) -> float:
    way_s = agent.answered(number, here_s, at)
    agent.answered_at = at
    return way_s


def test_a_batch_behind_another_costs_what_came_after_that(agent: AgentHandle) -> None:
    """The link is full: the second one waited for the first, which counts once."""
    send(agent, 10.0, 0, 1)
    assert answer(agent, 0, 0.5, 12.0) == pytest.approx(1.5)
    assert answer(agent, 1, 0.5, 12.25) == pytest.approx(0.25)


def test_a_ticket_sent_later_counts_from_there(agent: AgentHandle) -> None:
    send(agent, 10.0, 0)
    answer(agent, 0, 1.0, 12.0)
    send(agent, 20.0, 1)
    assert answer(agent, 1, 1.0, 21.25) == pytest.approx(0.25)


def test_it_is_never_negative(agent: AgentHandle) -> None:
    """The agent's clock may run faster than ours."""
    send(agent, 0.0, 0)
    assert answer(agent, 0, 1.5, 1.0) == 0.0


def test_a_ticket_that_it_does_not_hold_was_not_on_its_way(agent: AgentHandle) -> None:
    send(agent, 0.0, 0)
    agent.new_epoch()
    assert answer(agent, 0, 0.5, 1.0) == 0.0


def test_a_message_is_open_until_its_last_ticket_is_back(agent: AgentHandle) -> None:
    send(agent, 0.0, 0, 1, 2)
    answer(agent, 0, 0.0, 1.0)
    agent.took_back(2)
    assert list(agent.messages.values()) == [1]
    answer(agent, 1, 0.0, 1.0)
    assert not agent.messages


def test_what_is_lost_with_a_worker_is_what_it_was_sent_itself(agent: AgentHandle) -> None:
    send(agent, 0.0, 0, 1, worker=3)
    send(agent, 0.0, 2, worker=4)
    send(agent, 0.0, 5)
    assert agent.lost_with(3) == [0, 1]
    assert sorted(agent.held) == [2, 5]


def test_what_an_answer_adds_to_its_machine() -> None:
    """Run queues count for the batches that they were asked of."""
    batches = [BatchTimes(load_s=0.75, load_cpu_s=0.5, encode_s=0.25)] * 2
    unknown = PoolReading(tickets=2, load_s=1.5, load_cpu_s=1.0, encode_s=0.5)
    assert made_on_node(batches, delay=None) == unknown
    assert made_on_node(batches, delay=0.5) == replace(unknown, queued_s=0.5, queue_known_s=2.0)

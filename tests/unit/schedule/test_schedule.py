"""The schedule against a model that knows nothing of how it is done, under any interleaving of calls."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dpex.schedule.schedule import SHARED, MadeBatch, Schedule, ScheduleError, Ticket

WAITING, OUT, MADE, DELIVERED, DROPPED = "waiting", "out", "made", "delivered", "dropped"
UNFINISHED = (WAITING, OUT, MADE)


@dataclass
class Fate:
    """What the model knows of one ticket."""

    ticket: Ticket
    queue: int
    at: str = WAITING
    deaths: int = 0


class ScheduleMachine(RuleBasedStateMachine):
    """Drives a `Schedule` and a list of `Fate` side by side."""

    @initialize(
        prefetch=st.integers(1, 6),
        queues=st.integers(0, 3),
        in_order=st.booleans(),
        max_tries=st.integers(1, 3),
        patience=st.sampled_from([0, 4, 12]),
    )
    def start(self, prefetch: int, queues: int, in_order: bool, max_tries: int, patience: int) -> None:
        """Nothing ends before ``patience`` tickets: most random runs would end before they have begun."""
        self.patience = patience
        self.schedule = Schedule(prefetch=prefetch, queues=queues, in_order=in_order, max_tries=max_tries)
        self.prefetch, self.queues, self.in_order, self.max_tries = prefetch, queues, in_order, max_tries
        self.fates: list[Fate] = []
        self.results: list[int] = []  # numbers of made tickets, in the order of their results
        self.handed_out: list[int] = []
        self.active = [True] * max(1, queues)
        self.turn = 0
        self.sampler_ended = False

    # -- the model's answers -------------------------------------------------------------------------------------

    def numbers(self, *states: str, queue: int | None = None) -> list[int]:
        return [n for n, f in enumerate(self.fates) if f.at in states and queue in (None, f.queue)]

    def room(self) -> int:
        if self.sampler_ended or not any(self.active):
            return 0
        return max(0, self.prefetch - len(self.numbers(*UNFINISHED)))

    def deliverable(self) -> int | None:
        if not self.in_order:
            return self.results[0] if self.results else None
        first = next(iter(self.numbers(*UNFINISHED)), None)
        return first if first in self.results else None

    def finished(self) -> bool:
        return not self.numbers(*UNFINISHED) and (self.sampler_ended or not any(self.active))

    def check_queue(self, queue: int) -> None:
        """Called before the new ticket is entered."""
        if self.queues == 0:
            assert queue == SHARED
            return
        assert self.active[queue]
        if self.in_order:
            rota = [(self.turn + step) % self.queues for step in range(self.queues)]
            assert queue == next(q for q in rota if self.active[q])
            self.turn = (queue + 1) % self.queues
            return
        load = {q: len(self.numbers(WAITING, OUT, queue=q)) for q in range(self.queues) if self.active[q]}
        share = max(1, self.prefetch // len(load))
        assert load[queue] < share or load[queue] == min(load.values())

    # -- rules ---------------------------------------------------------------------------------------------------

    @rule()
    def draw(self) -> None:
        number = len(self.fates)
        if self.room() == 0:
            with pytest.raises(ScheduleError):
                self.schedule.draw(("index", number))
            return
        ticket = self.schedule.draw(("index", number))
        assert (ticket.number, ticket.index, ticket.issued) == (number, ("index", number), False)
        self.check_queue(ticket.queue)
        self.fates.append(Fate(ticket, ticket.queue))
        assert len(self.numbers(*UNFINISHED)) <= self.prefetch

    @precondition(lambda self: self.room())
    @rule()
    def draw_all(self) -> None:
        while self.room():
            self.draw()

    @rule(data=st.data(), limit=st.integers(0, 4))
    def take(self, data: st.DataObject, limit: int) -> None:
        queue = data.draw(st.integers(0, len(self.active) - 1))
        expected = self.numbers(WAITING, queue=queue)[:limit]
        tickets = self.schedule.issue_tickets(limit, queue)
        assert [t.number for t in tickets] == expected
        for ticket in tickets:
            assert ticket is self.fates[ticket.number].ticket
            self.fates[ticket.number].at = OUT

    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        """Any number: a late result, one that was never issued (its first worker lived after all), or nonsense."""
        self.finish(data.draw(st.integers(0, len(self.fates) + 1)))

    @precondition(lambda self: self.numbers(OUT))
    @rule(data=st.data())
    def done_as_usual(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from(self.numbers(OUT))))

    def finish(self, number: int) -> None:
        wanted = number in self.numbers(WAITING, OUT)
        assert self.schedule.accept_result(number, ("batch", number)) is wanted
        if wanted:
            self.fates[number].at = MADE
            self.results.append(number)

    @rule(data=st.data())
    def lost(self, data: st.DataObject) -> None:
        any_number = st.integers(0, len(self.fates) + 1)
        numbers = data.draw(st.lists(any_number, unique=True, max_size=5))
        working_on = data.draw(st.none() | any_number)
        self.lose(numbers, working_on)

    @precondition(lambda self: self.numbers(OUT))
    @rule(data=st.data())
    def lost_with_its_worker(self, data: st.DataObject) -> None:
        numbers = data.draw(st.lists(st.sampled_from(self.numbers(OUT)), unique=True, min_size=1))
        self.lose(numbers, numbers[0])

    def lose(self, numbers: list[int], working_on: int | None) -> None:
        hit = sorted(set(numbers) & set(self.numbers(OUT)))
        given_up = set()
        for number in hit:
            fate = self.fates[number]
            fate.deaths += number == working_on
            if fate.deaths >= self.max_tries:
                given_up.add(number)
            else:
                fate.at = WAITING
        assert {t.number for t in self.schedule.requeue_lost(numbers, working_on)} == given_up

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """Tickets of any age: only those that are out now go back."""
        fates = data.draw(st.lists(st.sampled_from(self.fates), max_size=5)) if self.fates else []
        self.schedule.give_back([fate.ticket for fate in fates])
        for fate in fates:
            if fate.at == OUT:
                fate.at = WAITING

    @precondition(lambda self: len(self.fates) >= self.patience)
    @rule(data=st.data())
    def end_queue(self, data: st.DataObject) -> None:
        queue = data.draw(st.integers(0, len(self.active) - 1))
        self.schedule.end_queue(queue)
        self.active[queue] = False
        for number in self.numbers(WAITING, OUT, queue=queue):
            self.fates[number].at = DROPPED

    @rule(prefetch=st.integers(-1, 8))
    def set_prefetch(self, prefetch: int) -> None:
        if prefetch < 1:
            with pytest.raises(ScheduleError, match=str(prefetch)):
                self.schedule.set_prefetch(prefetch)
            return
        self.schedule.set_prefetch(prefetch)
        self.prefetch = prefetch

    @rule()
    def pop(self) -> None:
        expected = self.deliverable()
        delivery = self.schedule.pop()
        if expected is None:
            assert delivery is None
            return
        assert delivery == MadeBatch(expected, self.fates[expected].queue, ("batch", expected))
        self.fates[expected].at = DELIVERED
        self.results.remove(expected)
        self.handed_out.append(expected)

    @precondition(lambda self: len(self.fates) >= self.patience)
    @rule()
    def end_of_sampler(self) -> None:
        self.schedule.end_sampler()
        self.sampler_ended = True

    # -- what always holds ---------------------------------------------------------------------------------------

    @invariant()
    def agrees_with_the_model(self) -> None:
        schedule = self.schedule
        assert schedule.room == self.room()
        assert schedule.finished == self.finished()
        assert schedule.prefetch == self.prefetch
        assert schedule.drawn == len(self.fates)
        assert schedule.delivered == len(self.handed_out)
        assert schedule.ready == len(self.results)
        assert schedule.in_flight == len(self.numbers(WAITING, OUT))
        assert [t.number for t in schedule.issued()] == self.numbers(OUT)
        for queue in range(len(self.active)):
            assert schedule.pending(queue) == len(self.numbers(WAITING, queue=queue))
            assert [t.number for t in schedule.open_tickets(queue)] == self.numbers(WAITING, OUT, queue=queue)
        for number, fate in enumerate(self.fates):
            open_now = fate.at in (WAITING, OUT)
            assert schedule.ticket(number) is (fate.ticket if open_now else None)
            assert fate.ticket.deaths == fate.deaths

    @invariant()
    def each_ticket_at_most_once_and_in_order(self) -> None:
        assert len(set(self.handed_out)) == len(self.handed_out)
        if self.in_order:
            assert self.handed_out == sorted(self.handed_out)

    def teardown(self) -> None:
        """Whatever happened: the rest can be made, and every ticket that was not dropped arrives."""
        if not hasattr(self, "schedule"):
            return
        self.end_of_sampler()
        for queue in range(len(self.active)):
            self.schedule.issue_tickets(100, queue)
        for number in reversed(self.numbers(WAITING, OUT)):
            self.finish(number)
        while self.deliverable() is not None:
            self.pop()
        assert self.schedule.pop() is None
        assert self.schedule.finished
        assert sorted(self.handed_out + self.numbers(DROPPED)) == list(range(len(self.fates)))


ScheduleMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestScheduleMachine = ScheduleMachine.TestCase


@pytest.mark.parametrize("bad", [{"prefetch": 0}, {"queues": -1}, {"max_tries": 0}])
def test_refuses_numbers_that_make_no_sense(bad: dict[str, int]) -> None:
    with pytest.raises(ScheduleError, match=f"{next(iter(bad))}={next(iter(bad.values()))}"):
        Schedule(**{"prefetch": 2, **bad})

"""Makes batches in the training process, and measures each.

There are four occasions: there are no workers and none are wanted; no local worker can be started; workers are seconds
away, and the training process stands in for them; or another machine owes a batch for too long. Only in the last two
cases may an error be due to the place, such as files that only the workers can read: then the workers make the batch,
and the error is theirs if it comes again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from dpex.core.engine_state import EngineState
from dpex.core.events import CannotStandIn, MadeHere
from dpex.core.schedule import Ticket
from dpex.core.stand_in_share import StandInShare
from dpex.engine.plan import EnginePlan
from dpex.engine.sample_errors import SampleErrors
from dpex.measure.consumer_time import Tally
from dpex.measure.sampling import SlowestSamples
from dpex.pools.base import PoolTimes
from dpex.system.clock import monotonic
from dpex.system.cpu_clocks import HelperThreads
from dpex.system.interrupts import is_interrupt
from dpex.worker.outcome import Stages

InlineMaker = Callable[[int, Any, int], tuple[Any, Stages]]
"""Makes a ticket, given its number, its index and the epoch."""


class MakingHere:
    """Used by the consumer's thread.

    ``times``: sums over the batches made here. ``stages``: load, collate, their CPU seconds and samples of the latest;
    ``dataset_s``: of its load, what the dataset took.
    ``unsettled``: a batch that was made in a worker's place, and is not in the schedule yet.
    """

    def __init__(
        self,
        plan: EnginePlan,
        state: EngineState,
        tally: Tally,
        errors: Counter[str],
        slow_samples: SlowestSamples,
        sample_errors: SampleErrors,
    ) -> None:
        self._plan = plan
        self._make_inline = plan.make_inline
        self.unsettled: MadeHere | None = None
        self._has_stood_in = False
        self._share = StandInShare()
        self._state = state
        self._tally = tally
        self._errors = errors
        self._slow_samples = slow_samples
        self._sample_errors = sample_errors
        self._helpers = HelperThreads()
        self.times = PoolTimes()
        self.stages: tuple[float, float, float, float, int] | None = None
        self.dataset_s = 0.0

    def make_next(self) -> None:
        """Make the next ticket that waits, if there is one; an error of its own is its delivery."""
        schedule = self._state.schedule
        for ticket in schedule.take(1):
            try:
                made, samples = self.make(ticket.number, ticket.index)
            except BaseException as error:
                schedule.give_back([ticket])
                if not is_interrupt(error):
                    schedule.done(ticket.number, None)
                    schedule.pop()
                raise
            schedule.done(ticket.number, lambda made=made: made, samples)

    def pause_s(self) -> float:
        """Seconds for which no logical worker is to be stood in for: what is made for one is made again."""
        return self._share.pause_s(monotonic()) if self._plan.logicals else 0.0

    def stand_in(self, ticket: Ticket) -> None:
        """Make this ticket, the next of its queue, in place of a worker that is on its way; or leave it to the worker.

        What follows from a batch may be done again, but a logical worker cannot make one again.
        """
        state, schedule, logical = self._state, self._state.schedule, ticket.queue
        maker, makes_once = self._plan.make_inline, self._plan.logicals > 0
        if makes_once:
            assert self._plan.make_stand_in is not None
            maker, self._has_stood_in = partial(self._plan.make_stand_in, logical), True
        schedule.take(1, logical)
        began = monotonic()
        try:
            made, samples = self.make(ticket.number, ticket.index, maker)
            self._share.made(began, monotonic())
            self.unsettled = MadeHere(ticket, lambda: made, samples)
        except BaseException as error:
            schedule.give_back([ticket])
            if makes_once or not is_interrupt(error):
                state.handle(CannotStandIn(str(error) or repr(error)))
            if is_interrupt(error):
                raise
        self.settle()

    def make_late(self, ticket: Ticket) -> None:
        """Make this ticket, which another machine owes; or leave it to that one."""
        try:
            made, samples = self.make(ticket.number, ticket.index, self._plan.make_inline)
            self.unsettled = MadeHere(ticket, lambda: made, samples)
        except BaseException as error:
            if is_interrupt(error):
                raise
            self._state.handle(CannotStandIn(str(error) or repr(error)))
        self.settle()

    def settle(self) -> None:
        """Hand over the batch that was made in a worker's place, if that was broken off."""
        if self.unsettled is not None:
            self._state.handle(self.unsettled)
            self.unsettled = None

    def rest(self) -> None:
        """Give back what standing in takes, if no further ticket can come."""
        if self._has_stood_in and not self._state.may_stand_in_later():
            self._plan.stop_standing_in()
            self._has_stood_in = False

    def make(self, number: int, index: Any, maker: InlineMaker | None = None) -> tuple[Any, int]:
        """A batch made in this process, and how many samples it has.

        ``maker``: another one than usual, whose errors are not the consumer's, and are not counted.
        """
        helpers = self._helpers
        if helpers.is_looking:
            helpers.begin()
        began = monotonic()
        try:
            made, stages = (maker or self._make_inline)(number, index, self._state.epoch)
        except BaseException as error:
            if maker is None:
                self._errors["batch"] += isinstance(error, Exception) and not isinstance(error, StopIteration)
            raise
        now = monotonic()
        service_s = now - began
        if helpers.is_looking or now >= helpers.due:
            helpers.end(now, service_s)
        load_s, collate_s, load_cpu_s, collate_cpu_s, samples, steps, slowest, failed = stages
        taken_s = service_s - collate_s  # what is neither the dataset's nor the collate function's is seeding: computed
        helped = helpers.ratio(service_s) if helpers.each_s else 0.0
        taken_cpu_s = load_cpu_s + taken_s - load_s + helped * taken_s
        collate_cpu_s += helped * collate_s
        counted = taken_s, collate_s, taken_cpu_s, collate_cpu_s, samples, steps, slowest, ()
        self.stages, self.dataset_s = counted[:5], load_s
        self.times.count(counted, taken_cpu_s + collate_cpu_s, 0.0)
        self._tally.made_here(taken_s, taken_cpu_s, collate_s)
        if slowest and slowest[0] > self._slow_samples.least_s:
            self._slow_samples.add(slowest[0], index, slowest[1])
        if self._sample_errors.is_on:
            self._sample_errors.made((self._state.epoch, number), samples, failed)
        self._state.rules.learn_here(service_s)
        return made, samples

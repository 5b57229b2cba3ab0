"""Makes tiny batches in the training process for calls of ``next()`` that are not measured, a few of them in a row.

What a call costs beside its batch (clocks, locks, looking for other threads, keeping the random states of the training
process) is then paid once for several batches. That is done where workers would have made batches ahead as well: for a
loader that is tuned, with a sampler that cannot tell how far ahead it is drawn. An error is raised in its place: those
before it are handed out first, and the batch that it belongs to is made again when its turn has come.

Used under the engine's lock.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Any

from dpex.core.engine_state import EngineState
from dpex.engine.drawing import Drawing
from dpex.engine.inprocess_sampling import length
from dpex.engine.plan import EnginePlan
from dpex.engine.unmeasured import UnmeasuredBatches
from dpex.measure.consumer_time import Tally
from dpex.pools.base import PoolTimes
from dpex.system.clock import monotonic
from dpex.system.interrupts import is_interrupt
from dpex.worker.in_process import Run

RUN_S = 0.0002
"""One call of ``next()`` takes as long as that, at most, to make batches ahead of those that follow."""
MOST_IN_A_ROW = 16
"""By then what is paid once is a few percent of what batches cost."""

_DEARER = 1.1
"""How much more a batch may take than those before it, for all that is believed at once."""
_LEAST_S = 1e-9
"""What a batch takes at least: a clock may stand still meanwhile, and a time is divided by this."""


class UnmeasuredCalls:
    """See the module. ``ahead``: what was made and not yet handed out; ``returned``: what comes before that."""

    def __init__(
        self,
        plan: EnginePlan,
        state: EngineState,
        drawing: Drawing,
        passing: UnmeasuredBatches,
        returned: deque[Any],
        tally: Tally,
        times: PoolTimes,
        errors: Counter[str],
    ) -> None:
        self.ahead: Run = deque()
        self._make_run = plan.make_run
        self._state = state
        self._drawing = drawing
        self._passing = passing
        self._stretch = passing.stretch
        self._returned = returned
        self._tally = tally
        self._times = times
        self._errors = errors
        self._most_drawn = MOST_IN_A_ROW if plan.may_read_ahead else 1
        self._most = self._most_drawn if plan.may_make_ahead else 1
        self._count = 1
        self._each_s = math.inf

    def make(self) -> bool:
        """Have a batch ``ahead``, where there is none; False: it is to be made by a call that is measured.

        Raises:
            Exception: The batch's own, or the sampler's.
        """
        stretch, entered = self._stretch, monotonic()
        if entered >= stretch.until or not stretch.left:
            return False
        inside_s, _ = stretch.spent
        stretch.spent = inside_s, entered
        try:
            if not self._drawing.drawn and not self._drawing.draw_some(self._most_drawn):
                stretch.spent = inside_s, 0.0
                return False
            self._make_in_a_row()
        except BaseException as error:
            self._passing.broke_off(error)
            raise
        stretch.left_at = now = monotonic()
        stretch.spent = inside_s + now - entered, 0.0
        self._learn((now - entered) / len(self.ahead))
        return True

    def _make_in_a_row(self) -> None:
        state, drawn, schedule = self._state, self._drawing.drawn, self._state.schedule
        try:
            count = min(self._count, self._stretch.left, len(drawn))
            self._make_run(drawn, count, (schedule.drawn, state.epoch), self.ahead)  # type: ignore[misc]
        except Exception as error:
            if is_interrupt(error):
                raise
            if not self.ahead:
                self._errors["batch"] += not isinstance(error, StopIteration)
                schedule.straight_through(drawn)
                raise

    def _learn(self, each_s: float) -> None:
        """A batch took that long, unless something held it up, as a busy machine does now and then."""
        self._each_s = max(_LEAST_S, min(each_s, self._each_s * _DEARER))
        self._count = int(max(1.0, min(self._most, RUN_S / self._each_s)))

    def stop(self) -> None:
        """Have the next call measured, as somebody wants something; from any thread."""
        self._stretch.until = 0.0

    def settle(self) -> None:
        """Have what is ahead come first, and count it as handed out: the next batch may be made by somebody else."""
        stretch, schedule, tally, ahead = self._stretch, self._state.schedule, self._tally, self.ahead
        if not ahead:
            return
        count, samples, latest = len(ahead), sum(length(index) for _, index in ahead), ahead[-1][1]
        batches = [made for made, _ in ahead]
        if stretch.size:  # from here on without a call: see `dpex.system.interrupts`
            stretch.left -= count
            stretch.index = latest
        else:
            tally.batches += count
            tally.samples += samples
            self._times.tickets += count
        schedule.drawn = schedule.next_number = schedule.drawn + count
        schedule.delivered += count
        self._returned += batches
        ahead.clear()

    def drop(self) -> None:
        """A new epoch begins: what was made of the one before is not wanted."""
        self.ahead.clear()

"""Makes tickets from the indices of a pass. An index comes from a sampler, or is a batch read from a stream."""

from __future__ import annotations

from dpex.engine.index_source import IndexSource
from dpex.schedule.engine_state import EngineState
from dpex.worker.decoded_stream import FailedRead


class Drawing:
    """See the module.

    Attributes:
        source: The indices of the present pass.
    """

    def __init__(self) -> None:
        self.source: IndexSource = IndexSource()

    def draw(self, state: EngineState, count: int) -> None:
        """Draw ``count`` tickets, or all that are left."""
        source, schedule = self.source, state.schedule
        indices = source.next_indices(schedule, count)
        for index in indices:
            ticket = schedule.draw(index)
            state.placement.dirty.add(ticket.queue)
            if type(index) is FailedRead:  # the error is the result of its ticket
                schedule.accept_result(ticket.number, index)
        state.rules.carried_bytes = source.largest_bytes
        if source.is_over and len(indices) < count:
            schedule.end_sampler()

    def pass_over(self, state: EngineState, ahead: frozenset[int]) -> None:
        """Draw tickets up to the last number in ``ahead``. Another run delivered the tickets in ``ahead`` out of order,
        so only the other tickets are made."""
        schedule, last = state.schedule, max(ahead)
        prefetch = schedule.prefetch
        schedule.set_prefetch(prefetch + last - schedule.drawn + 1)
        for index in self.source.next_indices(schedule, last - schedule.drawn + 1):
            if type(index) is FailedRead:
                raise index.error
            if schedule.drawn in ahead:
                schedule.pass_over(index)
            else:
                schedule.draw(index)
        schedule.set_prefetch(prefetch)
        state.all_queues_are_dirty()

"""How many tickets an agent may hold: as many as its way to the trainer carries in time. PURE.

Tickets are delivered in order, so that batches which queue on a slow way hold up those that others have made. By
Little's law an agent that holds ``n`` tickets answers each after ``n / rate`` seconds; what of that is neither work nor
the length of the way is queueing. As in TCP Vegas (Brakmo and Peterson, 1995), what is held shrinks by what queues
beyond a little, and grows while nothing does. An agent begins with a ticket for each worker, and has twice as many each
round until something queues: what is sent before the link is known holds up everything behind it.
"""

from __future__ import annotations

import math
from collections import deque

TOLERATED_S = 0.05
"""Queueing up to this is no reason to hold back: an agent that is busy with another batch causes as much."""
AHEAD = 2.0
"""Batches that may queue on the way, so that it is never idle: the one that travels, and one behind it."""
LEAST = 1.0
"""An agent always gets something, or it would never be known that the way has become faster."""
MORE_AT_FIRST, MORE = 1.0, 0.25
"""Tickets more for each answer that did not queue, of an agent that held all it may: twice as many per round until one
did, then a quarter more."""
REMEMBERED = 32
"""Answers that the rate is taken from."""
LONGEST_S = 4.0
"""An answer that is older says nothing of the rate now."""


class Pace:
    """One agent's. ``most``: tickets that it may hold, beside one for each worker at first."""

    def __init__(self) -> None:
        self.most = 0.0
        self._has_queued = False
        self._changed_at = -math.inf
        self._answers: deque[float] = deque(maxlen=REMEMBERED)

    def allows(self, held: int, more: int, workers: int) -> bool:
        """Whether an agent with so many workers that holds so many tickets may have so many more."""
        return not held or held + more <= (self.most if self._has_queued else max(self.most, workers))

    def rest(self) -> None:
        """Nothing is held any more, so that answers before and after are no series."""
        self._answers.clear()

    def answered(self, *, way_s: float, round_trip_s: float, held: int, sent_at: float, at: float) -> None:
        """A ticket came back.

        Args:
            way_s: What it took there and back, queueing included, without the time that the agent had it.
            round_trip_s: There and back when nothing queues.
            held: Tickets that are still held.
            sent_at: When it was sent.
            at: When it came.
        """
        rate = self._rate(at)
        if way_s > TOLERATED_S and rate is not None:
            queued_s = way_s - round_trip_s - 1.0 / rate
            allowed_s = max(TOLERATED_S, AHEAD / rate)
            if queued_s > allowed_s:
                self._shrink(held + 1 - rate * (queued_s - allowed_s / 2), sent_at, at)
                return
        if not self._has_queued:
            self.most = max(self.most, held + 1) + MORE_AT_FIRST
        elif held + 2 > self.most:  # it held as much as it may, which need not be a whole number
            self.most += MORE

    def _shrink(self, most: float, sent_at: float, at: float) -> None:
        """Hold so much; not for a ticket that was sent before the latest change, as it queued behind more."""
        if sent_at >= self._changed_at:
            self.most, self._changed_at, self._has_queued = max(LEAST, most), at, True

    def _rate(self, at: float) -> float | None:
        """Answers per second, lately; None if that is not known."""
        answers = self._answers
        answers.append(at)
        while answers[0] < at - LONGEST_S:
            answers.popleft()
        seconds = at - answers[0]
        return (len(answers) - 1) / seconds if seconds > 0 else None

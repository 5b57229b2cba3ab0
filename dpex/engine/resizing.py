"""Requests for other numbers of workers, or another prefetch.

Anybody may `ask`, from any thread. What was asked for last is granted by whoever holds the engine's lock.
"""

from __future__ import annotations

from collections import deque

from dpex.core.engine_state import EngineState
from dpex.core.events import Resize, Resized
from dpex.core.prefetch import Sizes
from dpex.engine.performer import Performer
from dpex.engine.supply import Supply


class Resizing:
    """See the module. ``requests``: the latest, until it was granted; those before it do not matter any more."""

    def __init__(self, state: EngineState, performer: Performer, supply: Supply) -> None:
        self.requests: deque[Sizes] = deque(maxlen=1)
        self._is_granting = False
        self._state = state
        self._performer = performer
        self._supply = supply

    @property
    def is_under_way(self) -> bool:
        """Whether the sizes are not yet those that were asked for."""
        return self._is_granting or bool(self.requests)

    def ask(self, sizes: Sizes) -> None:
        """Have these sizes within the next call of ``next()``."""
        self.requests.append(sizes)

    def grant(self) -> None:
        """Carry out the latest request."""
        if self._state.placement.instructions:
            self._performer.resume()
        if self.requests:
            self._is_granting = True
            try:
                request = self.requests[-1]
                self._performer.tell(Resize(request))
            finally:
                self._is_granting = False
            if self.requests[-1] is request:
                self.requests.pop()
        self._performer.tell(Resized())
        if self._performer.pools:
            self._supply.fill()

"""Workers of an iterator that has ended, kept for the loader's next one, as they make the first batches of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from dpex.engine.engine import Engine

if TYPE_CHECKING:
    from dpex.device.feed import Feed
    from dpex.device.pinning import Pinner
    from dpex.engine.next_epoch import NextEpoch


class KeptWorkers:
    """An engine, and all that ends with it. If no iterator takes it, it ends with this.

    Args:
        engine: The engine. It has made batches ahead.
        ends: Are called when it ends, such as by those who count its batches.
        pinner: Copies its batches to page-locked memory.
        next_epoch: Predicts what the next iterator draws.
        facts: What the workers hold of the loader. The next iterator must have equal facts.
    """

    def __init__(
        self,
        engine: Engine,
        ends: tuple[Callable[[], None], ...],
        pinner: Pinner | None,
        next_epoch: NextEpoch,
        facts: object,
    ) -> None:
        self.engine = engine
        self.ends = ends
        self.pinner = pinner
        self.next_epoch = next_epoch
        self.facts = facts
        self._finalizer = weakref.finalize(self, end, engine, ends, pinner, None)

    def fits(self, facts: object) -> bool:
        """Return True if an iterator that begins now, of a loader with these facts, may have the workers."""
        if not self.next_epoch.is_right():
            return False
        if facts is None or facts != self.facts or self.engine.closed:
            self.next_epoch.missed()
            return False
        return True

    def drop(self) -> None:
        """End the workers, and count what they made in vain. Idempotent."""
        self.engine.drop_ahead()
        self.close()

    def close(self) -> None:
        """End the workers. Idempotent."""
        self._finalizer()

    def taken(self) -> None:
        """Leave all to the iterator that has taken it."""
        self._finalizer.detach()


def end(engine: Engine, ends: Iterable[Callable[[], None]], pinner: Pinner | None, feed: Feed | None) -> None:
    """Close an engine and all that ends with it."""
    for each in ends:
        each()
    if pinner is None:
        engine.close()
    else:
        pinner.close(last_act=partial(_end_copies, feed, engine))


def _end_copies(feed: Feed | None, engine: Engine) -> None:
    """Wait for copies under way, then release the memory that they read."""
    try:
        if feed is not None:
            feed.settle()
    finally:
        engine.close()

"""How the workers of the local pool are packed into processes. PURE.

As long as there are no more workers than CPUs each is a process. Where the dataset allows it, further workers are
threads of those processes, spread evenly. Before that some process must have made a ticket without moving a global
generator; once one moved, and where processes with several workers keep dying, every new worker is a process again
(*apart*).

A `Packing` outlives a pool: what was learned in one epoch holds in the next.
"""

from __future__ import annotations

from collections.abc import Mapping

NEW, LATER = -1, -2
DEATHS_TOGETHER = 2
"""Deaths in one epoch of processes with several workers at work until new workers are apart: any may have been at
fault."""


class Packing:
    """``most_processes``: processes before workers become threads; None: never."""

    def __init__(self, most_processes: int | None = None) -> None:
        self._most = most_processes
        self._tried = False
        self._deaths = 0

    @property
    def together(self) -> bool:
        """Whether a new process may get several workers."""
        return self._most is not None

    @property
    def untried(self) -> bool:
        """Whether it is still to be seen that a ticket leaves the global generators alone."""
        return self._most is not None and not self._tried

    def tried(self) -> None:
        """A ticket left the global generators alone."""
        self._tried = True

    def keep_apart(self) -> bool:
        """No further worker shares a process; False if that was so before."""
        before, self._most = self._most, None
        return before is not None

    def new_epoch(self) -> None:
        """Deaths of the last epoch do not count any more."""
        self._deaths = 0

    def died_together(self) -> bool:
        """A process died while several of its workers worked; True if workers are apart from now on for it."""
        self._deaths += 1
        return self._deaths >= DEATHS_TOGETHER and self.keep_apart()

    def place(self, workers_of: Mapping[int, int]) -> int:
        """Where the next worker goes, given the workers of each process that takes more: one of those, `NEW` or
        `LATER`."""
        if self._most is None or len(workers_of) < self._most:
            return NEW
        if not self._tried:
            return LATER
        return min(workers_of, key=lambda number: workers_of[number])

"""Changes of settings that did not help, and for how long they are not tried again. PURE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dpex.autotune.types import Settings
from dpex.core.names import LOCAL, REMOTE

_LONGEST = 10
"""A change that fails again and again is refused for so many times the first time at most: the work may have changed
without anybody noticing."""


class Change(NamedTuple):
    """What sort of change it is, and to which number. Changes of one sort are remembered together."""

    kind: str
    value: int = 0


TO_IN_PROCESS = Change("to in-process")


def change(old: Settings, new: Settings) -> Change:
    """The sort of change that leads from ``old`` to ``new``."""
    if not new.workers:
        return TO_IN_PROCESS
    if not old.workers:
        return Change("to workers")
    for pool in (REMOTE, LOCAL):
        more = getattr(new, pool) - getattr(old, pool)
        if more:
            return Change(f"{'more' if more > 0 else 'fewer'} {pool}", getattr(new, pool))
    return Change("deeper" if new.prefetch > old.prefetch else "shallower", new.prefetch)


@dataclass
class _Failure:
    until: float
    times: int
    value: int


class FailedChanges:
    """See the module. ``keep_s``: for how long a first failure is remembered; twice as long with each further one."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._failures: dict[str, _Failure] = {}

    def remember(self, failed: Change, now: float) -> None:
        """This change did not help."""
        times = self._failures[failed.kind].times + 1 if failed.kind in self._failures else 1
        keep_s = self._keep_s * min(_LONGEST, 2 ** (times - 1))
        self._failures[failed.kind] = _Failure(now + keep_s, times, failed.value)

    def forget(self) -> None:
        """The work has changed: everything may be tried again."""
        self._failures.clear()

    def refused_for_s(self, wanted: Change, now: float) -> float:
        """Seconds for which such a change is not tried again; 0 if it may be tried.

        Where fewer workers were too few, a larger number of them may still do.
        """
        failure = self._failures.get(wanted.kind)
        if failure is None or now >= failure.until:
            return 0.0
        refused = not wanted.kind.startswith("fewer") or wanted.value <= failure.value
        return failure.until - now if refused else 0.0

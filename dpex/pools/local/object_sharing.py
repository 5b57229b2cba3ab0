"""The fork server's decision whether and when its workers share the dataset's objects.

The search (`dpex.pools.local.shared_objects`) begins with the first request for a worker. For `FIRST_S` seconds that
request waits for it, so most datasets are shared by all workers. If the search needs longer, the first worker starts
without what is not found yet, and the others wait until it has ended.

The search has a limit in seconds. It copies the pages that it writes, and workers then copy none of them: the measured
time of these copies, for all workers on the CPUs that there are, does not count. A single worker has the only copy
anyway, so a pool of one shares nothing until it requests a second worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpex.pools.local.shared_objects import ObjectSearch, why_unsupported
from dpex.schedule.events import SharedObjects
from dpex.system.clock import monotonic
from dpex.system.cpus import usable_cpus

FIRST_S = 0.08
"""Seconds for which the first worker waits. The first batch may come 0.1 s later, of which the last step of the search
and the copies of pages that it causes take a part."""
_SLICE_S = 0.02
"""Seconds between two checks of requests."""
SWITCHED_OFF = "WorkerConfig(share_objects=False)"


class Sharing:
    """Searches between the requests of a fork server, for ``most_s`` seconds; None: the user wants no sharing.

    ``root`` is the dataset, or its common part, which took ``unpickling_s`` seconds to unpickle.
    """

    def __init__(
        self,
        root: Any,
        most_s: float | None,
        num_workers: int,
        unpickling_s: float = 0.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._root, self._most_s, self._num_workers = root, most_s or 0.0, num_workers
        self._unpickling_s, self._clock = unpickling_s, clock
        self._search: ObjectSearch | None = None
        self._requests = 0
        self._has_begun = False
        self._why_not = SWITCHED_OFF if most_s is None else _why_has_threads() or why_unsupported()
        self._is_reported = False

    @property
    def is_searching(self) -> bool:
        """True if `advance` has work to do."""
        return self._search is not None

    def must_wait(self) -> bool:
        """Return True if a worker that is requested must wait until the search has ended; begin the search."""
        self._requests += 1
        if self._why_not:
            return False
        if not self._has_begun and max(self._requests, self._num_workers) > 1:
            self._has_begun = True
            self._search = ObjectSearch(self._root, self._clock)
            self._search.advance(min(FIRST_S, self._most_s))
        return self._search is not None and (self._requests > 1 or self._is_at_end(self._search))

    def advance(self) -> SharedObjects | None:
        """Search on for a moment; return what is shared, once that is known."""
        if self._why_not and not self._is_reported:
            self._is_reported = True
            return SharedObjects(why_not=self._why_not)
        search = self._search
        if search is None:
            return None
        if not self._is_at_end(search):
            search.advance(_SLICE_S)
        if not self._is_at_end(search):
            return None
        self._search = None
        return search.share()

    def abandon(self) -> None:
        """End the search in a forked process."""
        if self._search is not None:
            self._search.abandon()
            self._search = None

    def _is_at_end(self, search: ObjectSearch) -> bool:
        saved_s = self._unpickling_s + max(1.0, self._num_workers / usable_cpus()) * search.copying_s
        return search.is_complete or search.seconds - saved_s >= self._most_s


def _why_has_threads() -> str:
    """Return why the search cannot run here: another thread could count references while the search changes counts."""
    tasks = Path("/proc/self/task")
    count = len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()
    return f"the process that forks the workers has {count} threads" if count > 1 else ""

"""The fork server's decision whether and when its workers share the dataset's objects.

The search (`dpex.pools.local.shared_objects`) begins with the first request for a worker. For `FIRST_S` seconds that
request waits for it, so most datasets are shared by all workers. If the search needs longer, the first worker starts
without what is not found yet, and the others wait until it has ended.

It ends before it lengthens an epoch by more than `SEARCH_RATIO`. The epoch is the last one or, in the first, what the
first worker's speed predicts. The search copies the pages that it writes, and workers then copy none of them: the
measured time of these copies, for all workers on the CPUs that there are, counts as saved. A single worker has the only
copy anyway, so a pool of one shares nothing until it requests a second worker.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpex.pools.local.shared_objects import ObjectSearch, why_unsupported
from dpex.pools.local.worker_process import BOARD_ROW
from dpex.schedule.events import SharedObjects
from dpex.system.cpus import usable_cpus
from dpex.worker.setup import SEARCH_RATIO, ObjectSharing

FIRST_S = 0.08
"""Seconds for which the first worker waits. The first batch may come 0.1 s later, of which the last step of the search
and the copies of pages that it causes take a part."""
_PACE_S = 0.05
"""Seconds for which the search goes on in any case while the first worker's speed shows."""
_SLICE_S = 0.02
"""Seconds between two checks of requests and of the first worker's progress."""
SWITCHED_OFF = "WorkerConfig(share_objects=False)"


class Sharing:
    """Searches between the requests of a fork server, if there is a ``request`` of the user's.

    ``root`` is the dataset, or its common part, which took ``unpickling_s`` seconds to unpickle. ``is_one_queue``: any
    worker takes any ticket.
    """

    def __init__(
        self,
        root: Any,
        request: ObjectSharing | None,
        num_workers: int,
        is_one_queue: bool,
        unpickling_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._root, self._request = root, request or ObjectSharing()
        self._num_workers, self._stride = num_workers, 1 if is_one_queue else max(1, num_workers)
        self._unpickling_s, self._clock = unpickling_s, clock
        self._search: ObjectSearch | None = None
        self._pace: Pace | None = None
        self._requests = 0
        self._has_begun = False
        self._why_not = SWITCHED_OFF if request is None else _why_has_threads() or why_unsupported()
        self._is_reported = False

    @property
    def is_searching(self) -> bool:
        """True if `advance` has work to do."""
        return self._search is not None

    def must_wait(self, arguments: tuple[int, int, int], fds: list[int]) -> bool:
        """Return True if a worker that is requested must wait until the search has ended; begin the search.

        ``arguments`` are bytes of the board, number of the worker, place of its row; ``fds`` its socket and the board.
        """
        self._requests += 1
        if self._why_not:
            return False
        if not self._has_begun and max(self._requests, self._num_workers) > 1:
            self._has_begun = True
            self._search = ObjectSearch(self._root, self._clock)
            self._search.advance(min(FIRST_S, self._most_s()))
        if self._search is None:
            return False
        if self._requests > 1 or self._is_at_end():
            return True
        board, row = mmap.mmap(fds[1], arguments[0]), arguments[2]
        self._pace = Pace(lambda: int(BOARD_ROW.unpack_from(board, row)[1]), self._stride)
        return False

    def advance(self) -> SharedObjects | None:
        """Search on for a moment; return what is shared, once that is known."""
        if self._why_not and not self._is_reported:
            self._is_reported = True
            return SharedObjects(why_not=self._why_not)
        if self._search is None:
            return None
        if not self._is_at_end():
            self._search.advance(_SLICE_S)
        if not self._is_at_end():
            return None
        found, self._search, self._pace = self._search.share(), None, None
        return found

    def abandon(self) -> None:
        """End the search in a forked process."""
        if self._search is not None:
            self._search.abandon()
            self._search = None

    def _is_at_end(self) -> bool:
        search = self._search
        return search is None or search.is_complete or search.seconds - self._saved_s(search) >= self._most_s()

    def _saved_s(self, search: ObjectSearch) -> float:
        """Return the seconds by which the epoch is shorter, as workers do not copy what was found."""
        each = max(1.0, self._num_workers / usable_cpus())
        return self._unpickling_s + each * search.copying_s

    def _most_s(self) -> float:
        """Return the seconds that the search may take, given the present measurements."""
        if self._request.most_s is not None:
            return self._request.most_s
        if self._pace is None:
            return FIRST_S + _PACE_S
        batch_s = self._pace.batch_s(self._clock())
        epoch_s = self._request.batches * batch_s / max(1, self._num_workers)
        return max(FIRST_S + _PACE_S, SEARCH_RATIO * epoch_s)


def _why_has_threads() -> str:
    """Return why the search cannot run here: another thread could count references while the search changes counts."""
    tasks = Path("/proc/self/task")
    count = len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()
    return f"the process that forks the workers has {count} threads" if count > 1 else ""


class Pace:
    """The seconds that the first worker takes for a batch, by looks at the ticket that it works on.

    A worker whose tickets are done may have to wait for the workers that wait for the search. So an interval between
    two looks counts only if the worker works at both. ``working_on`` returns the worker's ticket, from 1 on; 0: none.
    ``stride``: distance from one ticket of the worker to its next one.
    """

    def __init__(self, working_on: Callable[[], int], stride: int) -> None:
        self._working_on, self._stride = working_on, stride
        self._first = self._latest = self._last = 0
        """The first ticket that was seen, the highest one, and that of the last look."""
        self._looked_s = self._busy_s = 0.0

    def batch_s(self, now: float) -> float:
        """Look at the worker; return its seconds per batch, at least what the first batch has taken so far."""
        number = self._working_on()
        self._first = self._first or number
        self._latest = max(self._latest, number)
        if number and self._last:
            self._busy_s += now - self._looked_s
        self._last, self._looked_s = number, now
        return self._busy_s / max(1, (self._latest - self._first) // self._stride)

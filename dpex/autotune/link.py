"""The way to remote workers and back: how long it is, what it carries, and what queues on it. PURE.

What is drawn and in nobody's hands is under way, or waits for a worker (Little's law); the least of that is the way
there and back. Where remote workers have time to spare nothing waits for them, and what is more than the way explains
queues on it.

Where machines tell for how much of the time something of theirs was under way, that says more: a way that is never idle
carries what it can, and one that often is carries more. Bytes are those of batches, also where they travel compressed.
"""

from __future__ import annotations

import math
from collections import deque

from dpex.autotune.constants.measuring import LINK
from dpex.autotune.types import Sample


class Link:
    """See the module.

    ``jammed``: batches that queued on the way in the latest window. A batch counts as work when it comes, so that this
    is below 0 where the window has work of earlier ones: it is right on average. ``is_stuck``: nothing comes at all.
    """

    def __init__(self) -> None:
        self._travel_s = math.inf
        self._round_trip_s = math.inf
        self._travels_s: deque[float] = deque(maxlen=LINK.windows)
        self._busy: deque[tuple[float, float]] = deque(maxlen=LINK.windows)
        self._carried = 0.0
        self._most = math.inf
        self._since_s = math.inf
        self._begun_s = 0.0
        """What all workers take for a batch each."""
        self._latest: deque[tuple[float, float, float]] = deque(maxlen=LINK.windows)
        """Bytes of batches, seconds of machines that were sending, and seconds of machines."""
        self.jammed = 0.0
        self.is_stuck = False

    @property
    def travel_s(self) -> float:
        """There and back, 0 if unknown."""
        least_s = min(self._travel_s, self._round_trip_s)
        return least_s if math.isfinite(least_s) else 0.0

    def rate(self, batch_bytes: float) -> float:
        """Batches per second that it is taken to carry."""
        if batch_bytes <= 0:
            return math.inf
        carried = min(self._most, max(LINK.presumed_bytes_per_s, LINK.more * self._carried))
        return carried / batch_bytes

    def resized(self) -> None:
        """There is another number of workers, as the window shows that is added next."""
        self._since_s = -math.inf
        self._travels_s.clear()
        self._busy.clear()
        self._latest.clear()

    def add(self, sample: Sample) -> None:
        """Take a window in."""
        remote, seconds = sample.remote, max(1e-9, sample.seconds)
        began_s, self._since_s = self._since_s, max(0.0, self._since_s + seconds)
        self.jammed, self.is_stuck = 0.0, False
        self._round_trip_s = remote.round_trip_s if remote.links and remote.round_trip_s > 0 else math.inf
        if not remote.running or remote.running < remote.requested:
            return
        if not remote.tickets:
            self.is_stuck = _is_stuck(sample)
            self.jammed = float(sample.in_flight) if self.is_stuck else 0.0
            return
        rate = remote.tickets / seconds
        nbytes = remote.tickets * sample.batch_bytes
        self._measure(nbytes, remote.sending_s, remote.links * seconds, remote.links)
        self._carried = max(self._carried, nbytes / seconds)
        if began_s * remote.tickets < LINK.first_services * remote.busy_s:
            return  # workers have begun batches that count as work only once they come
        at_work = (remote.busy_s + sample.local.busy_s) / seconds
        away = sample.in_flight - at_work
        self._travels_s.append(max(0.0, away) / rate)
        self._busy.append((remote.busy_s, remote.running * seconds))
        self._begun_s = remote.running * remote.busy_s / remote.tickets
        if len(self._travels_s) == LINK.windows:
            self._travel_s = min(self._travel_s, sum(self._travels_s) / LINK.windows)
            if self._have_time_to_spare() and sample.wait_s > 0 and not self._is_roomy:
                self.jammed = away - min(self.travel_s, LINK.longest_way_s) * rate

    def _measure(self, nbytes: float, sending_s: float, whole_s: float, links: int) -> None:
        """What came while machines were sending for how long."""
        if not links:
            self._latest.clear()
            self._most = math.inf
            return
        self._latest.append((nbytes, sending_s, whole_s))
        nbytes, sending_s, whole_s = self._lately
        if whole_s < LINK.measured_s * links:
            return
        if sending_s >= LINK.full * whole_s:
            self._most = nbytes * links / whole_s
        elif sending_s < LINK.roomy * whole_s:
            self._most = math.inf

    @property
    def _lately(self) -> tuple[float, float, float]:
        """The sums of `_latest`."""
        nbytes, sending_s, whole_s = map(sum, zip((0.0, 0.0, 0.0), *self._latest, strict=True))
        return nbytes, sending_s, whole_s

    @property
    def _is_roomy(self) -> bool:
        """Whether machines tell that their ways were mostly idle in the latest windows: nothing queues there."""
        _, sending_s, whole_s = self._lately
        return sending_s < LINK.roomy * whole_s

    def _have_time_to_spare(self) -> bool:
        """Whether remote workers surely have, over all windows: in a short one few batches come by chance.

        Each may be at a batch that does not count yet.
        """
        busy_s = sum(busy_s for busy_s, _ in self._busy) + self._begun_s
        return busy_s < LINK.idle * sum(whole_s for _, whole_s in self._busy)


def _is_stuck(sample: Sample) -> bool:
    """Whether nobody works, nothing comes from the cluster, and more is in flight than workers can be at."""
    is_idle = sample.local.busy_s <= LINK.stuck * sample.seconds * sample.local.running
    is_blocked = sample.head_s > LINK.stuck * sample.seconds
    return is_idle and is_blocked and sample.in_flight > sample.local.running + sample.remote.running

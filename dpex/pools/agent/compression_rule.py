"""Whether an agent compresses what it sends, and at which level: only where the way limits it and it pays. PURE.

A byte of a batch costs seconds at each stage: a worker makes it, CPUs are at it, the agent's one thread compresses it,
the way carries what is left of it, and the trainer's one thread decompresses it. The stages are at work at the same
time, so the longest of these costs is the time of the whole. It pays to compress where that makes the longest one
shorter, and where both ends together spend less time on it than the sending takes less. For such a comparison all costs
are those of a byte before it is compressed.

What is not measured (a trainer that has no CPU to spare for decompressing, say) may make that a mistake, so that
compressing is begun on trial: it ends unless more batches come than came without.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

FULL = 0.9
"""A way that something is on for this share of the time limits its agent: the tuner takes it to be full then, too."""
ROOMY = 0.75
"""A way that would be busy for less than this without compression does not; between the two nothing changes."""
QUEUED = 0.5
"""The same needs something to wait for the way in this share of looks: on a long one something is always under way."""
MOST_REMAINING = 0.95
"""A buffer of which more remains is sent as it is, so that it need not be decompressed."""
GAIN = 0.9
"""The part of the time that must remain at most, so that it begins: less is lost in the noise of what is measured."""
TRIAL_WINDOWS = 5
"""Windows that a trial lasts, one second or four batches each: the pace of the way has followed by then, and a mistake
has cost little."""
PAUSE_S, LONGEST_PAUSE_S = 60.0, 960.0
"""After a trial that failed nothing is compressed for so long, and for twice as long after each further one: twelve
times as long as a trial at least, so that mistakes take some hundredths of the time, and soon less."""


@dataclass(frozen=True, kw_only=True)
class AgentFlow:
    """What an agent did in some ``seconds``.

    batch_bytes: of batches that it sent, before compression. sent_bytes: of what arrived; sending_s: how long something
    was under way. queued: share of the looks in which something waited to be sent. busy_s and cpu_s: wall and CPU
    seconds in which its ``workers`` made these batches, on so many ``cpus``.
    """

    seconds: float
    batch_bytes: int
    sent_bytes: int
    sending_s: float
    queued: float
    busy_s: float
    cpu_s: float
    workers: int
    cpus: float

    @property
    def way_s(self) -> float:
        """Seconds that the way needs for a byte that travels; 0 if that is not known."""
        return self.sending_s / self.sent_bytes if self.sent_bytes > 0 else 0.0

    @property
    def pressure(self) -> float:
        """For which share of the time the way would be busy with these batches if none were compressed."""
        return self.way_s * self.rate

    @property
    def rate(self) -> float:
        """Bytes of batches per second."""
        return self.batch_bytes / self.seconds if self.seconds > 0 else 0.0


class LevelCost(NamedTuple):
    """What a level makes of a buffer. remaining: the part that travels. compress_s, decompress_s: seconds of a thread
    for a byte of the buffer, waits for a CPU included."""

    level: int
    remaining: float
    compress_s: float
    decompress_s: float


def is_limiting(flow: AgentFlow, *, compresses: bool) -> bool:
    """Whether the way limits what comes from this agent, or would do so if it did not compress."""
    if compresses:
        return flow.pressure >= ROOMY
    return flow.pressure >= FULL and flow.queued >= QUEUED


def best_level(flow: AgentFlow, costs: Iterable[LevelCost], now: int | None) -> int | None:
    """The level at which to compress such a buffer from now on, None if not at all; ``now``: the level so far."""
    if not flow.batch_bytes or not is_limiting(flow, compresses=now is not None):
        return None
    paying = [(_time(flow, cost), cost.level) for cost in costs if _saves_time(flow, cost)]
    if not paying:
        return None
    fastest_s, level = min(paying)
    plain_s = _plain_time(flow)
    return level if fastest_s < (plain_s if now is not None else GAIN * plain_s) else None


def _saves_time(flow: AgentFlow, cost: LevelCost) -> bool:
    saved_s = flow.way_s * (1.0 - cost.remaining)
    return cost.remaining <= MOST_REMAINING and cost.compress_s + cost.decompress_s < saved_s


def _plain_time(flow: AgentFlow) -> float:
    return max(flow.way_s, _making(flow), flow.cpu_s / flow.batch_bytes / flow.cpus)


def _making(flow: AgentFlow) -> float:
    return flow.busy_s / flow.batch_bytes / max(1, flow.workers)


def _time(flow: AgentFlow, cost: LevelCost) -> float:
    """Seconds for a byte of such buffers if they are compressed so."""
    cpu_s = (flow.cpu_s / flow.batch_bytes + cost.compress_s) / flow.cpus
    return max(flow.way_s * cost.remaining, _making(flow), cpu_s, cost.compress_s, cost.decompress_s)


class Trial:
    """Whether compressing brings more batches than came without."""

    def __init__(self) -> None:
        self._plain_rate = 0.0
        self._rates: list[float] = []
        self._resumes_at = -math.inf
        self._pause_s = PAUSE_S

    def allows(self, flow: AgentFlow, *, compresses: bool, now: float) -> bool:
        """Take in a window that ends now; whether what follows may be compressed."""
        if not compresses:
            if not self._rates:  # else compressing ended in this window, which is neither the one nor the other
                self._plain_rate = flow.rate
            self._rates.clear()
            return now >= self._resumes_at
        if len(self._rates) <= TRIAL_WINDOWS:
            self._rates.append(flow.rate)
        return len(self._rates) != TRIAL_WINDOWS or self._has_passed(now)

    def _has_passed(self, now: float) -> bool:
        """The first window does not count: what was sent in it had been made before."""
        counted = self._rates[1:]
        if sum(counted) > len(counted) * self._plain_rate:
            self._pause_s = PAUSE_S
            return True
        self._resumes_at = now + self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        return False

"""Compresses what an agent sends, as far as the rule finds that it pays; see `compression_rule`.

While the way limits the agent, a part of a buffer is compressed now and then, to see what that would bring. Buffers at
the same place of different batches are taken to be alike: what does not compress is looked at again after seconds, and
what is compressed shows by itself what it costs. Small buffers are left alone.

Costs are wall times of this thread: where it has to wait for a CPU, compressing takes as long as that.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dpex.pools.agent.compression_rule import MOST_REMAINING, AgentFlow, LevelCost, Trial, best_level, is_limiting
from dpex.pools.agent.traffic import Traffic
from dpex.system.clock import Clock, monotonic
from dpex.transport.compression import Compressed, Compressor, decompress

LEVELS = (3, 1, -5)
"""Zstandard's usual level, the least one that looks at how frequent symbols are, and one about as fast as LZ4."""
SMALLEST_BYTES = 64 << 10
"""A smaller buffer is a packet or two more, and the work of Python for it takes as long as compressing it."""
DECIDE_EVERY_S = 1.0
"""Four times as long as the connection's counts take to be new."""
LEAST_BATCHES, LONGEST_WINDOW_S = 4, 8.0
"""A decision waits for so many batches, as a rate that is taken from one or two of them is none; but not for longer."""
LOOK_AGAIN_S = 5.0
"""After so long a buffer is tried again; a try takes about 4 ms, which is less than a thousandth of that."""
SAMPLE_PIECES, SAMPLE_PIECE_BYTES = 4, 64 << 10
"""What is tried of a buffer: some pieces at equal distances, each with room for repetitions."""
MOST_PLACES = 16
"""Places in a batch that are told apart."""
WEIGHT = 0.25
"""Of a buffer in what is known of those at its place: the mean of about the latest four."""


@dataclass
class _Place:
    """Buffers at one place of batches: what levels cost, the level in use, and when they are tried next."""

    costs: dict[int, LevelCost] = field(default_factory=dict)
    level: int | None = None
    due_at: float = 0.0


class BufferCompressor:
    """See the module. Used by the agent's one thread.

    Args:
        cpus: that the agent and its workers have.
        between: called now and then while a large buffer is compressed.
        clock: the time.
        stopwatch: the same, for how long compressing takes.
    """

    def __init__(
        self,
        cpus: float,
        between: Callable[[], Any],
        clock: Clock = monotonic,
        stopwatch: Clock = monotonic,
    ) -> None:
        self._cpus = cpus
        self._between = between
        self._clock = clock
        self._stopwatch = stopwatch
        self._compressors = {level: Compressor(level) for level in LEVELS}
        self._places: dict[int, _Place] = {}
        self._flow: AgentFlow | None = None
        self._trial = Trial()
        self._begin()

    def _begin(self) -> None:
        self._began_at = self._clock()
        self._batches = self._batch_bytes = self._sent_bytes = self._looks = self._queued = 0
        self._sending_s = self._busy_s = self._cpu_s = 0.0

    @property
    def levels(self) -> dict[int, int]:
        """The level in use at each place that is compressed."""
        return {number: place.level for number, place in self._places.items() if place.level is not None}

    # -- what is known of the way ------------------------------------------------------------------------------------

    def made(self, nbytes: int, busy_s: float, cpu_s: float) -> None:
        """A batch of that size will be sent, which a worker was busy with for so long."""
        self._batches += 1
        self._batch_bytes += nbytes
        self._busy_s += busy_s
        self._cpu_s += cpu_s

    def look(self, traffic: Traffic, waiting_bytes: int, workers: int) -> None:
        """What the connection has carried since the last look, what waits for it, and how many workers there are."""
        self._sent_bytes += traffic.sent_bytes
        self._sending_s += traffic.sending_s
        self._looks += 1
        self._queued += waiting_bytes > 0
        seconds = self._clock() - self._began_at
        if seconds >= (DECIDE_EVERY_S if self._batches >= LEAST_BATCHES else LONGEST_WINDOW_S):
            self._decide(seconds, workers)
            self._begin()

    def _decide(self, seconds: float, workers: int) -> None:
        flow = AgentFlow(
            seconds=seconds,
            batch_bytes=self._batch_bytes,
            sent_bytes=self._sent_bytes,
            sending_s=self._sending_s,
            queued=self._queued / self._looks,
            busy_s=self._busy_s,
            cpu_s=self._cpu_s,
            workers=workers,
            cpus=self._cpus,
        )
        compresses = bool(self.levels)
        is_allowed = self._trial.allows(flow, compresses=compresses, now=self._clock())
        self._flow = flow if is_allowed and is_limiting(flow, compresses=compresses) else None
        for place in self._places.values():
            self._choose(place)

    def _choose(self, place: _Place) -> None:
        flow = self._flow
        place.level = None if flow is None else best_level(flow, place.costs.values(), place.level)

    # -- buffers -----------------------------------------------------------------------------------------------------

    def compress(self, number: int, buffer: Any) -> Any:
        """The buffer at that place of a batch, as it is or `Compressed`."""
        if self._flow is None or buffer.nbytes < SMALLEST_BYTES:
            return buffer
        place = self._places.setdefault(min(number, MOST_PLACES - 1), _Place())
        data = memoryview(buffer).cast("B")
        if self._clock() >= place.due_at:
            self._try(place, data)
        if place.level is None:
            return buffer
        found, cost = self._compressed(place.level, data, self._between)
        place.costs[cost.level] = _blended(place.costs[cost.level], cost)
        if cost.remaining <= MOST_REMAINING:
            return found
        place.due_at = self._clock()  # what comes now is not as before: other levels are not what they were, either
        return buffer

    def _compressed(self, level: int, data: memoryview, after: Callable[[], Any]) -> tuple[Compressed, LevelCost]:
        """The compressed buffer and what that took, without what happened between its pieces."""
        between_s = 0.0

        def after_piece() -> None:
            nonlocal between_s
            began = self._stopwatch()
            after()
            between_s += self._stopwatch() - began

        began = self._stopwatch()
        found = self._compressors[level].compress(data, after_piece)
        spent_s = self._stopwatch() - began - between_s
        return found, LevelCost(level, found.travelling_bytes / data.nbytes, spent_s / data.nbytes, 0.0)

    def _try(self, place: _Place, data: memoryview) -> None:
        """See what each level makes of a part of a buffer."""
        sample = memoryview(_sample(data))
        target = memoryview(bytearray(sample.nbytes))
        for level in LEVELS:
            found, cost = self._compressed(level, sample, _nothing)
            whole = io.BytesIO(b"".join(found.pieces))
            began = self._stopwatch()
            decompress(whole.read, found.travelling_bytes, target)
            spent_s = self._stopwatch() - began
            place.costs[level] = cost._replace(decompress_s=spent_s / sample.nbytes)
        place.due_at = self._clock() + LOOK_AGAIN_S
        self._choose(place)


def _blended(known: LevelCost, new: LevelCost) -> LevelCost:
    """What is known of a level with another buffer, whose decompression was not measured."""
    return LevelCost(
        known.level,
        known.remaining + WEIGHT * (new.remaining - known.remaining),
        known.compress_s + WEIGHT * (new.compress_s - known.compress_s),
        known.decompress_s,
    )


def _sample(data: memoryview) -> bytes:
    if data.nbytes <= SAMPLE_PIECES * SAMPLE_PIECE_BYTES:
        return bytes(data)
    step = (data.nbytes - SAMPLE_PIECE_BYTES) // (SAMPLE_PIECES - 1)
    return b"".join(data[at * step : at * step + SAMPLE_PIECE_BYTES] for at in range(SAMPLE_PIECES))


def _nothing() -> None:
    """Nothing happens between the pieces of a sample."""

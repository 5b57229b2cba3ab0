"""A few of many: a fair choice of values, and the slowest batches. Pure, but for random numbers of its own."""

from __future__ import annotations

from heapq import heappush, heapreplace
from random import Random
from typing import Any, NamedTuple

KEPT = 512
SLOWEST = 8


class Reservoir:
    """Each value that was added is among the kept with the same chance (Vitter, "Random Sampling with a Reservoir",
    1985, algorithm R). Of periodic values every so-manyth would be no fair choice."""

    __slots__ = ("_random", "kept", "seen")

    def __init__(self) -> None:
        self.kept: list[float] = []
        self.seen = 0
        self._random = Random(0).random

    def add(self, value: float) -> None:
        """One more."""
        self.seen += 1
        if self.seen <= KEPT:
            self.kept.append(value)
        elif (place := int(self._random() * self.seen)) < KEPT:
            self.kept[place] = value


class SlowBatch(NamedTuple):
    """A batch that took long to make: seconds in its worker, where it was in the run, what it was made of, and what of
    the seconds was the dataset's and on a CPU."""

    seconds: float
    epoch: int
    number: int
    index: Any
    load_s: float = 0.0
    load_cpu_s: float = 0.0


class Slowest:
    """The batches that took longest."""

    __slots__ = ("_heap", "_order", "least_s")

    def __init__(self) -> None:
        self.least_s = 0.0
        self._order = 0
        self._heap: list[tuple[float, int, SlowBatch]] = []

    def add(self, batch: SlowBatch) -> None:
        """One that took longer than ``least_s``."""
        self._order += 1
        entry = (batch.seconds, self._order, batch)
        if len(self._heap) < SLOWEST:
            heappush(self._heap, entry)
        else:
            heapreplace(self._heap, entry)
        if len(self._heap) == SLOWEST:
            self.least_s = self._heap[0][0]

    def found(self) -> tuple[SlowBatch, ...]:
        """Slowest first."""
        return tuple(batch for _, _, batch in sorted(self._heap, reverse=True))

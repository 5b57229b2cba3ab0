"""Random numbers by what they are for and by position: the same whoever asks, whenever, and under any settings.

So the controller and the best fixed setting get the very same batches, steps, bursts and slow spells.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import lru_cache

from benchmarks.simulation.world import Cache, Shards, Step, Work


class _Series:
    """Numbers of an endless generator, by position."""

    def __init__(self, numbers: Iterator[float]) -> None:
        self._numbers = numbers
        self._known: list[float] = []

    def __getitem__(self, position: int) -> float:
        known = self._known
        while len(known) <= position:
            known.append(next(self._numbers))
        return known[position]


class Draws:
    """All series of a seed. Parallel runs of a process share them by `draws_of`."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._series: dict[object, _Series] = {}

    def series(self, key: object, make: Callable[[random.Random], Iterator[float]]) -> _Series:
        """The series of this key, made when it is first asked for."""
        found = self._series.get(key)
        if found is None:
            found = self._series[key] = _Series(make(random.Random(f"{self._seed} {key}")))
        return found

    def work(self, work: Work, position: int) -> tuple[float, float, float]:
        """Waiting and CPU of a batch, in seconds, and what it reads from shared storage."""
        if work.recorded:
            return (*work.recorded[position % len(work.recorded)], work.read)
        factor = self._spread("work", work.spread, work.correlation, position)
        if work.rare and self.series("rare", _uniform)[position] < work.rare:
            factor *= work.rare_factor
        if work.shards is not None:
            factor *= work.shards.factor if self._is_slow(work.shards, position) else 1.0
        wait_s = work.wait_s * factor * (cold(work.cache, position) if work.cache is not None else 1.0)
        return wait_s, work.cpu_s * factor, work.read * factor

    def step(self, step: Step, position: int) -> tuple[float, float]:
        """GPU and CPU of a step, in seconds."""
        if step.recorded:
            return step.recorded[position % len(step.recorded)], step.cpu_s
        factor = self._spread("step", step.spread, 0.0, position)
        return step.gpu_s * factor, step.cpu_s * factor

    def _is_slow(self, shards: Shards, position: int) -> bool:
        share, slow = shards.share, shards.batches
        runs = (share, slow, slow * (1.0 - share) / share)
        return bool(self.series(("shards", *runs), lambda rng: _runs(rng, *runs))[position])

    def _spread(self, what: str, sigma: float, correlation: float, position: int) -> float:
        if not sigma:
            return 1.0
        z = self.series((what, correlation), lambda rng: _normal(rng, correlation))[position]
        return math.exp(sigma * z - sigma * sigma / 2)


@lru_cache(maxsize=64)
def draws_of(seed: str) -> Draws:
    """The draws of a seed, the same object for all who ask soon."""
    return Draws(seed)


def cold(cache: Cache, position: int) -> float:
    """Part of the waiting that is left for this batch."""
    if position >= cache.batches:
        return cache.warm
    return 1.0 - (1.0 - cache.warm) * position / cache.batches if cache.is_gradual else 1.0


def _uniform(rng: random.Random) -> Iterator[float]:
    while True:
        yield rng.random()


def _normal(rng: random.Random, correlation: float) -> Iterator[float]:
    """Standard normal numbers whose correlation falls to 1/e over so many."""
    keep = math.exp(-1.0 / correlation) if correlation else 0.0
    new = math.sqrt(1.0 - keep * keep)
    z = rng.gauss(0.0, 1.0)
    while True:
        yield z
        z = keep * z + new * rng.gauss(0.0, 1.0)


def _runs(rng: random.Random, share: float, slow: float, fast: float) -> Iterator[float]:
    """1 while slow and 0 while fast, a Markov chain of two states: the share of slow ones, the mean lengths of runs."""
    is_slow = rng.random() < share
    while True:
        yield float(is_slow)
        if rng.random() < 1.0 / max(1.0, slow if is_slow else fast):
            is_slow = not is_slow


class Spells:
    """Alternating times off and on, of exponential or of regular length, as a function of time."""

    def __init__(self, rng: random.Random, off_s: float, on_s: float, *, is_regular: bool = False) -> None:
        self._rng = rng
        self._is_regular = is_regular
        self._means_s = off_s, on_s
        self._is_on_first = rng.random() < on_s / (on_s + off_s)
        self._ends: list[float] = []

    def is_on(self, at: float) -> bool:
        """Whether ``at`` falls in a time that is on."""
        return self._parity(self._index(at))

    def next_change(self, at: float) -> float:
        """When the spell that ``at`` falls in ends."""
        return self._ends[self._index(at)]

    def _index(self, at: float) -> int:
        while not self._ends or self._ends[-1] <= at:
            mean_s = self._means_s[self._parity(len(self._ends))]
            length_s = mean_s if self._is_regular and self._ends else self._length_s(mean_s)
            self._ends.append((self._ends[-1] if self._ends else 0.0) + length_s)
        return bisect_right(self._ends, at)

    def _length_s(self, mean_s: float) -> float:
        """Of a spell by chance; the first of regular ones is a part of its length."""
        return self._rng.uniform(0.0, mean_s) if self._is_regular else self._rng.expovariate(1.0 / mean_s)

    def _parity(self, index: int) -> bool:
        return (index % 2 == 1) != self._is_on_first


@lru_cache(maxsize=256)
def spells(seed: str, off_s: float, on_s: float, *, is_regular: bool = False) -> Spells:
    """The spells of a seed."""
    return Spells(random.Random(seed), off_s, on_s, is_regular=is_regular)

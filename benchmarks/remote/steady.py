"""When a consumer's rate has become steady, and since when it has had that rate.

A course lasts until its rate is steady: all workers run as far as the loader tells, and in the last `STEADY_S` seconds
both halves had the same rate but for `ALIKE`. That stretch is the steady one. Where it does not come before the course
must end, the second half of the time since the first batch is taken in its place, as far as all workers ran in it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

STEADY_S = 4.0
ALIKE = 0.15
LEAST_BATCHES = 10
"""Of a steady stretch: with fewer, one more or less is a great part."""
FULL_RATIO, FULL_STRETCH_S = 0.9, 1.0
"""Full speed is a second with so much of the steady rate."""
LOOK_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Look:
    """Seconds since before `iter()`, batches until then, and CPU seconds of the training process."""

    at_s: float
    batches: int
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """The steady stretch. is_steady: whether it was found, or only taken in its place. batch_cpu_s: CPU seconds of the
    training process for each of its batches."""

    since_s: float
    until_s: float
    rate: float
    batch_cpu_s: float | None
    is_steady: bool


def _taken(looks: Sequence[Look], *at_s: float) -> list[float]:
    """Batches until those moments, interpolated."""
    times, batches = [0.0, *(look.at_s for look in looks)], [0, *(look.batches for look in looks)]
    return [float(value) for value in np.interp(at_s, times, batches)]


def steady_since(looks: Sequence[Look], at_work_s: float) -> float | None:
    """When the steady stretch began that ends with the last look; None if it does not end there."""
    until_s = looks[-1].at_s
    since_s = until_s - STEADY_S
    if since_s < max(looks[0].at_s, at_work_s):
        return None
    first, middle, last = _taken(looks, since_s, until_s - STEADY_S / 2, until_s)
    earlier, later = middle - first, last - middle
    is_steady = last - first >= LEAST_BATCHES and abs(later - earlier) <= ALIKE * max(earlier, later)
    return since_s if is_steady else None


def stretch_of(looks: Sequence[Look], at_work_s: float | None) -> Stretch:
    """The steady stretch of a course that has ended, or what is taken in its place."""
    until_s, began_s = looks[-1].at_s, at_work_s or 0.0
    steady_s = steady_since(looks, began_s)
    middle_s = (looks[0].at_s + until_s) / 2
    since_s = max(began_s, middle_s) if steady_s is None else steady_s
    since_s = min(since_s, looks[max(0, len(looks) - 2)].at_s)
    batches = looks[-1].batches - _taken(looks, since_s)[0]
    cpu_s = looks[-1].cpu_s - float(np.interp(since_s, [look.at_s for look in looks], [look.cpu_s for look in looks]))
    return Stretch(
        since_s=since_s,
        until_s=until_s,
        rate=batches / (until_s - since_s) if until_s > since_s else 0.0,
        batch_cpu_s=cpu_s / batches if batches else None,
        is_steady=steady_s is not None,
    )


def full_speed_s(looks: Sequence[Look], rate: float) -> float | None:
    """When the first second began with `FULL_RATIO` of that rate, the first batch at the earliest; None if none did."""
    starts = [0.0, *(look.at_s for look in looks if look.at_s + FULL_STRETCH_S <= looks[-1].at_s)]
    taken = zip(_taken(looks, *starts), _taken(looks, *(at_s + FULL_STRETCH_S for at_s in starts)), strict=True)
    least = FULL_RATIO * rate * FULL_STRETCH_S
    full = (at_s for at_s, (before, after) in zip(starts, taken, strict=True) if after - before >= least)
    found = next(full, None)
    return None if found is None else max(found, looks[0].at_s)


class UntilSteady:
    """A loader's batches until their rate is steady, `most_s` seconds at the longest.

    running: how many of the `workers` run, None if the loader does not tell. at_end: called before the loader's
    iterator ends. at_work_s: when all workers ran for the first time, None until then.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        workers: int,
        most_s: float,
        running: Callable[[], int | None],
        at_end: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._loader, self._workers, self._most_s = loader, workers, most_s
        self._running, self._at_end = running, at_end
        self._clock, self._cpu_clock = clock, cpu_clock
        self._tells = True
        self.looks: list[Look] = []
        self.at_work_s: float | None = None

    def __iter__(self) -> Iterator[Any]:
        clock, began_s, began_cpu_s = self._clock, self._clock(), self._cpu_clock()
        batches, look_s = iter(self._loader), 0.0  # kept, so that its workers are there at the end
        for taken, batch in enumerate(batches, 1):
            yield batch
            at_s = clock() - began_s
            if at_s >= look_s:
                look_s = at_s + LOOK_EVERY_S
                self.looks.append(Look(at_s=at_s, batches=taken, cpu_s=self._cpu_clock() - began_cpu_s))
                self._look_at_workers(at_s)
                if at_s >= self._most_s or self._is_steady():
                    break
        self._at_end()

    def _look_at_workers(self, at_s: float) -> None:
        if self.at_work_s is None and self._tells:
            running = self._running()
            self._tells = running is not None
            self.at_work_s = at_s if running is not None and running >= self._workers else None

    def _is_steady(self) -> bool:
        if self._tells and self.at_work_s is None:
            return False
        return steady_since(self.looks, self.at_work_s or 0.0) is not None

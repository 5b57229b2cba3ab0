"""How alike the costs of successive batches are: shards, storage and caches are slow or fast for a while. PURE.

The model is a first-order autoregressive process: the correlation of two batches that are k apart is exp(-k / length).
Its length, in batches, is found by how far the means of windows stray from the level: the mean of n batches of such a
process has the variance of one batch times `variance_of_mean` (Priestley, Spectral Analysis and Time Series, 1981,
section 5.3), which is 1/n where successive batches are independent.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from dpex.autotune.constants.levels import CORRELATION

_HALVINGS = 6
"""Between the shortest and the longest, on a scale of ratios: down to a tenth of the length itself."""
_EXACTLY = 1e-3
"""Below this the formulas lose their digits, and their limits hold."""


def variance_of_mean(count: float, length: float) -> float:
    """Variance of the mean of ``count`` successive batches, over the variance of one."""
    if count <= 1.0:
        return 1.0
    if length < _EXACTLY:
        return 1.0 / count
    rho = math.exp(-1.0 / length)
    apart = 1.0 - rho
    if count * apart < _EXACTLY:
        return 1.0
    return ((1.0 + rho) / apart - 2.0 * rho * (1.0 - math.pow(rho, count)) / (count * apart * apart)) / count


@dataclass(frozen=True)
class _Stray:
    """Of one window: batches, the square of how far its mean was from the level, and batches the level was known by."""

    count: float
    squared: float
    known_by: float


class Correlation:
    """Learns the correlation length from windows."""

    def __init__(self) -> None:
        self._strays: deque[_Stray] = deque(maxlen=CORRELATION.kept_windows)

    def add(self, count: float, mean: float, level: float, known_by: float) -> None:
        """Take in a window of ``count`` batches of this mean cost, while ``level`` was the mean of ``known_by``."""
        if count <= 0 or known_by <= 0 or not level > 0:
            return
        off = mean / level - 1.0
        if abs(off) < CORRELATION.most_stray:
            self._strays.append(_Stray(count, off * off, known_by))

    def forget_latest(self, windows: int) -> None:
        """The latest windows were of another level."""
        for _ in range(min(windows, len(self._strays))):
            self._strays.pop()

    def cautious_length(self, found: float) -> float:
        """The length that was found, but a moderate one as long as windows are too few to rule it out."""
        return found if len(self._strays) >= CORRELATION.told_by else max(found, CORRELATION.suspected)

    def length(self, spread: float) -> float:
        """Correlation length in batches, 0 where chance explains the scatter of windows.

        ``spread``: standard deviation of single batches over their mean.
        """
        strays = self._strays
        if len(strays) < CORRELATION.least_windows or spread <= 0:
            return 0.0
        weights = [math.sqrt(stray.count) for stray in strays]
        total = sum(weights)
        seen = sum(w * stray.squared for w, stray in zip(weights, strays, strict=True)) / total
        effective = total * total / sum(w * w for w in weights)
        seen /= (1.0 + CORRELATION.doubt * math.sqrt(2.0 / effective)) * spread * spread

        counts = [(w / total, stray.count, stray.known_by) for w, stray in zip(weights, strays, strict=True)]

        def explained(length: float) -> float:
            return sum(w * (variance_of_mean(n, length) + variance_of_mean(known, length)) for w, n, known in counts)

        if explained(0.0) >= seen:
            return 0.0
        low, high = CORRELATION.shortest, CORRELATION.longest
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if explained(middle) < seen else (low, middle)
        return math.sqrt(low * high)


def in_correlated_order(values: Sequence[float], length: float) -> list[float]:
    """As many of these values as show the long run, in an order whose ranks have this correlation length.

    The same for the same arguments, each value as often as any other (to one), and fit to be repeated from the start.
    """
    ordered = sorted(values)
    enough = max(CORRELATION.least_replayed, len(ordered), math.ceil(CORRELATION.periods * length))
    count = min(CORRELATION.most_replayed, enough)
    rho = math.exp(-1.0 / length)
    shocks = [math.sqrt(1.0 - rho * rho) * gauss for gauss in _gaussians(count)]
    last = list(accumulate(shocks, lambda state, shock: rho * state + shock))[-1]
    states = list(accumulate(shocks, lambda state, shock: rho * state + shock, initial=last))[1:]
    by_rank = sorted(range(count), key=states.__getitem__)
    found = [0.0] * count
    for rank, place in enumerate(by_rank):
        found[place] = ordered[rank * len(ordered) // count]
    return found


def _gaussians(count: int) -> list[float]:
    rng = random.Random(0)
    return [rng.gauss(0.0, 1.0) for _ in range(count)]

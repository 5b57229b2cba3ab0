"""A measured quantity that stays level until it does not: its mean, how far windows stray from it, whether it moved.

No quantity here can be below 0, but a window's sum may be, where it is a difference of two measurements. Such a sum
enters the mean as it is, since cutting it off would add up the errors. What a level tells is never below 0: neither its
value, nor a window that is compared with it.

A window's value strays from the level by what the windows before it strayed, so a move is told from noise by the noise
itself: several windows in a row whose mean is further away than chance explains.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from dpex.autotune.constants.levels import LEVEL


@dataclass(frozen=True)
class _Window:
    total: float
    count: float

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def told(self) -> float:
        """The mean as a quantity that cannot be below 0."""
        return max(0.0, self.mean)


def _enough(spread: float) -> float:
    """Things that windows must be about together to show another level."""
    if spread <= LEVEL.uneven:
        return LEVEL.enough_if_even
    return min(max(LEVEL.enough, (LEVEL.known_to * spread) ** 2), LEVEL.always_enough)


class Level:
    """A mean per thing (seconds per batch, say) that forgets slowly: over hundreds of things and tens of windows."""

    def __init__(self) -> None:
        self._mean = math.nan
        self._weight = 0.0
        self._windows = 0.0
        self._stray = 0.0
        self._strayed = 0.0
        self._latest: deque[_Window] = deque(maxlen=LEVEL.kept_windows)

    @property
    def value(self) -> float:
        """The mean per thing, at least 0; NaN while nothing is known."""
        return self._mean if math.isnan(self._mean) else max(0.0, self._mean)

    @property
    def known(self) -> bool:
        """Whether there is a value."""
        return not math.isnan(self._mean)

    def get(self, otherwise: float) -> float:
        """The mean, or something else while there is none."""
        return self.value if self.known else otherwise

    @property
    def weight(self) -> float:
        """How many things the value is about."""
        return self._weight

    @property
    def _sigma(self) -> float:
        """Relative standard deviation of a window's value; from few windows it is too small as often as not."""
        return math.sqrt(self._stray / self._strayed) * (1.0 + 4.0 / self._strayed) if self._strayed else 0.0

    def add(self, total: float, count: float, spread: float = 0.0) -> None:
        """A window's sum over ``count`` things, which are expected to vary by ``spread`` of their mean, each."""
        if count <= 0:
            return
        if len(self._latest) >= LEVEL.doubted_windows and self.value > 0:
            # later ones may be the first of another level, and are no noise then
            old = self._latest[-LEVEL.doubted_windows]
            off = (old.mean / self.value - 1.0) ** 2
            self._stray = self._fading(self._stray) + max(spread * spread / old.count, min(off, LEVEL.most_stray))
            self._strayed = self._fading(self._strayed) + 1.0
        window = _Window(total, count)
        self._take(window)
        self._latest.append(window)

    @staticmethod
    def _fading(value: float) -> float:
        return value * (1.0 - 1.0 / LEVEL.stray_memory)

    def _take(self, window: _Window) -> None:
        kept = self._weight
        self._mean = (window.total + (self._mean * kept if kept else 0.0)) / (kept + window.count)
        self._windows = min(self._windows + 1.0, LEVEL.windows)
        most = max(LEVEL.memory, LEVEL.windows * window.count)
        self._weight = min(kept + window.count, most)

    def has_moved(self, total: float, count: float, spread: float = 0.0) -> bool:
        """Whether a window that is about to be added, and those before it, are away from the level: two of them far
        away, or three not so far."""
        if count <= 0 or not self.known or self.value <= 0 or self._windows < LEVEL.trusted_windows:
            return False
        windows = [*self._latest, _Window(total, count)]
        moves = ((LEVEL.far_windows, LEVEL.far_off), (LEVEL.off_windows, LEVEL.off))
        return any(self._away(windows, most, spread, least) for most, least in moves)

    def _away(self, windows: list[_Window], most: int, spread: float, least: float) -> bool:
        enough = _enough(spread)
        while most <= len(windows) and sum(window.count for window in windows[-most:]) < enough:
            most += 1
        if most > len(windows):
            return False
        windows = windows[-most:]
        chance = spread * math.sqrt(1.0 / sum(window.count for window in windows) + 1.0 / self._weight)
        noise = LEVEL.sigmas * max(self._sigma / math.sqrt(len(windows)), chance)
        off = [window.told / self.value for window in windows]
        mean = sum(off) / len(off)
        above = 1.0 + max(least, noise)
        below = min(1.0 / (1.0 + least), max(1.0 - noise, LEVEL.far_below / (1.0 + noise)))
        up = mean > above and min(off) > (1.0 + above) / 2
        return up or (mean < below and max(off) < (1.0 + below) / 2)

    def restart(self, total: float, count: float) -> None:
        """It has moved, with a window that is about to be added: of those before only the latest may be of the new
        level, unless the move fell into it and it is nearer to the old one."""
        old, new = self.value, max(0.0, total / count)
        latest = [window for window in list(self._latest)[-1:] if abs(window.told - new) < abs(window.told - old)]
        self.clear()
        for window in latest:
            self._take(window)
            self._latest.append(window)

    def follow(self, total: float, count: float, spread: float = 0.0) -> None:
        """Add a window, and start anew with it where the level has moved, which nobody needs to be told of."""
        if self.has_moved(total, count, spread):
            self.restart(total, count)
        self.add(total, count, spread)

    def loosen(self, windows: float = 1.0) -> None:
        """It may be another from now on: what is known counts as little as one window, or as so many."""
        if self.known and self._windows:
            self._weight *= windows / self._windows
            self._windows = windows
            self._latest.clear()

    def clear(self) -> None:
        """Know nothing any more."""
        self._mean, self._weight, self._windows = math.nan, 0.0, 0.0
        self._stray = self._strayed = 0.0
        self._latest.clear()

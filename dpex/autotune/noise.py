"""A measured quantity that stays level until it does not: its mean, how far windows stray from it, whether it moved.

A window's value strays from the level by what the windows before it strayed, so a move is told from noise by the noise
itself: several windows in a row whose mean is further away than chance explains.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

_MEMORY = 600.0
_WINDOWS = 24.0
_MOVES = ((2, 0.35), (3, 0.12))
"""Windows that must agree, and by how much of the level they must be off at least."""
_SIGMAS = 4.0
_ENOUGH, _ENOUGH_IF_EVEN = 8, 3
"""Things that they must be about together: a single slow one is no other level."""
_UNEVEN = 0.5
_KNOWN_TO = 3.0
"""The mean of uneven things must be known to a third: where one takes a minute, those beside it end long before it."""
_ALWAYS_ENOUGH = 48
"""However uneven they are said to be: a spread that was measured wrongly must not hide what is measured now."""
_KEPT = 31
_DOUBTED = 2
_STRAY_MEMORY = 30.0
_MOST_STRAY = 1.0
_FAR_BELOW = 0.2
"""However much windows stray: a fifth, and less where they stray by more than themselves, is another level. Nothing is
less than nothing, so noise alone would never let a level that was measured wrongly come down again."""
_TRUSTED = 3


@dataclass(frozen=True)
class _Window:
    total: float
    count: float

    @property
    def mean(self) -> float:
        return self.total / self.count


class Level:
    """A mean per thing (seconds per batch, say) that forgets slowly: over hundreds of things and tens of windows."""

    def __init__(self) -> None:
        self.value = math.nan
        self._weight = 0.0
        self._windows = 0.0
        self._stray = 0.0
        self._strayed = 0.0
        self._latest: deque[_Window] = deque(maxlen=_KEPT)

    @property
    def known(self) -> bool:
        """Whether there is a value."""
        return not math.isnan(self.value)

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
        if len(self._latest) >= _DOUBTED and self.value > 0:
            old = self._latest[-_DOUBTED]  # later ones may be the first of another level, and are no noise then
            off = (old.mean / self.value - 1.0) ** 2
            self._stray = self._fading(self._stray) + max(spread * spread / old.count, min(off, _MOST_STRAY))
            self._strayed = self._fading(self._strayed) + 1.0
        window = _Window(total, count)
        self._take(window)
        self._latest.append(window)

    @staticmethod
    def _fading(value: float) -> float:
        return value * (1.0 - 1.0 / _STRAY_MEMORY)

    def _take(self, window: _Window) -> None:
        kept = self._weight
        self.value = (window.total + (self.value * kept if kept else 0.0)) / (kept + window.count)
        self._windows = min(self._windows + 1.0, _WINDOWS)
        most = max(_MEMORY, _WINDOWS * window.count)
        self._weight = min(kept + window.count, most)

    def has_moved(self, total: float, count: float, spread: float = 0.0) -> bool:
        """Whether a window that is about to be added, and those before it, are away from the level: two of them far
        away, or three not so far."""
        if count <= 0 or not self.known or self.value <= 0 or self._windows < _TRUSTED:
            return False
        windows = [*self._latest, _Window(total, count)]
        return any(self._away(windows, most, spread, least) for most, least in _MOVES)

    def _away(self, windows: list[_Window], most: int, spread: float, least: float) -> bool:
        enough = min(max(_ENOUGH, (_KNOWN_TO * spread) ** 2), _ALWAYS_ENOUGH) if spread > _UNEVEN else _ENOUGH_IF_EVEN
        while most <= len(windows) and sum(window.count for window in windows[-most:]) < enough:
            most += 1
        if most > len(windows):
            return False
        windows = windows[-most:]
        chance = spread * math.sqrt(1.0 / sum(window.count for window in windows) + 1.0 / self._weight)
        noise = _SIGMAS * max(self._sigma / math.sqrt(len(windows)), chance)
        off = [window.mean / self.value for window in windows]
        mean = sum(off) / len(off)
        above = 1.0 + max(least, noise)
        below = min(1.0 / (1.0 + least), max(1.0 - noise, _FAR_BELOW / (1.0 + noise)))
        up = mean > above and min(off) > (1.0 + above) / 2
        return up or (mean < below and max(off) < (1.0 + below) / 2)

    def restart(self) -> None:
        """It has moved: only the latest windows are of the new level."""
        latest = list(self._latest)[-1:]
        self.clear()
        for window in latest:
            self._take(window)
            self._latest.append(window)

    def loosen(self, windows: float = 1.0) -> None:
        """It may be another from now on: what is known counts as little as one window, or as so many."""
        if self.known and self._windows:
            self._weight *= windows / self._windows
            self._windows = windows
            self._latest.clear()

    def clear(self) -> None:
        """Know nothing any more."""
        self.value, self._weight, self._windows = math.nan, 0.0, 0.0
        self._stray = self._strayed = 0.0
        self._latest.clear()

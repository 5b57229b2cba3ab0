"""A rate that was seen not to be surpassed, whatever is tried: that of a storage, a link, a memory. PURE."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Ceiling:
    """A rate that was seen not to be surpassed; believed for longer each time that it is found again."""

    keep_s: float
    rate: float = math.inf
    until: float = 0.0
    times: int = 0

    def learn(self, rate: float, now: float) -> None:
        """More was tried, and no more than this came."""
        if rate <= 0:
            return  # windows without a batch show no rate, and hence none that cannot be surpassed
        self.rate, self.until = rate, now + self.keep_s * min(10, 2**self.times)
        self.times += 1

    def at(self, now: float) -> float:
        """The ceiling that is believed in now, infinite if none is."""
        return self.rate if now < self.until else math.inf

    def forget(self) -> None:
        """The work has changed."""
        self.rate, self.until, self.times = math.inf, 0.0, 0

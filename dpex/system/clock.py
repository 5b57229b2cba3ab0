"""Time as an argument, for all folders: the real clock, and one that tests turn by hand."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""A function without arguments that returns monotonic seconds."""

monotonic: Clock = time.perf_counter


class ManualClock:
    """A clock that stands still until `advance` is called."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward by ``seconds`` (not negative)."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back, got {seconds} s")
        self.now_s += seconds

"""Time as an argument, for all folders. Tests pass a clock that they turn by hand."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""A function without arguments that returns monotonic seconds."""

monotonic: Clock = time.perf_counter

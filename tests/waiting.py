"""How tests wait for what other threads and processes do: they look again and again, with a deadline."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0
"""Nothing takes a tenth of that but on a machine that has much else to do."""
PAUSE_S = 0.002


def until(
    true: Callable[[], Any],
    patience_s: float = PATIENCE_S,
    *,
    pause_s: float = PAUSE_S,
    told: Callable[[], Any] | None = None,
) -> Any:
    """The first truthy value of ``true()``; AssertionError, with what is told then, when patience ends.

    ``pause_s``: between two looks, for those that cost something, or where others are to have the CPU.
    """
    deadline = time.monotonic() + patience_s
    while not (value := true()):
        assert time.monotonic() < deadline, f"waited {patience_s} s in vain for {true if told is None else told()}"
        time.sleep(pause_s)
    return value


def meet(place: Path, many: int, patience_s: float = PATIENCE_S) -> None:
    """Return once so many threads of whatever processes of this machine have called this with ``place``, a folder.

    Samples that meet are sure to be made by so many workers.
    """
    (place / f"{os.getpid()} {threading.get_native_id()}").touch()
    until(lambda: len(list(place.iterdir())) >= many, patience_s, told=lambda: f"{many} of {list(place.iterdir())}")


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

"""Whether anybody drew from the global generators of Python, numpy and torch, in a process whose threads share them.

Threads share these generators. A ticket that moved none of them while it was made did not draw from them, whatever
other threads did; that is all that is asked of `SharedGenerators`. It takes some 25 microseconds to see.

What draws from a global generator and then puts its state back cannot be noticed.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import threading
from typing import Any

import numpy as np
import torch

from dpex.worker.batch_seeding import seed_ticket

_numpy_random: Any = np.random
_MT19937_BYTES = 625 * 4
"""numpy's ``struct s_mt19937_state``: 624 words and the position in them."""
NAMES = ("Python's global generator (random)", "numpy's global generator (np.random)", "torch's default generator")


def standing() -> tuple[Any, Any, bytes]:
    """Where the three stand, to be compared with ``==`` only."""
    return random.getstate(), _numpy_standing(), torch.default_generator.get_state().numpy().tobytes()


def _numpy_standing() -> Any:
    generator = _numpy_random.get_bit_generator()
    if type(generator) is np.random.MT19937:
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return pickle.dumps(generator.state)


class SharedGenerators:
    """The global generators of a process whose threads make tickets.

    As long as there is one thread they are seeded for each ticket, as everywhere. From `share` on nobody seeds them,
    and whoever finds them moved must not use what it made.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected = standing()
        self.shared = False

    def begin(self, seed: int) -> None:
        """A ticket begins."""
        if self.shared:
            return
        with self._lock:
            if not self.shared:
                seed_ticket(seed)
                self._expected = standing()

    def share(self) -> None:
        """A second thread is about to make tickets."""
        with self._lock:
            self.shared = True

    def moved(self) -> str | None:
        """Which of the three somebody drew from since they were last seeded, in words; None: nobody did."""
        pairs = zip(NAMES, self._expected, standing(), strict=True)
        return next((name for name, expected, found in pairs if expected != found), None)

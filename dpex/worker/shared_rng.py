"""Find out if a ticket drew from a global generator of Python, NumPy or torch, in a process whose threads share them.

A ticket that moved none of these generators while it was made did not draw from them, whatever other threads did. That
is all that `SharedGenerators` is asked. A look takes about 60 µs.

A draw after which the generator's state is put back cannot be noticed.
"""

from __future__ import annotations

import threading

from dpex.worker.batch_seeding import seed_ticket
from dpex.worker.rng_state import fingerprints

NAMES = {
    "python": "Python's global generator (random)",
    "numpy": "numpy's global generator (np.random)",
    "torch": "torch's default generator",
}


class SharedGenerators:
    """The global generators of a process whose threads make tickets.

    While there is one thread, they are seeded for each ticket, as everywhere. After `share` no thread seeds them, and a
    thread that finds them moved must not use what it made.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected = fingerprints()
        self.shared = False

    def begin(self, seed: int) -> None:
        """A ticket begins."""
        if self.shared:
            return
        with self._lock:
            if not self.shared:
                seed_ticket(seed)
                self._expected = fingerprints()

    def share(self) -> None:
        """A second thread is about to make tickets."""
        with self._lock:
            self.shared = True

    def moved(self) -> str | None:
        """Name a generator that has moved since it was last seeded; None: none has."""
        found = fingerprints()
        return next((NAMES[name] for name, expected in self._expected.items() if expected != found[name]), None)

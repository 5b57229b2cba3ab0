"""The number of batches that wait on the device: few, but enough that copies are not late, within a budget. PURE.

More batches help where copies are sometimes late: where the time of a step or of a copy varies. They do not help where
copies are late on average, so a further one is kept only if fewer batches were late with it.
"""

from __future__ import annotations

USUAL = 2
"""Batches to begin with: one for the step that runs, one more for when a step is shorter than a copy."""
MOST = 8
"""Batches at most. Each takes memory from training, and a burst that is longer is the loader's, not the copy's."""
JUDGED = 32
"""Batches that are looked at together: few enough to react within seconds, enough for a share to mean something."""
IS_LATE = 0.125
"""The share of late batches from which another one is tried; fewer are chance, or the first of a pass."""
SMALL_BYTES = 1 << 20
"""Small batches may take this much together, up to `MOST` of them. The thread that copies is then woken once for
several batches instead of once for each. A wakeup takes the interpreter lock from the training loop, which costs more
than the copy of a small batch."""
HELPED = 0.5
"""A further batch is kept if no more than this share of the late ones is still late."""


class Ahead:
    """Sets ``batches``, the present number. Used by the consumer's thread; any thread may read ``batches``."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._largest_bytes = 0
        self._wanted = USUAL
        self._most = MOST
        self._seen = self._late = 0
        self._share_before: float | None = None
        self.batches = USUAL

    def saw(self, nbytes: int) -> None:
        """Note that a batch takes ``nbytes`` on the device."""
        if nbytes > self._largest_bytes:
            self._largest_bytes = nbytes
            self._set()

    def taken(self, *, is_late: bool) -> None:
        """Note that the consumer has taken a batch; ``is_late``: the device was not done with it."""
        self._seen += 1
        self._late += is_late
        if self._seen == JUDGED:
            share, self._seen, self._late = self._late / JUDGED, 0, 0
            self._judge(share)
            self._set()

    def _judge(self, share: float) -> None:
        before, self._share_before = self._share_before, None
        if before is not None and share > HELPED * before:
            self._wanted -= 1
            self._most = self._wanted
        elif share > IS_LATE and self._wanted < self._most:
            self._wanted += 1
            self._share_before = share

    def _set(self) -> None:
        if self._largest_bytes:
            small = min(MOST, SMALL_BYTES // self._largest_bytes)
            self.batches = min(max(self._wanted, small), self._budget_bytes // self._largest_bytes)
        else:
            self.batches = self._wanted

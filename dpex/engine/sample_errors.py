"""Counts the samples that could not be loaded, names them, and ends the pass if they are too many.

Used by the thread that takes batches in; read by any. What is to be said or raised is returned as instructions, which
the training thread performs.
"""

from __future__ import annotations

import logging
from collections import deque

from dpex.errors import TooManySampleErrors
from dpex.measure.readable import fine_percent
from dpex.measure.sampling import FailedSample
from dpex.measure.sums import FAILED_KEPT
from dpex.schedule.events import Instruction, Raise, Say
from dpex.schedule.sample_policy import AS_TORCH, SamplePolicy

logger = logging.getLogger("dpex")

LEAST = 10
"""Samples that may fail whatever their share: the first batch of a pass proves nothing."""
_PLACE = {"skip": "another one of its batch has its place", "replace": "another one of the dataset has its place"}


class SampleErrors:
    """See the module. ``count``: samples that failed. ``latest``: some of them."""

    def __init__(self, policy: SamplePolicy) -> None:
        self.is_on = policy.tolerates
        self.count = 0
        self.latest: deque[FailedSample] = deque(maxlen=FAILED_KEPT)
        self._policy = policy
        self._samples = 0
        self._last = (-1, -1)

    def made(
        self, batch: tuple[int, int], samples: int, failed: tuple[tuple[str, str], ...]
    ) -> tuple[Instruction, ...]:
        """Count batch ``batch`` (epoch, number), of ``samples`` samples. A second call in a row changes nothing."""
        if batch == self._last:
            return ()
        self._last = batch
        self._samples += samples
        said = [text for index, error in failed if (text := self._note(index, error))]
        if failed and self.count > max(LEAST, self._policy.max_errors * self._samples):
            return (*map(Say, said), Raise(TooManySampleErrors(self._why())))
        return tuple(map(Say, said))

    def _why(self) -> str:
        share, latest = self._policy.max_errors, self.latest[-1]
        return (
            f"{self.count} of {self._samples} samples could not be loaded, and SamplePolicy(max_errors={share}) allows "
            f"{fine_percent(share)} of them; the latest: sample {latest.shown} ({latest.error}). Mend the data, or "
            "allow more"
        )

    def _note(self, index: str, error: str) -> str:
        """Count a sample that failed. Return a text for the user if it is the first one, else ""."""
        text = (
            f"sample {index} could not be loaded ({error}): {_PLACE[self._policy.on_error]}, as SamplePolicy("
            f"on_error={self._policy.on_error!r}) says"
        )
        self.latest.append(FailedSample(index, error))
        self.count += 1
        if self.count == 1:
            return f"{text}. Further ones are logged, counted and named in the diagnosis"
        logger.warning("%s", text)
        return ""


NO_ERRORS = SampleErrors(AS_TORCH)
"""For a loader in which an error of a sample is the error of its batch."""

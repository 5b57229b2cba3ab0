"""Rates that were seen not to be surpassed, whatever is tried: those of a storage, a link, a memory. PURE."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpex.autotune.constants.learning import CEILING
from dpex.autotune.constants.trying import COMMON
from dpex.autotune.types import Sample
from dpex.autotune.window_record import WindowRecord

_LONGEST = 10
"""A ceiling is believed for so many times the first time at most, however often it was found."""


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
        self.rate, self.until = rate, now + self.keep_s * min(_LONGEST, 2**self.times)
        self.times += 1

    def correct(self, rate: float) -> None:
        """The same has been seen for longer, and tells better how much comes."""
        self.rate = rate

    def is_known(self, now: float) -> bool:
        """Whether a ceiling is believed in now."""
        return now < self.until

    def at(self, now: float) -> float:
        """The ceiling that is believed in now, infinite if none is."""
        return self.rate if self.is_known(now) else math.inf

    def disprove(self, now: float) -> None:
        """More has come."""
        self.until = min(self.until, now)

    def forget(self) -> None:
        """The work has changed."""
        self.rate, self.until, self.times = math.inf, 0.0, 0


class Ceilings:
    """That of all workers, and that of the link to the remote ones. ``is_jammed``: batches queue on the link now."""

    def __init__(self, keep_s: float) -> None:
        self.all, self.link = Ceiling(keep_s), Ceiling(keep_s)
        self.is_jammed = False

    def look(self, sample: Sample, record: WindowRecord, usual_s: float) -> None:
        """Take a window in, the latest of the record. ``usual_s``: what a worker takes for a batch.

        Where remote workers idle while the training loop waits, and batches queue on the way from them, the link
        carries no more than what comes through. Where clearly more comes than a ceiling allows, there is none.
        """
        long_s = max(
            CEILING.jammed_s if record.far < CEILING.jammed_batches else 0.0, CEILING.jammed_services * usual_s
        )
        enough = len(record) >= CEILING.jammed_windows and record.seconds >= long_s
        if enough and record.rate > CEILING.surpassed * self.all.rate:
            self.all.disprove(sample.at)
        queued = max(CEILING.least_jam, CEILING.jam_per_worker * sample.remote.running)
        self.is_jammed = enough and record.jam > queued and record.wait > COMMON.starved
        if self.is_jammed:
            self._learn_link(max(1, record.far) / record.seconds, sample.at)
        elif record.far >= CEILING.jammed_batches and record.far > CEILING.surpassed * self.link.rate * record.seconds:
            self.link.disprove(sample.at)

    def _learn_link(self, rate: float, now: float) -> None:
        if self.link.is_known(now):
            self.link.correct(rate)
        else:
            self.link.learn(rate, now)

    def forget(self) -> None:
        """The work has changed."""
        self.all.forget()
        self.link.forget()

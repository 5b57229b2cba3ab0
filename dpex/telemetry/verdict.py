"""What the numbers say, in a sentence for somebody who has never seen dpex. Pure.

The shares at which loading is called a bottleneck are those of XProf's input pipeline analyser: under 5 % it is none,
from 20 % on it is the first thing to work on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ENOUGH_BATCHES = 50
"""With fewer nothing is concluded."""
LITTLE, MUCH = 0.05, 0.20
MOST, SOME = 0.5, 0.2
"""Shares of the waiting from which a cause is named alone, or at all."""

Level = Literal["early", "good", "fair", "bad"]

WORDS: Mapping[str, str] = {
    "read": "reading samples (storage or network, inside the dataset)",
    "transform": "computing samples (decoding and augmenting, inside the dataset)",
    "collate": "the collate function",
    "serialize": "writing batches into shared memory",
    "fetch": "the network between workers and this process",
    "h2d": "the copy into page-locked memory",
    "straggler": "single batches that take much longer than others",
    "startup": "workers to start and the first batch of a pass",
    "unknown": "nothing that could be named",
}
"""What the training loop waits for, by cause (see `dpex.causes`); fits behind "it waits for"."""


@dataclass(frozen=True, kw_only=True)
class Spending:
    """How the training loop spent a stretch of time, seconds; ``causes`` are those of ``wait_s``, by name."""

    batches: int = 0
    wait_s: float = 0.0
    transfer_s: float = 0.0
    work_s: float = 0.0
    causes: Mapping[str, float] = field(default_factory=dict)
    gpu_stall_s: float | None = None

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.wait_s + self.transfer_s + self.work_s

    @property
    def stall_ratio(self) -> float | None:
        """Share of time spent waiting, 0 to 1; None: no time was spent."""
        return self.wait_s / self.total_s if self.total_s > 0 else None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``level`` for the eye, ``text`` for the reader."""

    level: Level
    text: str


def verdict(spending: Spending) -> Verdict:
    """What to make of it."""
    stall_ratio = spending.stall_ratio
    if spending.batches < ENOUGH_BATCHES or stall_ratio is None:
        text = f"Too early to say: {spending.batches} of {ENOUGH_BATCHES} batches so far."
        return Verdict(level="early", text=text)
    waits = f"the training loop waits {_percent(stall_ratio)} of the time"
    if stall_ratio < LITTLE:
        return Verdict(level="good", text=f"Loading keeps up: {waits}{_on_gpu(spending)}.")
    text = f"{waits[0].upper()}{waits[1:]}, {_for_what(spending)}{_on_gpu(spending)}."
    return Verdict(level="bad" if stall_ratio >= MUCH else "fair", text=text)


def _for_what(spending: Spending) -> str:
    shares = sorted(((seconds / spending.wait_s, cause) for cause, seconds in spending.causes.items()), reverse=True)
    named = [(share, cause) for share, cause in shares if share >= SOME]
    if not named:
        return "for many causes"
    share, cause = named[0]
    if share >= MOST or len(named) == 1:
        return f"mostly for {WORDS.get(cause, cause)}"
    return "for " + " and ".join(f"{WORDS.get(cause, cause)} ({_percent(share)} of it)" for share, cause in named[:2])


def _on_gpu(spending: Spending) -> str:
    if spending.gpu_stall_s is None:
        return ""
    return f"; the GPU idles {_percent(min(1.0, spending.gpu_stall_s / spending.total_s))} because of it"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f} %" if ratio >= 0.01 else "less than 1 %"

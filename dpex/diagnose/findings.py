"""The findings of a diagnosis, which its report shows. PURE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpex.diagnose.facts import Facts
from dpex.diagnose.verdict import Verdict
from dpex.diagnose.what_if import AT_HAND, Prediction

EFFORT: dict[str, float] = {
    **dict.fromkeys(("workers", "inline", "prefetch", "budget", "start", "streams", "free"), 1.0),
    **dict.fromkeys(("narrow", "place"), 2.0),
    **dict.fromkeys(("larger", "cached"), 3.0),
    **dict.fromkeys(("awaited", "divided", "cheaper"), 4.0),
    "machines": 12.0,
}
"""Relative effort of each kind of change: arguments, types or places, batches or caches, code, and more machines."""
WORTH_FIRST = 0.1
"""If the relative gain of the rate is at least this, changes `AT_HAND` precede code, and code precedes machines."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """See `dpex.diagnose.diagnosis.Diagnosis`."""

    facts: Facts
    verdict: Verdict
    predictions: tuple[Prediction, ...] = ()
    beyond: Prediction | None = None
    held_back: str = ""
    end_of_stall: str = ""

    @property
    def recommendation(self) -> Prediction | None:
        """The change `AT_HAND` with the largest gain, else the change with the largest gain for its effort; None if
        no change was predicted, too little was measured, or the training step is the limit."""
        if self.verdict.cause in ("too-early", "consumer"):
            return None
        return recommended(self.predictions, self.facts.rate)


def recommended(predictions: Sequence[Prediction], rate: float) -> Prediction | None:
    """Return the change to advise, or None. ``rate``: The measured batches per second.

    With a gain of at least `WORTH_FIRST` over ``rate``, a change `AT_HAND` ranks first, and any other but additional
    machines second. All else ranks last. Within a rank, the change with the best gain for its effort wins.
    """

    def worth(one: Prediction) -> tuple[int, float]:
        is_worth = one.rate >= (1.0 + WORTH_FIRST) * rate
        rank = 2 if one.kind in AT_HAND else int(one.kind != "machines")
        return rank * is_worth, math.log(one.rate / rate) / EFFORT[one.kind]

    return max(predictions, key=worth, default=None)

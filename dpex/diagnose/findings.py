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
"""A person's effort by kind of change: an argument or a stopped program, another type, a cache, a rewrite, machines."""
WORTH_FIRST = 0.1
"""A rate that is higher by less is no reason to advise a change `AT_HAND` before code, or code before machines."""


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
        """The argument or the stopped program that brings most, or else the change that brings most for its effort;
        None if nothing is worth it or nothing can be said."""
        if self.verdict.cause in ("too-early", "consumer"):
            return None
        return recommended(self.predictions, self.facts.rate)


def recommended(predictions: Sequence[Prediction], rate: float) -> Prediction | None:
    """Return the change with the best gain for its effort, or None. ``rate``: The measured batches per second.

    A change `AT_HAND` comes before other code, and other code before machines that nobody has yet, if its gain over
    ``rate`` is `WORTH_FIRST`.
    """

    def worth(one: Prediction) -> tuple[int, float]:
        is_worth = one.rate >= (1.0 + WORTH_FIRST) * rate
        rank = 2 if one.kind in AT_HAND else int(one.kind != "machines")
        return rank * is_worth, math.log(one.rate / rate) / EFFORT[one.kind]

    return max(predictions, key=worth, default=None)

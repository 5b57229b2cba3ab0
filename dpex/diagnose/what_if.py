"""What another setting, or cheaper work, would bring: measured times replayed through the tuner's own model. Pure.

Intervals come from resampling: the batches and the steps that were seen are drawn anew, with replacement (Efron, 1979),
`ROUNDS` times, and each draw is replayed; the interval is the range of what comes out. The model is first asked for the
present setting: by as much as its rate and its steps are off there, they are taken to be off elsewhere, and by half of
what its wait is off, every interval is wider.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpex.autotune.model import Estimate
from dpex.autotune.types import Decision, Settings
from dpex.diagnose.attribution import LostTime
from dpex.diagnose.candidates import EFFORT, MATTERS, Candidate, Kind, candidates
from dpex.diagnose.facts import Facts
from dpex.diagnose.measured_work import Calibration, estimate, present

ROUNDS = 12
"""Of resampling: on average the range of twelve draws covers 11/13 of what may come out."""
WORTH = 0.03
"""Less wait than this saved is no recommendation: runs of the same setting differ by as much."""
_DRAWN = 256
"""Batches of one draw, at most: a replay takes time in proportion to them."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a change would make of the run.

    Attributes:
        change: The change in words.
        kind: The kind of change.
        settings: The workers and the prefetch under it.
        rate: The expected batches per second.
        wait: The expected share of the training loop's time lost to loading, from 0 to 1.
        low: The lower end of the interval of ``wait``.
        high: The upper end of it.
        condition: What the prediction takes for granted; "" if nothing.
    """

    change: str
    kind: Kind
    settings: Settings
    rate: float
    wait: float
    low: float
    high: float
    condition: str = ""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Predictions, what is recommended among them (None: nothing is worth it), and how far off the model is at present:
    ``modelled`` is its wait for the present setting, ``wait`` and ``rate`` are those measured. deeper: how many times
    the rate four times the prefetch would give, None without workers."""

    wait: float
    modelled: float
    rate: float
    predictions: tuple[Prediction, ...]
    recommended: Prediction | None
    deeper: float | None


@dataclass(frozen=True, kw_only=True)
class ScoredPrediction:
    """A decision of the tuner's: wait and rate that it was to bring, and those that it brought."""

    change: str
    predicted_wait: float
    wait: float
    predicted_rate: float
    rate: float

    @property
    def error(self) -> float:
        """Of the predicted wait, 0 to 1."""
        return abs(self.predicted_wait - self.wait)


def scores(decisions: Sequence[Decision]) -> tuple[ScoredPrediction, ...]:
    """Past predictions against what happened, of those that were judged."""
    return tuple(
        ScoredPrediction(
            change=f"{decision.old} → {decision.new}",
            predicted_wait=decision.predicted_wait,
            wait=outcome.wait,
            predicted_rate=decision.predicted_rate,
            rate=outcome.rate,
        )
        for decision in decisions
        if (outcome := decision.outcome) is not None and decision.reason != "undo"
    )


# -- predictions -------------------------------------------------------------------------------------------------------


def what_if(facts: Facts, found: LostTime) -> WhatIf | None:
    """All predictions; None: too little was seen of batches or steps to replay."""
    if facts.tickets < 8 or facts.batches <= facts.passes or facts.work_s <= 0:
        return None
    now, work = present(facts), estimate(facts, found)
    calibrated = Calibration(facts, work)
    rate, wait = calibrated(work, now)
    predictions = tuple(_predicted(one, found, calibrated) for one in candidates(facts, work, found))
    deeper = calibrated(work, replace(now, prefetch=4 * now.prefetch))[0] / max(1e-9, rate) if now.workers else None
    recommended = _recommended(predictions, now, wait)
    return WhatIf(
        wait=wait,
        modelled=calibrated.modelled,
        rate=rate,
        predictions=predictions,
        recommended=recommended,
        deeper=deeper,
    )


def _predicted(candidate: Candidate, found: LostTime, calibrated: Calibration) -> Prediction:
    work = estimate(candidate.facts, found)
    rate, wait = calibrated(work, candidate.settings)
    draw = random.Random(0)
    drawn = [wait, *(calibrated(_redrawn(work, candidate.facts, draw), candidate.settings)[1] for _ in range(ROUNDS))]
    off = calibrated.off / 2
    return Prediction(
        change=candidate.text,
        kind=candidate.kind,
        settings=candidate.settings,
        rate=rate,
        wait=wait,
        low=max(0.0, min(drawn) - off),
        high=min(1.0, max(drawn) + off),
        condition=candidate.condition,
    )


def _redrawn(work: Estimate, facts: Facts, draw: random.Random) -> Estimate:
    """The same from another run of as many batches and steps: times by chance a little longer, or shorter."""
    chosen = draw.choices(work.spread, k=min(_DRAWN, len(work.spread)))
    tickets, steps = max(1, facts.tickets), max(1, facts.batches)
    longer = max(0.1, 1.0 + draw.gauss(0.0, 1.0) * work.variation / math.sqrt(tickets))
    step = max(0.1, 1.0 + draw.gauss(0.0, 1.0) * work.step_spread / math.sqrt(steps))
    return replace(
        work,
        spread=tuple(chosen),
        step_s=work.step_s * step,
        here_s=work.here_s * longer,
        cpu_s=work.cpu_s * longer,
        wait_s=work.wait_s * longer,
        far_s=work.far_s * longer,
    )


def _recommended(predictions: Sequence[Prediction], now: Settings, wait: float) -> Prediction | None:
    """The largest gain for the effort; where nothing is lost, a setting that frees workers without a loss."""

    def gain(prediction: Prediction) -> float:
        return wait - prediction.wait

    worth = [one for one in predictions if gain(one) >= WORTH and one.condition != "memory_budget allows it"]
    if worth:
        return max(worth, key=lambda one: gain(one) / EFFORT[one.kind])
    fewer = [one for one in predictions if one.kind == "workers" and one.settings.workers < now.workers]
    free = [one for one in fewer if one.high <= wait + WORTH / 3]
    return min(free, key=lambda one: one.settings.workers) if free and wait < MATTERS else None

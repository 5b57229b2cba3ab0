"""Build the tuner's model of a diagnosed run, and find the costliest part of a batch. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dpex.autotune.config import most_waiting
from dpex.autotune.constants import CONSTANTS
from dpex.autotune.law.model import Model, Start
from dpex.autotune.limits import Limits
from dpex.autotune.types import Decision
from dpex.diagnose.facts import Facts
from dpex.diagnose.hot_calls import hot_calls
from dpex.measure.causes import LostTime
from dpex.measure.pool_reading import STAGES
from dpex.measure.settings import Settings
from dpex.measure.views import free_steps_s, is_full

_COMPUTES, _BESIDE = 0.5, 2
"""If workers compute for more than `_COMPUTES` of their time, advise at most `_BESIDE` workers more than CPUs."""
_ROUNDING = 0.1
"""A fraction of a worker up to this is dropped when the number of workers beyond the CPUs is rounded up."""
_WAITS = 0.01
"""If the loop waits for more than this share of the time, its measured rate counts as the workers' rate."""
_PAST = 8
"""Number of the tuner's latest predictions whose errors widen the ranges of new predictions."""
_LEAST, _BY_LOAD = 0.04, 0.15
"""Relative error of a rate on an idle machine, and the error that other programs add if they hold all CPUs."""


def present(facts: Facts) -> Settings:
    """Return the settings in force."""
    return Settings(local=facts.local_workers, remote=facts.remote_workers, prefetch=max(1, facts.prefetch))


def stream_s(facts: Facts) -> float:
    """Return the seconds of the wait for the readers of a stream."""
    return facts.causes.get("stream", 0.0)


def covering_prefetch(facts: Facts, model: Model) -> int:
    """Return the prefetch with which the workers stay busy while the slowest batch is made."""
    slowest_s = max(facts.services_s, default=0.0)
    made = min(model.demand, model.now.workers / max(1e-9, model.local.service_s))
    return math.ceil(slowest_s * made) + model.now.workers


def _missed(decisions: Sequence[Decision]) -> float:
    """Return the mean error of the latest predictions of the wait, 0 to 1."""
    errors = [
        abs(one.predicted_wait - one.outcome.wait)
        for one in decisions
        if one.outcome is not None and one.predicted_rate and one.reason != "undo"
    ][-_PAST:]
    return sum(errors) / len(errors) if errors else 0.0


def model_of(facts: Facts, found: LostTime) -> Model | None:
    """Return the law's model of the work and the machine, or None if too little was measured."""
    if facts.tickets < 8 or not facts.later_batches or facts.work_s <= 0:
        return None
    count, now = facts.later_batches, present(facts)
    elsewhere_s = found.flagged_s("is_order") + facts.held_s + found.by_cause["crowding"] + stream_s(facts)
    makes_s = facts.running_s - elsewhere_s
    load = min(1.0, (facts.others or 0.0) / facts.cpus)
    waits = now.workers > 0 and facts.running_wait_ratio > _WAITS and makes_s > 0
    model = Model.of(
        facts,
        now=now,
        step_s=free_steps_s(facts) / count,
        others=facts.others or 0.0,
        is_full=is_full(facts),
        limits=Limits(),
        measured_rate=count / makes_s if waits else None,
        error=math.hypot(_LEAST + _BY_LOAD * load, _missed(facts.decisions), 1.0 / math.sqrt(count)),
        start=_start(facts, now),
    )
    return replace(model, limits=_limits(facts, model))


def _limits(facts: Facts, model: Model) -> Limits:
    """Return the most workers to advise: as many as one decision of the tuner can reach and the CPUs can serve."""
    now, here = model.now, model.local
    jump = int(max(CONSTANTS.jump_floor, CONSTANTS.jump * now.workers))
    most = min(most_waiting(facts.config, facts.cpus), jump)
    local = 0 if now.remote and not now.local else most
    if here.cpu_s > _COMPUTES * here.service_s:
        beside = 0 if is_full(facts) else math.ceil(facts.cpus * (here.service_s / here.cpu_s - 1.0) - _ROUNDING)
        served = math.ceil(facts.cpus) + min(_BESIDE, beside)
        local = min(local, max(now.local, served))
    return Limits(local=local, remote=most if now.remote else 0)


def _start(facts: Facts, now: Settings) -> Start | None:
    startup_s = facts.causes.get("startup", 0.0)
    if not facts.starts_anew or not facts.passes or not startup_s:
        return None
    batches = max(1, facts.batches // facts.passes)
    return Start(seconds=startup_s / facts.passes, workers=max(1, now.local), batches=batches)


def costliest(facts: Facts) -> tuple[str, float] | None:
    """Return the costliest stage or call, with its share of the time of making a batch; None without a batch.

    The time of each call in `hot_calls` is subtracted from its stage.
    """
    pools = facts.pools.values()
    seconds = {name: sum(getattr(pool, f"{name}_s") for pool in pools) for name in STAGES}
    for one in hot_calls(facts):
        stage = "collate" if one.is_collating else "load"
        seconds[stage] = max(0.0, seconds[stage] - one.wall_s)
        seconds[one.title] = seconds.get(one.title, 0.0) + one.wall_s
    total = sum(seconds.values())
    name = max(seconds, key=lambda one: seconds[one])
    return (name, seconds[name] / total) if total > 0 else None

"""From the measurements of a loader to the law's model. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from dpex.autotune.constants import CONSTANTS
from dpex.autotune.law.model import Model, Start
from dpex.autotune.limits import Limits
from dpex.autotune.types import Decision
from dpex.diagnose.facts import Facts
from dpex.diagnose.hot_calls import hot_calls
from dpex.measure.causes import OWN, LostTime
from dpex.measure.pool_reading import STAGES, PoolReading
from dpex.measure.settings import INLINE, LOCAL, Settings
from dpex.measure.views import without_queueing

FULL = 0.9
"""Busy part of the CPUs from which more workers that compute only take CPUs from each other."""
_COMPUTES, _BESIDE = 0.5, 2
"""Workers that compute for more than this part of their time are no more than CPUs, and that many more."""
_ROUNDING = 0.1
"""Workers that wait for less than this part of a worker's time are no further worker."""
_WAITS = 0.01
"""Share of the time from which on a loop counts as waiting, so that its rate is the workers' rate."""
_PAST = 8
"""The latest predictions of the tuner, whose errors widen the next."""
_LEAST, _BY_LOAD = 0.04, 0.15
"""Relative error of a rate on an idle machine, and what is added where other programs hold all CPUs."""


def present(facts: Facts) -> Settings:
    return Settings(local=facts.local_workers, remote=facts.remote_workers, prefetch=max(1, facts.prefetch))


def cpus_used(facts: Facts) -> Mapping[str, float]:
    """CPUs of this machine that were busy on average, by who had them."""
    wall_s = max(1e-9, facts.wall_s)
    made_s = {name: facts.pools[name].cpu_s if name in facts.pools else 0.0 for name in (LOCAL, INLINE)}
    return {
        "the workers": (made_s[LOCAL] + facts.read_cpu_s) / wall_s,
        "the training process": max(facts.trainer_cpu_s, made_s[INLINE]) / wall_s,
        "other programs": facts.others or 0.0,
    }


def is_full(facts: Facts) -> bool:
    """Return True if hardly any CPU of this machine was idle."""
    return sum(cpus_used(facts).values()) >= FULL * facts.cpus


def order_s(found: LostTime) -> float:
    """Seconds lost as too few batches were in flight, or the next in turn was late."""
    return found.flagged_s("is_order")


def stream_s(facts: Facts) -> float:
    """Seconds of the wait for what other workers read of a stream."""
    return facts.causes.get("stream", 0.0)


def covering_prefetch(facts: Facts, model: Model) -> int:
    """Return the batches in flight with which the workers stay busy while the slowest batch is made."""
    slowest_s = max(facts.services_s, default=0.0)
    made = min(model.demand, model.now.workers / max(1e-9, model.local.service_s))
    return math.ceil(slowest_s * made) + model.now.workers


def _missed(decisions: Sequence[Decision]) -> float:
    """The mean error of the latest predictions of the wait, 0 to 1."""
    judged = [one for one in decisions if one.outcome is not None and one.predicted_rate and one.reason != "undo"][
        -_PAST:
    ]
    errors = [abs(one.predicted_wait - one.outcome.wait) for one in judged if one.outcome is not None]
    return sum(errors) / len(errors) if errors else 0.0


def model_of(facts: Facts, found: LostTime) -> Model | None:
    """Return the law's model of the work and the machine; None: too little was seen."""
    if facts.tickets < 8 or not facts.later_batches or facts.work_s <= 0:
        return None
    count, now = facts.later_batches, present(facts)
    makes_s = facts.running_s - order_s(found) - facts.held_s - found.by_cause["crowding"] - stream_s(facts)
    load = min(1.0, (facts.others or 0.0) / facts.cpus)
    waits = now.workers > 0 and facts.running_wait_ratio > _WAITS and makes_s > 0
    model = Model.of(
        facts,
        now=now,
        step_s=_free_step_s(facts) / count,
        others=facts.others or 0.0,
        limits=Limits(),
        unevenness=_unevenness(facts),
        measured_rate=count / makes_s if waits else None,
        error=math.hypot(_LEAST + _BY_LOAD * load, _missed(facts.decisions), 1.0 / math.sqrt(count)),
        queued_s=partial(_queued_s, facts),
        has_transit=True,
        start=_start(facts, now),
    )
    return replace(model, limits=_limits(facts, model))


def _free_step_s(facts: Facts) -> float:
    """Seconds of all steps, of what else the training loop does itself, had it a CPU all the time, and of what it
    waited for page-locked memory, which no worker makes shorter."""
    busy_s = facts.transfer_s + sum(facts.causes.get(name, 0.0) for name in (*OWN, "h2d"))
    loop_s = facts.work_s - facts.held_s + without_queueing(busy_s, 0.0, facts.loop_queued_s)
    if facts.gpu_running_stall_s is None:
        return loop_s
    return max(loop_s, facts.running_s - facts.gpu_running_stall_s - facts.held_s)


def _queued_s(facts: Facts, pool: PoolReading) -> float:
    """Return the seconds of a pool's workers on run queues. Where the kernel reports none and the CPUs are full, all
    time of workers that compute beyond their CPU time counts."""
    if pool.queueing_s is not None:
        return pool.queueing_s
    return pool.busy_s - pool.cpu_s if pool.cpu_s > _COMPUTES * pool.busy_s and is_full(facts) else 0.0


def _limits(facts: Facts, model: Model) -> Limits:
    """Return the limits of advice: one jump of the tuner, on this machine or on the cluster."""
    now, here = model.now, model.local
    soon = int(max(CONSTANTS.jump_floor, CONSTANTS.jump * now.workers))
    most = min(facts.config.max_waiting, soon)
    local = 0 if now.remote and not now.local else most
    if here.cpu_s > _COMPUTES * here.service_s:
        beside = 0 if is_full(facts) else math.ceil(facts.cpus * (here.service_s / here.cpu_s - 1.0) - _ROUNDING)
        served = math.ceil(facts.cpus) + min(_BESIDE, beside)
        local = min(local, max(now.local, served))
    return Limits(local=local, remote=most if now.remote else 0)


def _unevenness(facts: Facts) -> float:
    services_s = facts.services_s
    mean_s = sum(services_s) / len(services_s) if services_s else 0.0
    return max(1.0, max(services_s) / mean_s) if mean_s else 1.0


def _start(facts: Facts, now: Settings) -> Start | None:
    startup_s = facts.causes.get("startup", 0.0)
    if not facts.starts_anew or not facts.passes or not startup_s:
        return None
    batches = max(1, facts.batches // facts.passes)
    return Start(seconds=startup_s / facts.passes, workers=max(1, now.local), batches=batches)


def costliest(facts: Facts) -> tuple[str, float] | None:
    """Return the costliest stage of a batch, or call, with its share of the batch's time; None without a batch.

    The time of a call that is known to cost much is no part of its stage.
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

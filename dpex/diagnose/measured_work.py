"""What was measured, as the tuner's model sees it: the work, and how far the model is off at present. Pure."""

from __future__ import annotations

import math

from dpex.autotune.estimator import WorkEstimator
from dpex.autotune.felt import FeltSample
from dpex.autotune.model import Estimate
from dpex.autotune.planner import expect
from dpex.autotune.types import Sample, Settings
from dpex.core.names import INLINE, LOCAL, REMOTE
from dpex.diagnose.attribution import LostTime
from dpex.diagnose.facts import Facts, PoolFacts
from dpex.measure.samples import MachineSample, PoolSample

_FURTHEST = 2.0
"""By such a factor, either way, the model's rates are corrected at most."""


def present(facts: Facts) -> Settings:
    """The setting that was measured."""
    return Settings(local=facts.local, remote=facts.remote, prefetch=max(1, facts.prefetch))


def estimate(facts: Facts, found: LostTime) -> Estimate:
    """The work as the tuner's model sees it: one window, which is the whole run."""
    windows = WorkEstimator()
    windows.add(FeltSample(sample=_sample(facts)))
    rate = facts.batches / max(1e-9, facts.wall_s)
    pinning = facts.causes.get("h2d", 0.0)
    bound = pinning > 0.3 * max(1e-9, found.total_s)
    return windows.estimate(facts.cpus, rate if bound else math.inf, math.inf)


def _sample(facts: Facts) -> Sample:
    causes = facts.causes
    inline = facts.pools.get(INLINE, PoolFacts())
    making_s = inline.busy_s if not facts.workers else 0.0
    busy_s = sum(causes.get(name, 0.0) for name in ("sampler", "dispatch", "unknown"))
    own_s = busy_s + facts.transfer_s + making_s
    wait_s = max(0.0, facts.wait_s - causes.get("startup", 0.0) - busy_s - making_s)
    seconds = wait_s + own_s + facts.work_s
    running = 1.0 - wait_s / seconds if seconds > 0 else 1.0  # it queues for a CPU after waits, too, not only in steps
    return Sample(
        at=facts.wall_s,
        seconds=seconds,
        settings=present(facts),
        batches=max(1, facts.batches - facts.passes),
        wait_s=wait_s,
        own_s=own_s,
        work_s=facts.work_s,
        step_spread=facts.step_spread,
        batch_bytes=facts.batch_bytes,
        made_here=_pool(inline),
        local=_pool(facts.pools.get(LOCAL, PoolFacts())),
        remote=_pool(facts.pools.get(REMOTE, PoolFacts())),
        machine=MachineSample(
            cpus=facts.cpus,
            others=facts.others or 0.0,
            trainer_cpu_s=facts.trainer_cpu_s,
            trainer_queued_s=None if facts.trainer_queued_s is None else facts.trainer_queued_s * running,
        ),
    )


def _pool(pool: PoolFacts) -> PoolSample:
    """The way from a remote worker keeps it from other batches, so it counts as its time."""
    load_s = pool.load_s + pool.transit_s
    return pool.narrowed(PoolSample, requested=pool.workers, running=pool.workers, load_s=load_s)


def expected(work: Estimate, settings: Settings) -> tuple[float, float]:
    """By the model: rate, and a step as it would be measured, which is longer where the consumer shares its CPU."""
    plan = expect(work, settings)
    own_cpu = work.step_cpu_s + work.own_s
    crowding_s = max(0.0, 1.0 / plan.flow.demand - work.step_s - work.own_s) if settings.workers else 0.0
    return plan.rate, work.step_s + (crowding_s * work.step_cpu_s / own_cpu if own_cpu > 0 else 0.0)


def wait_of(rate: float, step_s: float) -> float:
    return min(1.0, max(0.0, 1.0 - rate * step_s))


class Calibration:
    """How far the model is off for the present setting: factors for its rates and its steps."""

    def __init__(self, facts: Facts, work: Estimate) -> None:
        batches = max(1, facts.batches - facts.passes)
        rate, step_s = expected(work, present(facts))
        running_s = max(1e-9, facts.wall_s - facts.causes.get("startup", 0.0))
        self.modelled = wait_of(rate, step_s)
        self.off = abs(self.modelled - facts.wait_ratio)
        self._rate = min(_FURTHEST, max(1.0 / _FURTHEST, batches / running_s / max(1e-9, rate)))
        self._step = facts.work_s / batches / max(1e-9, step_s)

    def __call__(self, work: Estimate, settings: Settings) -> tuple[float, float]:
        """Rate and wait under a setting."""
        rate, step_s = expected(work, settings)
        step_s *= self._step
        rate = min(rate * self._rate, 1.0 / max(1e-9, step_s))
        return rate, wait_of(rate, step_s)

"""Which setting is best, by the model: the cheapest of those that are as fast as any."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.constants.planning import PLANNER
from dpex.autotune.model import Estimate, Flow, fluid, replay
from dpex.autotune.types import Settings
from dpex.core.names import LOCAL, REMOTE

_PREFETCHES = (2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Batches in flight per worker, beside the most; two, as in PyTorch, are the least where memory allows."""
_PREFETCHES_IF_EVEN = 3
"""So many of these are worth a look where times hardly vary."""
_WIDER = (1.25, 1.5, 2.0)
"""So many times the workers are looked at where times vary much."""
_LEANER = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
"""So many times where these leave too little memory for batches."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Hard walls: workers by pool, batches in flight, and bytes for both."""

    local: int
    remote: int
    prefetch: int
    memory: float = math.inf
    worker_bytes: float = 0.0
    batch_bytes: float = 0.0
    least_local: int = 0
    least_remote: int = 0

    @property
    def least(self) -> Settings:
        """The fewest workers that are allowed: what is left where nothing else fits."""
        return Settings(local=self.least_local, remote=self.least_remote, prefetch=1)

    def most_prefetch(self, local: int) -> int:
        """Batches in flight that there is room for beside so many local workers, at least one."""
        if math.isinf(self.memory) or self.batch_bytes <= 0:
            return self.prefetch
        return max(1, min(self.prefetch, int((self.memory - local * self.worker_bytes) / self.batch_bytes)))

    def within(self, settings: Settings) -> Settings:
        """The nearest setting inside the walls."""
        local = max(self.least_local, min(settings.local, self.local))
        remote = max(self.least_remote, min(settings.remote, self.remote))
        return Settings(local=local, remote=remote, prefetch=max(1, min(settings.prefetch, self.most_prefetch(local))))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A setting and what the model expects of it: batches per second, and the share of time lost to loading."""

    settings: Settings
    rate: float
    wait: float
    flow: Flow


def best(work: Estimate, bounds: Bounds, config: AutotuneConfig) -> Plan:
    """The cheapest setting whose predicted rate is as good as any's."""
    flows = [(settings, fluid(work, settings)) for settings in _candidates(work, bounds)]
    top = max(flow.rate for _, flow in flows)
    near = sorted(
        ((s, f) for s, f in flows if f.rate >= PLANNER.near * top), key=lambda pair: (_cost(pair[0]), -pair[1].rate)
    )
    roomy = next((s for s, f in near if f.rate >= PLANNER.as_fast * top and _has_headroom(s, f, config)), None)
    roomy = roomy or max(near, key=lambda pair: pair[1].rate)[0]
    plan = _wider(work, _with_prefetch(work, roomy, bounds, config), bounds, config)
    plan = _leaner(work, plan, bounds, config)
    cheaper = [settings for settings in _by_number(near) if _cost(settings) < _cost(plan.settings)]
    for settings in cheaper[-PLANNER.cheaper_tried :]:
        other = _with_prefetch(work, settings, bounds, config)
        if other.rate >= PLANNER.as_fast * plan.rate:
            return other
    return plan


def _by_number(near: Sequence[tuple[Settings, Flow]]) -> list[Settings]:
    """The first of each number of workers: the cheapest, as they come in the order of their costs."""
    first: dict[int, Settings] = {}
    for settings, _ in near:
        first.setdefault(settings.workers, settings)
    return list(first.values())


def _wider(work: Estimate, plan: Plan, bounds: Bounds, config: AutotuneConfig) -> Plan:
    """With spread service times a few more workers may be worth more than any prefetch."""
    settings = plan.settings
    if not settings.workers or plan.rate >= PLANNER.as_fast * plan.flow.demand:
        return plan
    pool = REMOTE if settings.remote and settings.remote < bounds.remote else LOCAL
    most = getattr(bounds, pool)
    for factor in _WIDER:
        count = min(most, math.ceil(getattr(settings, pool) * factor))
        more = Settings(**{LOCAL: settings.local, REMOTE: settings.remote, pool: count})
        if more.workers > bounds.most_prefetch(more.local) or count == getattr(plan.settings, pool):
            break
        other = _with_prefetch(work, more, bounds, config)
        if other.rate < (1.0 + config.gain) * plan.rate:
            break
        plan = other
    return plan


def _leaner(work: Estimate, plan: Plan, bounds: Bounds, config: AutotuneConfig) -> Plan:
    """With fewer local workers, where their memory is worth more as prefetch: all that there is is taken, and the
    workers idle behind slow batches."""
    settings = plan.settings
    if plan.rate >= PLANNER.as_fast * plan.flow.rate or settings.prefetch < bounds.most_prefetch(settings.local):
        return plan
    found = plan
    for factor in _LEANER:
        fewer = replace(settings, local=max(bounds.least_local, math.floor(settings.local * factor)))
        if not fewer.workers or fluid(work, fewer).rate <= found.rate:
            break
        other = _with_prefetch(work, fewer, bounds, config)
        if other.rate >= (1.0 + config.wait_goal) * found.rate:
            found = other
    return found


def expect(work: Estimate, settings: Settings) -> Plan:
    """What the model expects of a setting as it is."""
    flow = fluid(work, settings)
    rate = replay(work, settings, flow)
    return Plan(settings=settings, rate=rate, wait=max(0.0, 1.0 - rate * work.step_s), flow=flow)


def half_way(work: Estimate, now: Settings, plan: Plan, idle: float) -> Plan:
    """The plan, or, where it more than doubles the local workers and CPUs are short, one half of the way to it.

    For systems that do not tell who queues for a CPU. Workers that wait leave the CPUs to others; if their waiting is
    queueing after all, each further one makes everybody slower, the training loop too. ``idle``: CPUs that nobody uses.
    From the half-way setting the rest of the way is judged anew, by what it brought.
    """
    wanted = plan.settings
    further = wanted.local - now.local
    if not now.local or idle >= PLANNER.short * work.cpus or further <= max(now.local, idle):
        return plan
    local = round(math.sqrt(now.local * wanted.local))
    prefetch = math.ceil(wanted.prefetch * (local + wanted.remote) / wanted.workers)
    return expect(work, replace(wanted, local=local, prefetch=max(prefetch, min(now.prefetch, wanted.prefetch))))


def _has_headroom(settings: Settings, flow: Flow, config: AutotuneConfig) -> bool:
    return not settings.workers or flow.capacity >= config.headroom * flow.demand


def _cost(settings: Settings) -> float:
    return settings.local + PLANNER.remote_cost * settings.remote


def _candidates(work: Estimate, bounds: Bounds) -> Iterable[Settings]:
    yield bounds.least
    for local in range(bounds.least_local, bounds.local + 1):
        deepest = bounds.most_prefetch(local)
        for remote in _remotes(work, local, bounds):
            if local + remote > bounds.least.workers and (local + remote <= deepest or (local, remote) == (1, 0)):
                yield Settings(local=local, remote=remote, prefetch=1)


def _remotes(work: Estimate, local: int, bounds: Bounds) -> Iterable[int]:
    """Numbers of remote workers worth a look beside so many local ones: none, all, and about what is missing."""
    low, high = bounds.least_remote, bounds.remote
    if high == low:
        return (low,)
    flow = fluid(work, Settings(local=local, remote=low, prefetch=1)) if local + low else None
    have = flow.capacity if flow is not None else 0.0
    missing = (1.0 / max(1e-9, work.step_s + work.own_s) - have) * work.far_s
    around = {low, high} | {low + int(missing * factor) + extra for factor in (1.0, 1.2) for extra in (0, 1, 2)}
    if work.far_ceiling < math.inf:
        around |= {low + int(work.far_ceiling * work.far_s) + extra for extra in (0, 1, 2)}
    return sorted(number for number in around if low <= number <= high)


def _with_prefetch(work: Estimate, settings: Settings, bounds: Bounds, config: AutotuneConfig) -> Plan:
    """The smallest prefetch that is as fast as the deepest."""
    if not settings.workers:
        return expect(work, replace(settings, prefetch=1))
    deepest = bounds.most_prefetch(settings.local)
    far = work.travel_s / max(1e-9, work.far_s) * settings.remote
    even = work.variation < PLANNER.even and work.step_spread < PLANNER.even
    factors = _PREFETCHES[:_PREFETCHES_IF_EVEN] if even else (*_PREFETCHES, PLANNER.most_per_worker)
    prefetches = sorted({min(deepest, max(2, round(settings.workers * factor + far))) for factor in factors})
    plans = _Plans(work, settings, prefetches)
    wanted = (1.0 - config.wait_goal / 2) * plans[len(prefetches) - 1].rate
    found = plans[bisect_left(plans, wanted, 0, len(prefetches) - 1, key=lambda plan: plan.rate)]
    safe = max(found.settings.prefetch, min(_safe_prefetch(work, found.settings, bounds), deepest))
    return replace(found, settings=replace(found.settings, prefetch=safe))


def _safe_prefetch(work: Estimate, settings: Settings, bounds: Bounds) -> int:
    """Batches in flight that make up for what is not known of the spread of service times, within what is cheap.

    None where most workers are remote: on a network that is not fast enough batches hold each other up.
    """
    if settings.remote > settings.local or work.variation < PLANNER.hardly_uneven:
        return 0
    worker_bytes = bounds.worker_bytes or PLANNER.worker_bytes
    cheap = int(settings.workers * worker_bytes / bounds.batch_bytes) if bounds.batch_bytes else settings.prefetch
    if work.seen < PLANNER.spread_known:
        return min(cheap, PLANNER.safe_per_worker * settings.workers)
    return min(cheap, PLANNER.safe * settings.prefetch) if work.variation >= PLANNER.even else 0


class _Plans(Sequence[Plan]):
    """One for each prefetch, made when it is looked at."""

    def __init__(self, work: Estimate, settings: Settings, prefetches: Sequence[int]) -> None:
        self._work, self._settings, self._prefetches = work, settings, prefetches
        self._made: dict[int, Plan] = {}

    def __len__(self) -> int:
        return len(self._prefetches)

    def __getitem__(self, index: int) -> Plan:  # type: ignore[override]
        if index not in self._made:
            self._made[index] = expect(self._work, replace(self._settings, prefetch=self._prefetches[index]))
        return self._made[index]

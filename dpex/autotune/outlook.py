"""Ask the model for the best settings, and anew only where something that matters has changed. PURE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.constants.planning import OUTLOOK, PLANNER
from dpex.autotune.model import Estimate
from dpex.autotune.planner import Bounds, Plan, best, expect
from dpex.autotune.situation import Outlook, Recent
from dpex.autotune.types import Settings


@dataclass(frozen=True, kw_only=True)
class _Thought:
    about: tuple[Bounds, Settings]
    numbers: tuple[float, ...]
    outlook: Outlook


class Thinker:
    """Answers from what was thought out last as long as no number has changed by more than a few percent."""

    def __init__(self, config: AutotuneConfig) -> None:
        self._config = config
        self._last: _Thought | None = None

    def think(self, work: Estimate, dearer: Estimate, bounds: Bounds, now: Settings, variation: float) -> Outlook:
        """What to expect of the best settings and of the present ones.

        ``dearer``: the work with costs as high as they may be. ``variation``: of service times, over their mean.
        """
        numbers = _numbers(work, dearer, variation)
        prefetch = min(bounds.prefetch, PLANNER.most_per_worker * (bounds.local + bounds.remote))
        about = replace(bounds, prefetch=prefetch, memory=_rounded(bounds.memory)), now
        last = self._last
        if last is None or last.about != about or not _are_alike(numbers, last.numbers):
            outlook = Outlook(best=_best(work, dearer, bounds, now, self._config), here=expect(work, now))
            last = self._last = _Thought(about=about, numbers=numbers, outlook=outlook)
        return last.outlook


def plausible(outlook: Outlook, recent: Recent) -> Outlook:
    """With no rate that workers cannot bring: they make the waiting shorter, and nothing else."""
    if recent.windows < OUTLOOK.least_windows:
        return outlook
    most = max(recent.rate, recent.rate / max(OUTLOOK.least_share, 1.0 - recent.lost))
    return Outlook(best=_at_most(outlook.best, most), here=_at_most(outlook.here, most))


def _at_most(plan: Plan, rate: float) -> Plan:
    return replace(plan, rate=min(plan.rate, rate)) if plan.settings.workers else plan


def _best(work: Estimate, dearer: Estimate, bounds: Bounds, now: Settings, config: AutotuneConfig) -> Plan:
    """The best plan. One with more workers than now has as many as batches need that are as dear as they may be; one
    with less must do even then."""
    plan = best(work, bounds, config)
    if dearer == work or not plan.settings.workers:
        return plan
    if plan.settings.workers > now.workers:
        return _with_a_reserve(work, dearer, plan, bounds, config)
    if not _is_less(plan.settings, now):
        return plan
    careful = best(dearer, bounds, config).settings
    if not _is_less(plan.settings, careful):
        return plan
    return expect(work, careful if _is_less(careful, now) else now)


def _with_a_reserve(work: Estimate, dearer: Estimate, plan: Plan, bounds: Bounds, config: AutotuneConfig) -> Plan:
    """The plan for dearer batches, if it has more workers and is as fast where batches cost what they seem to: of
    uneven batches the short ones are seen first, and what turns out to be too much is given back."""
    reserve = expect(work, best(dearer, bounds, config).settings)
    has_more = reserve.settings.workers > plan.settings.workers
    return reserve if has_more and reserve.rate >= PLANNER.as_fast * plan.rate else plan


def _is_less(one: Settings, other: Settings) -> bool:
    return (one.workers, one.prefetch) < (other.workers, other.prefetch)


def _numbers(work: Estimate, dearer: Estimate, variation: float) -> tuple[float, ...]:
    """What the outlook depends on. Small parts stand beside large ones, so that they matter only where they matter."""
    seconds = (work.step_s, work.step_s + work.step_cpu_s + work.own_s, work.far_s, work.far_s + work.travel_s)
    hidden = work.step_s + work.hidden_s
    making = (work.cpu_s + work.wait_s, work.cpu_s + work.wait_s + 2.0 * work.cpu_s, work.here_s)
    ceilings = (1.0 / work.ceiling, 1.0 / work.far_ceiling)
    rest = (work.cpus, work.cpus + work.others, *ceilings, 0.5 + variation)
    errors = (dearer.cpu_s + dearer.wait_s, 10.0 + work.correlation, 10.0 + dearer.correlation)
    return (*seconds, hidden, *making, *rest, *errors)


def _rounded(memory: float) -> float:
    """Memory to some five percent: what is free varies all the time."""
    return memory if math.isinf(memory) or memory <= 0 else round(math.log(memory) / OUTLOOK.alike)


def _are_alike(now: Sequence[float], before: Sequence[float]) -> bool:
    return all(a == b or abs(a - b) <= OUTLOOK.alike * abs(b) for a, b in zip(now, before, strict=True))

"""Changes that may be worth a prediction: other settings, and the same run with cheaper work. Pure.

What a replay cannot know is said with the change: whether a storage serves more readers as fast, whether another
machine is as fast as this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.constants.planning import PLANNER
from dpex.autotune.model import Estimate
from dpex.autotune.planner import Bounds, best
from dpex.autotune.types import Settings
from dpex.core.durations import remainder
from dpex.diagnose.attribution import TINY_S, LostTime
from dpex.diagnose.facts import Facts, PoolFacts
from dpex.diagnose.measured_work import present

MOST_WORKERS = 64
"""Nobody is told to have more of them."""
MATTERS = 0.05
"""A share of the time below which nothing is worth a change."""

Kind = Literal["workers", "prefetch", "place", "cheaper", "cached", "narrow"]
EFFORT: dict[Kind, float] = {
    "workers": 1.0,
    "prefetch": 1.0,
    "place": 2.0,
    "narrow": 2.0,
    "cached": 3.0,
    "cheaper": 4.0,
}
"""How much work each asks of a person: an argument, where workers are, a line, a cache, a rewrite."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A change in words, what settings it leads to, and what would then be measured; condition: what it takes for
    granted, if anything."""

    text: str
    kind: Kind
    settings: Settings
    facts: Facts
    condition: str = ""


def candidates(facts: Facts, work: Estimate, found: LostTime) -> Iterator[Candidate]:
    """Yield the changes that are worth a look."""
    now = present(facts)
    if now.workers:
        yield from _counts(facts, now)
        yield from _prefetches(facts, now)
        if facts.has_cluster:
            yield from _places(facts, now)
    elif facts.tickets:
        for workers in (1, 2, 4):
            settings = Settings(local=workers, prefetch=2 * workers)
            yield Candidate(text=_number(facts, workers, 0), kind="workers", settings=settings, facts=facts)
    yield from _best(facts, work, now)
    yield from _cheaper(facts, now, found)


def _counts(facts: Facts, now: Settings) -> Iterator[Candidate]:
    counts = {max(1, now.workers // 2), 2 * now.workers} - {now.workers}
    if facts.busy_s / facts.tickets < TINY_S:
        counts.add(0)
    for workers in sorted(counts):
        yield Candidate(
            text=_number(facts, workers, now.workers),
            kind="workers",
            settings=with_workers(now, workers, is_capped=facts.is_capped),
            facts=facts,
            condition=_SERVES if workers > now.workers and _waits(facts) else "",
        )


def _number(facts: Facts, workers: int, now: int) -> str:
    """Another number of workers in words. ``num_workers=`` is said of numbers that the program gives, where a reader
    looks for them."""
    if not facts.is_tuned:
        return f"num_workers={workers} instead of {now}"
    return f"{_workers(workers)} instead of {_workers(now)}"


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}" if count else "in-process loading"


_SERVES = "the storage serves more readers as fast"


def _waits(facts: Facts) -> bool:
    pools = facts.pools.values()
    return sum(remainder(pool.load_s, pool.load_cpu_s, pool.queued_s or 0.0) for pool in pools) > 0.3 * facts.busy_s


def with_workers(now: Settings, workers: int, *, is_capped: bool = False) -> Settings:
    """That many where they are now, in proportion, and as many batches in flight for each."""
    remote = round(workers * now.remote / now.workers) if now.workers else 0
    prefetch = now.prefetch if is_capped else max(2, math.ceil(now.prefetch * workers / max(1, now.workers)))
    return Settings(local=workers - remote, remote=remote, prefetch=prefetch)


def _prefetches(facts: Facts, now: Settings) -> Iterator[Candidate]:
    for prefetch in sorted({max(1, now.prefetch // 2), 2 * now.prefetch} - {now.prefetch}):
        yield Candidate(
            text=f"{prefetch} batches in flight instead of {now.prefetch}",
            kind="prefetch",
            settings=replace(now, prefetch=prefetch),
            facts=facts,
            condition="memory_budget allows it" if facts.is_capped and prefetch > now.prefetch else "",
        )


def _places(facts: Facts, now: Settings) -> Iterator[Candidate]:
    if now.local:
        settings = Settings(remote=now.workers, prefetch=max(now.prefetch, 4 * now.workers))
        known = "" if facts.remote else "the other machines are as fast, and batches are not large"
        text = f"all {now.workers} workers on the cluster"
        yield Candidate(text=text, kind="place", settings=settings, facts=facts, condition=known)
    if now.remote:
        settings = Settings(local=now.workers, prefetch=now.prefetch)
        known = "" if facts.local else "this machine is as fast as the others"
        text = f"all {now.workers} workers on this machine"
        yield Candidate(text=text, kind="place", settings=settings, facts=facts, condition=known)


def _best(facts: Facts, work: Estimate, now: Settings) -> Iterator[Candidate]:
    """The cheapest setting that is as fast as any, by the tuner's own choice."""
    most = min(MOST_WORKERS, max(8, 4 * now.workers, 2 * math.ceil(facts.cpus)))
    prefetch = now.prefetch if facts.is_capped else PLANNER.most_per_worker * most
    bounds = Bounds(
        local=most if now.local or not now.workers else 0,
        remote=most if now.remote else 0,
        prefetch=prefetch,
        least_local=0 if now.remote or not now.workers else 1,
    )
    chosen = best(work, bounds, AutotuneConfig()).settings
    if chosen != now:
        more = chosen.workers > now.workers and _waits(facts)
        text = f"{chosen} instead of {now}"
        yield Candidate(text=text, kind="workers", settings=chosen, facts=facts, condition=_SERVES if more else "")


def _cheaper(facts: Facts, now: Settings, found: LostTime) -> Iterator[Candidate]:
    lost = max(1e-9, found.total_s)
    costs = {"the dataset": "load", "the collate function": "collate", "writing batches into memory": "encode"}
    seconds = {name: sum(getattr(pool, f"{stage}_s") for pool in facts.pools.values()) for name, stage in costs.items()}
    dearest = max(seconds, key=lambda name: seconds[name])
    yield Candidate(
        text=f"{dearest} at half the cost",
        kind="cheaper",
        settings=now,
        facts=_scaled(facts, **{costs[dearest]: 0.5}),
    )
    yield from _cheaper_step(facts, now)
    if found.by_cause["storage"] > MATTERS * lost:
        yield Candidate(text="samples cached: no waiting for data", kind="cached", settings=now, facts=_cached(facts))
    if found.by_cause["transfer"] > MATTERS * lost:
        yield Candidate(
            text="uint8 until device_transform makes float32",
            kind="narrow",
            settings=now,
            facts=_narrow(facts),
            condition="batches are float32 that come from whole numbers",
        )


def _cheaper_step(facts: Facts, now: Settings) -> Iterator[Candidate]:
    """The dearest transform, if it is known and matters."""
    steps = [one for one in facts.transforms or () if one.is_within]
    dearest = max(steps, key=lambda one: one.all_wall_s, default=None)
    if dearest is None or dearest.all_wall_s < MATTERS * facts.busy_s:
        return
    stage = "collate" if dearest.is_collating else "load"
    wall_s, cpu_s = (sum(getattr(pool, f"{stage}{of}_s") for pool in facts.pools.values()) for of in ("", "_cpu"))
    factors = {
        stage: 1.0 - 0.5 * dearest.all_wall_s / max(1e-12, wall_s),
        f"{stage}_cpu": 1.0 - 0.5 * dearest.all_cpu_s / max(1e-12, cpu_s),
    }
    text = f"the transform {dearest.short} at half the cost"
    yield Candidate(text=text, kind="cheaper", settings=now, facts=_scaled(facts, **factors))


def _each_pool(facts: Facts, change: Callable[[PoolFacts], PoolFacts]) -> Facts:
    return replace(facts, pools={name: change(pool) for name, pool in facts.pools.items()})


def _scaled(
    facts: Facts,
    *,
    load: float = 1.0,
    collate: float = 1.0,
    encode: float = 1.0,
    load_cpu: float | None = None,
    collate_cpu: float | None = None,
) -> Facts:
    """Stages at another cost, their CPU time too unless another factor is given for that; service times are scaled by
    what that makes of a batch."""
    load_cpu = load if load_cpu is None else load_cpu
    collate_cpu = collate if collate_cpu is None else collate_cpu

    def scaled(pool: PoolFacts) -> PoolFacts:
        changed = replace(
            pool,
            load_s=pool.load_s * load,
            load_cpu_s=pool.load_cpu_s * load_cpu,
            collate_s=pool.collate_s * collate,
            collate_cpu_s=pool.collate_cpu_s * collate_cpu,
            encode_s=pool.encode_s * encode,
            encode_cpu_s=pool.encode_cpu_s * encode,
        )
        return _same_spread(pool, changed)

    return _each_pool(facts, scaled)


def _same_spread(pool: PoolFacts, changed: PoolFacts) -> PoolFacts:
    factor = changed.busy_s / pool.busy_s if pool.busy_s > 0 else 1.0
    queue_factor = changed.cpu_s / pool.cpu_s if pool.cpu_s > 0 else 1.0
    queued = None if pool.queued_s is None else pool.queued_s * queue_factor
    return replace(changed, queued_s=queued, services_s=tuple(seconds * factor for seconds in pool.services_s))


def _cached(facts: Facts) -> Facts:
    """Without waiting for anything but a CPU; nothing is left of how waits were spread."""

    def cached(pool: PoolFacts) -> PoolFacts:
        queued_s = (pool.queued_s or 0.0) * pool.load_cpu_s / max(1e-9, pool.cpu_s)
        changed = replace(pool, load_s=min(pool.load_s, pool.load_cpu_s + queued_s))
        return replace(_same_spread(pool, changed), queued_s=pool.queued_s)

    return _each_pool(facts, cached)


def _narrow(facts: Facts) -> Facts:
    """A quarter of the bytes: on the way, and as they are written; taking them in costs the same."""
    scaled = _scaled(facts, encode=0.25)
    return replace(
        _each_pool(scaled, lambda pool: replace(pool, transit_s=pool.transit_s / 4)), batch_bytes=facts.batch_bytes / 4
    )

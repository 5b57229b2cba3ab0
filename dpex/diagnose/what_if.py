"""What another setting, or cheaper work, would bring: measured times replayed through the tuner's own model. Pure.

Intervals come from resampling: the batches and the steps that were seen are drawn anew, with replacement (Efron, 1979),
`ROUNDS` times, and each draw is replayed; the interval is the range of what comes out. The model is first asked for the
present setting: by as much as its rate and its steps are off there, they are taken to be off elsewhere, and by half of
what its stall is off, every interval is wider.

What a replay cannot know is said with the prediction: whether a storage serves more readers as fast, whether another
machine is as fast as this one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.estimator import Windows
from dpex.autotune.model import Estimate
from dpex.autotune.policy import DEEPEST_PER_WORKER, Bounds, best, expect
from dpex.autotune.types import Decision, Sample, Settings
from dpex.diagnose.attribution import TINY_S, Losses
from dpex.diagnose.facts import Facts, LaneFacts
from dpex.measure.samples import HostSample, LaneSample

ROUNDS = 12
WORTH = 0.03
"""Less stall than this saved is no recommendation: runs of the same setting differ by as much."""
MOST_WORKERS = 64
MATTERS = 0.05
_DRAWN = 256
_FURTHEST = 2.0

Kind = Literal["workers", "depth", "place", "cheaper", "cached", "narrow"]
EFFORT: dict[Kind, float] = {"workers": 1.0, "depth": 1.0, "place": 2.0, "narrow": 2.0, "cached": 3.0, "cheaper": 4.0}
"""How much work each asks of a person: an argument, where workers are, a line, a cache, a rewrite."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What ``change`` would make of the run: batches per second, and the stall with its interval, each 0 to 1.

    settings: workers and depth under it. condition: what it takes for granted, "" if nothing.
    """

    change: str
    kind: Kind
    settings: Settings
    rate: float
    stall: float
    low: float
    high: float
    condition: str = ""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Predictions, what is recommended among them (None: nothing is worth it), and how far off the model is at present:
    ``modelled`` is its stall for the present setting, ``stall`` and ``rate`` are those measured. deeper: how many times
    the rate four times the depth would give, None without workers."""

    stall: float
    modelled: float
    rate: float
    predictions: tuple[Prediction, ...]
    recommended: Prediction | None
    deeper: float | None


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A decision of the tuner's: stall and rate that it was to bring, and those that it brought."""

    change: str
    predicted_stall: float
    stall: float
    predicted_rate: float
    rate: float

    @property
    def error(self) -> float:
        """Of the predicted stall, 0 to 1."""
        return abs(self.predicted_stall - self.stall)


def scores(decisions: Sequence[Decision]) -> tuple[Scored, ...]:
    """Past predictions against what happened, of those that were judged."""
    return tuple(
        Scored(
            change=f"{decision.old} → {decision.new}",
            predicted_stall=decision.predicted_stall,
            stall=outcome.stall,
            predicted_rate=decision.predicted_rate,
            rate=outcome.rate,
        )
        for decision in decisions
        if (outcome := decision.outcome) is not None and decision.reason != "undo"
    )


# -- the model's view of what was measured ---------------------------------------------------------------------------


def present(facts: Facts) -> Settings:
    """The setting that was measured."""
    return Settings(local=facts.local, remote=facts.remote, depth=max(1, facts.depth))


def estimate(facts: Facts, found: Losses) -> Estimate:
    """The work as the tuner's model sees it: one window, which is the whole run."""
    windows = Windows()
    windows.add(_sample(facts))
    rate = facts.batches / max(1e-9, facts.wall_s)
    pinning = facts.causes.get("h2d", 0.0)
    bound = pinning > 0.3 * max(1e-9, found.total_s)
    return windows.estimate(facts.cpus, rate if bound else math.inf, math.inf)


def _sample(facts: Facts) -> Sample:
    causes = facts.causes
    inline = facts.lanes.get("inline", LaneFacts())
    making_s = inline.busy_s if not facts.workers else 0.0
    own_s = causes.get("unknown", 0.0) + facts.transfer_s + making_s
    wait_s = max(0.0, facts.wait_s - causes.get("startup", 0.0) - causes.get("unknown", 0.0) - making_s)
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
        made_here=_lane(inline),
        local=_lane(facts.lanes.get("local", LaneFacts())),
        remote=_lane(facts.lanes.get("remote", LaneFacts())),
        host=HostSample(
            cpus=facts.cpus,
            others=facts.others or 0.0,
            trainer_cpu_s=facts.trainer_cpu_s,
            trainer_queued_s=None if facts.trainer_queued_s is None else facts.trainer_queued_s * running,
        ),
    )


def _lane(lane: LaneFacts) -> LaneSample:
    """The way from a remote worker keeps it from other batches, so it counts as its time."""
    return LaneSample(
        requested=lane.workers,
        running=lane.workers,
        tickets=lane.tickets,
        read_s=lane.load_s + lane.transit_s,
        collate_s=lane.collate_s,
        encode_s=lane.encode_s,
        cpu_s=lane.cpu_s,
        queued_s=lane.queued_s,
        services_s=lane.services_s,
    )


def expected(work: Estimate, settings: Settings) -> tuple[float, float]:
    """By the model: rate, and a step as it would be measured, which is longer where the consumer shares its CPU."""
    plan = expect(work, settings)
    own_cpu = work.step_cpu_s + work.own_s
    crowding_s = max(0.0, 1.0 / plan.flow.demand - work.step_s - work.own_s) if settings.workers else 0.0
    return plan.rate, work.step_s + (crowding_s * work.step_cpu_s / own_cpu if own_cpu > 0 else 0.0)


def _stall(rate: float, step_s: float) -> float:
    return min(1.0, max(0.0, 1.0 - rate * step_s))


class _Scale:
    """How far the model is off for the present setting: factors for its rates and its steps."""

    def __init__(self, facts: Facts, work: Estimate) -> None:
        batches = max(1, facts.batches - facts.passes)
        rate, step_s = expected(work, present(facts))
        running_s = max(1e-9, facts.wall_s - facts.causes.get("startup", 0.0))
        self.modelled = _stall(rate, step_s)
        self.off = abs(self.modelled - facts.stall_ratio)
        self._rate = min(_FURTHEST, max(1.0 / _FURTHEST, batches / running_s / max(1e-9, rate)))
        self._step = facts.work_s / batches / max(1e-9, step_s)

    def __call__(self, work: Estimate, settings: Settings) -> tuple[float, float]:
        """Rate and stall under a setting."""
        rate, step_s = expected(work, settings)
        step_s *= self._step
        rate = min(rate * self._rate, 1.0 / max(1e-9, step_s))
        return rate, _stall(rate, step_s)


# -- predictions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Change:
    text: str
    kind: Kind
    settings: Settings
    facts: Facts
    condition: str = ""


def what_if(facts: Facts, found: Losses) -> WhatIf | None:
    """All predictions; None: too little was seen of batches or steps to replay."""
    if facts.tickets < 8 or facts.batches <= facts.passes or facts.work_s <= 0:
        return None
    now, work = present(facts), estimate(facts, found)
    scale = _Scale(facts, work)
    rate, stall = scale(work, now)
    predictions = tuple(_predicted(change, found, scale) for change in _changes(facts, work, found))
    deeper = scale(work, replace(now, depth=4 * now.depth))[0] / max(1e-9, rate) if now.workers else None
    recommended = _recommended(predictions, now, stall)
    return WhatIf(
        stall=stall,
        modelled=scale.modelled,
        rate=rate,
        predictions=predictions,
        recommended=recommended,
        deeper=deeper,
    )


def _predicted(change: _Change, found: Losses, scale: _Scale) -> Prediction:
    work = estimate(change.facts, found)
    rate, stall = scale(work, change.settings)
    draw = random.Random(0)
    drawn = [stall, *(scale(_redrawn(work, change.facts, draw), change.settings)[1] for _ in range(ROUNDS))]
    off = scale.off / 2
    return Prediction(
        change=change.text,
        kind=change.kind,
        settings=change.settings,
        rate=rate,
        stall=stall,
        low=max(0.0, min(drawn) - off),
        high=min(1.0, max(drawn) + off),
        condition=change.condition,
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


def _changes(facts: Facts, work: Estimate, found: Losses) -> Iterator[_Change]:
    now = present(facts)
    if now.workers:
        yield from _counts(facts, now)
        yield from _depths(facts, now)
        if facts.has_cluster:
            yield from _places(facts, now)
    elif facts.tickets:
        for workers in (1, 2, 4):
            settings = Settings(local=workers, depth=2 * workers)
            yield _Change(text=f"num_workers={workers} instead of 0", kind="workers", settings=settings, facts=facts)
    yield from _best(facts, work, now)
    yield from _cheaper(facts, now, found)


def _counts(facts: Facts, now: Settings) -> Iterator[_Change]:
    counts = {max(1, now.workers // 2), 2 * now.workers} - {now.workers}
    if facts.busy_s / facts.tickets < TINY_S:
        counts.add(0)
    for workers in sorted(counts):
        yield _Change(
            text=f"num_workers={workers} instead of {now.workers}",
            kind="workers",
            settings=with_workers(now, workers, is_capped=facts.is_capped),
            facts=facts,
            condition=_SERVES if workers > now.workers and _waits(facts) else "",
        )


_SERVES = "the storage serves more readers as fast"


def _waits(facts: Facts) -> bool:
    lanes = facts.lanes.values()
    return sum(lane.load_s - lane.load_cpu_s - (lane.queued_s or 0.0) for lane in lanes) > 0.3 * facts.busy_s


def with_workers(now: Settings, workers: int, *, is_capped: bool = False) -> Settings:
    """That many where they are now, in proportion, and as many batches in flight for each."""
    remote = round(workers * now.remote / now.workers) if now.workers else 0
    depth = now.depth if is_capped else max(2, math.ceil(now.depth * workers / max(1, now.workers)))
    return Settings(local=workers - remote, remote=remote, depth=depth)


def _depths(facts: Facts, now: Settings) -> Iterator[_Change]:
    for depth in sorted({max(1, now.depth // 2), 2 * now.depth} - {now.depth}):
        yield _Change(
            text=f"{depth} batches in flight instead of {now.depth}",
            kind="depth",
            settings=replace(now, depth=depth),
            facts=facts,
            condition="memory_budget allows it" if facts.is_capped and depth > now.depth else "",
        )


def _places(facts: Facts, now: Settings) -> Iterator[_Change]:
    if now.local:
        settings = Settings(remote=now.workers, depth=max(now.depth, 4 * now.workers))
        known = "" if facts.remote else "the other machines are as fast, and batches are not large"
        text = f"all {now.workers} workers on the cluster"
        yield _Change(text=text, kind="place", settings=settings, facts=facts, condition=known)
    if now.remote:
        settings = Settings(local=now.workers, depth=now.depth)
        known = "" if facts.local else "this machine is as fast as the others"
        text = f"all {now.workers} workers on this machine"
        yield _Change(text=text, kind="place", settings=settings, facts=facts, condition=known)


def _best(facts: Facts, work: Estimate, now: Settings) -> Iterator[_Change]:
    """The cheapest setting that is as fast as any, by the tuner's own choice."""
    most = min(MOST_WORKERS, max(8, 4 * now.workers, 2 * math.ceil(facts.cpus)))
    depth = now.depth if facts.is_capped else DEEPEST_PER_WORKER * most
    bounds = Bounds(
        local=most if now.local or not now.workers else 0,
        remote=most if now.remote else 0,
        depth=depth,
        least_local=0 if now.remote or not now.workers else 1,
    )
    chosen = best(work, bounds, AutotuneConfig()).settings
    if chosen != now:
        more = chosen.workers > now.workers and _waits(facts)
        text = f"{chosen} instead of {now}"
        yield _Change(text=text, kind="workers", settings=chosen, facts=facts, condition=_SERVES if more else "")


def _cheaper(facts: Facts, now: Settings, found: Losses) -> Iterator[_Change]:
    lost = max(1e-9, found.total_s)
    costs = {"the dataset": "load", "the collate function": "collate", "writing batches into memory": "encode"}
    seconds = {name: sum(getattr(lane, f"{stage}_s") for lane in facts.lanes.values()) for name, stage in costs.items()}
    dearest = max(seconds, key=lambda name: seconds[name])
    yield _Change(
        text=f"{dearest} at half the cost",
        kind="cheaper",
        settings=now,
        facts=_scaled(facts, **{costs[dearest]: 0.5}),
    )
    yield from _cheaper_step(facts, now)
    if found.by_cause["storage"] > MATTERS * lost:
        yield _Change(text="samples cached: no waiting for data", kind="cached", settings=now, facts=_cached(facts))
    if found.by_cause["transfer"] > MATTERS * lost:
        yield _Change(
            text="uint8 instead of float32 until the device",
            kind="narrow",
            settings=now,
            facts=_narrow(facts),
            condition="batches are float32 that come from whole numbers",
        )


def _cheaper_step(facts: Facts, now: Settings) -> Iterator[_Change]:
    """The dearest transform, if it is known and matters."""
    steps = [one for one in facts.transforms or () if one.is_within]
    dearest = max(steps, key=lambda one: one.all_wall_s, default=None)
    if dearest is None or dearest.all_wall_s < MATTERS * facts.busy_s:
        return
    stage = "collate" if dearest.is_collating else "load"
    wall_s, cpu_s = (sum(getattr(lane, f"{stage}{of}_s") for lane in facts.lanes.values()) for of in ("", "_cpu"))
    factors = {
        stage: 1.0 - 0.5 * dearest.all_wall_s / max(1e-12, wall_s),
        f"{stage}_cpu": 1.0 - 0.5 * dearest.all_cpu_s / max(1e-12, cpu_s),
    }
    text = f"the transform {dearest.short} at half the cost"
    yield _Change(text=text, kind="cheaper", settings=now, facts=_scaled(facts, **factors))


def _each_lane(facts: Facts, change: Callable[[LaneFacts], LaneFacts]) -> Facts:
    return replace(facts, lanes={name: change(lane) for name, lane in facts.lanes.items()})


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

    def scaled(lane: LaneFacts) -> LaneFacts:
        changed = replace(
            lane,
            load_s=lane.load_s * load,
            load_cpu_s=lane.load_cpu_s * load_cpu,
            collate_s=lane.collate_s * collate,
            collate_cpu_s=lane.collate_cpu_s * collate_cpu,
            encode_s=lane.encode_s * encode,
            encode_cpu_s=lane.encode_cpu_s * encode,
        )
        return _same_spread(lane, changed)

    return _each_lane(facts, scaled)


def _same_spread(lane: LaneFacts, changed: LaneFacts) -> LaneFacts:
    factor = changed.busy_s / lane.busy_s if lane.busy_s > 0 else 1.0
    queue_factor = changed.cpu_s / lane.cpu_s if lane.cpu_s > 0 else 1.0
    queued = None if lane.queued_s is None else lane.queued_s * queue_factor
    return replace(changed, queued_s=queued, services_s=tuple(seconds * factor for seconds in lane.services_s))


def _cached(facts: Facts) -> Facts:
    """Without waiting for anything but a CPU; nothing is left of how waits were spread."""

    def cached(lane: LaneFacts) -> LaneFacts:
        queued_s = (lane.queued_s or 0.0) * lane.load_cpu_s / max(1e-9, lane.cpu_s)
        changed = replace(lane, load_s=min(lane.load_s, lane.load_cpu_s + queued_s))
        return replace(_same_spread(lane, changed), queued_s=lane.queued_s)

    return _each_lane(facts, cached)


def _narrow(facts: Facts) -> Facts:
    """A quarter of the bytes: on the way, and as they are written; taking them in costs the same."""
    scaled = _scaled(facts, encode=0.25)
    return replace(
        _each_lane(scaled, lambda lane: replace(lane, transit_s=lane.transit_s / 4)), batch_bytes=facts.batch_bytes / 4
    )


def _recommended(predictions: Sequence[Prediction], now: Settings, stall: float) -> Prediction | None:
    """The largest gain for the effort; where nothing is lost, a setting that frees workers without a loss."""

    def gain(prediction: Prediction) -> float:
        return stall - prediction.stall

    worth = [one for one in predictions if gain(one) >= WORTH and one.condition != "memory_budget allows it"]
    if worth:
        return max(worth, key=lambda one: gain(one) / EFFORT[one.kind])
    fewer = [one for one in predictions if one.kind == "workers" and one.settings.workers < now.workers]
    free = [one for one in fewer if one.high <= stall + WORTH / 3]
    return min(free, key=lambda one: one.settings.workers) if free and stall < MATTERS else None

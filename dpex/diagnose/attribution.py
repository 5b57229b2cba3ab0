"""Puts every second that the training loop lost down to one cause, from sums over a run. Pure.

What `dpex.measure.wait_causes` says of single waits is taken further where sums know better:

* A wait behind a slow batch (`STRAGGLER`) is the order's fault only as far as other workers had nothing to do
  meanwhile. While all are at work they make batches as fast as they can, and the wait is that of their stages: with
  equal batches the next in turn is often not the first to be ready.
* Wall time that is no CPU time is waiting (`READ`) only if it was not spent on a run queue: there the machine is full.
* While workers have nothing to do and nothing is ready, too few batches may be in flight.
* Batches that take less than `TINY_S` to make cost more to hand out and take in than to make. In what share of the time
  workers were at work at all is then what the stages can account for; the rest, and what is unknown, is dispatch. Of
  larger batches dispatch is what was measured as such.
* Of drawing, of dispatch and of what is unknown, time of the training thread on a run queue has another cause: it
  lacked a CPU (`crowding`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dpex.diagnose.facts import Facts, PoolFacts
from dpex.measure.wait_causes import STAGE_CAUSES, by_stage
from dpex.schedule.names import INLINE, LOCAL, REMOTE

CAUSES = (
    *("startup", "storage", "cpu", "transfer", "straggler", "memory", "sampler", "dispatch", "crowding", "unknown"),
)
_OWN = ("sampler", "dispatch", "unknown")
"""What the training thread does in ``next()`` beside making batches and taking them in."""
TINY_S = 0.0005
"""Handing out and taking in a batch costs some 50 to 100 µs (README.md has figures): a fifth of that and more."""


@dataclass(frozen=True, kw_only=True)
class LostTime:
    """Seconds lost by cause, and for each cause by place; queued_s: what of "cpu" was waiting for a CPU.

    is_undecided: workers may have waited for a CPU where that is not told, on a full machine or another one. Then
    "storage" may be "cpu".
    """

    by_cause: Mapping[str, float]
    places: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    queued_s: float = 0.0
    is_undecided: bool = False

    @property
    def total_s(self) -> float:
        """All causes."""
        return sum(self.by_cause.values())

    @property
    def ranked(self) -> list[tuple[str, float]]:
        """Largest first."""
        return sorted(self.by_cause.items(), key=lambda pair: -pair[1])

    def place(self, cause: str) -> str:
        """Where most of it is, and where else if that is not nearly all; "" if unsaid."""
        places = sorted(self.places.get(cause, {}).items(), key=lambda pair: -pair[1])
        total = sum(seconds for _, seconds in places)
        return " and ".join(name for name, seconds in places if seconds >= 0.3 * total) if total > 0 else ""


_UNCLEAR = 0.15
"""Of a remote worker's time: with less than this on a CPU, or off it, it matters little who waited for one."""


def is_tiny(facts: Facts) -> bool:
    """Whether workers are given batches that take hardly any time to make."""
    return facts.workers > 0 and facts.tickets > 0 and facts.busy_s / facts.tickets < TINY_S


def losses(facts: Facts) -> LostTime:
    """See the module."""
    causes = dict(facts.causes)
    straggler_s = _order(facts, causes)
    memory_s = _narrow(facts, causes)
    tiny = is_tiny(facts)
    unexplained_s = _unexplained(facts, causes) if tiny else 0.0
    crowding_s = 0.0 if tiny else _crowding(facts, causes)
    load_queued, collate_queued, undecided = _queueing(facts)
    load_wait_s, transform_s, collate_s = (causes.get(name, 0.0) for name in ("read", "transform", "collate"))
    computing, waiting = _collating(facts)
    cpu = {
        "the dataset": transform_s + load_wait_s * load_queued,
        "the collate function": collate_s * (computing + waiting * collate_queued),
    }
    storage = {
        "the dataset": load_wait_s * (1.0 - load_queued),
        "the collate function": collate_s * waiting * (1.0 - collate_queued),
    }
    sampler_s, dispatch_s, unknown_s = (causes.get(name, 0.0) for name in _OWN)
    transfer = _transfer(facts, causes, taking_in_s=0.0 if tiny else facts.transfer_s)
    found = {
        "startup": causes.get("startup", 0.0),
        "storage": sum(storage.values()),
        "cpu": sum(cpu.values()),
        "transfer": sum(transfer.values()),
        "straggler": straggler_s,
        "memory": memory_s,
        "sampler": sampler_s,
        "dispatch": dispatch_s + (unexplained_s + unknown_s + facts.transfer_s if tiny else 0.0),
        "crowding": crowding_s,
        "unknown": 0.0 if tiny else unknown_s,
    }
    queued_s = load_wait_s * load_queued + collate_s * waiting * collate_queued
    places = {"cpu": cpu, "storage": storage, "transfer": transfer}
    return LostTime(by_cause=found, places=places, queued_s=queued_s, is_undecided=undecided)


def _crowding(facts: Facts, causes: dict[str, float]) -> float:
    """Taken from `_OWN`: their share of the time that the training thread was on a run queue in ``next()``.

    Taking in and making batches there queue as well. That is their time, as it would go if they took none.
    """
    busy_s = sum(causes.get(name, 0.0) for name in _OWN)
    own_s = busy_s + facts.transfer_s + facts.pools.get(INLINE, PoolFacts()).busy_s
    part = min(1.0, facts.loop_queued_s / own_s) if own_s > 0 else 0.0
    for name in _OWN:
        causes[name] = causes.get(name, 0.0) * (1.0 - part)
    return busy_s * part


def _order(facts: Facts, causes: dict[str, float]) -> float:
    """What the order cost; the rest of the waits behind slow batches goes to the stages."""
    waited_s = causes.pop("straggler", 0.0)
    order_s = min(waited_s, facts.head_idle_s * _behind_one(facts))
    _spread(facts, causes, waited_s - order_s)
    return order_s


def _behind_one(facts: Facts) -> float:
    """Of N workers at most N - 1 can have nothing to do while one is at it: all of such a wait is put down to that."""
    return facts.workers / (facts.workers - 1) if facts.workers > 1 else 0.0


def _spread(facts: Facts, causes: dict[str, float], seconds: float) -> None:
    """Add to the stages in proportion to what they took, over all batches."""
    made = [by_stage(pool) for pool in facts.pools.values()]
    total = sum(map(sum, made))
    if total <= 0:
        causes["unknown"] = causes.get("unknown", 0.0) + seconds
        return
    for pool in made:
        for name, share in zip(STAGE_CAUSES, pool, strict=True):
            causes[name] = causes.get(name, 0.0) + seconds * share / total


def _narrow(facts: Facts, causes: dict[str, float]) -> float:
    """Taken from the stages: workers had nothing to do as fewer batches may be in flight than there are workers."""
    if facts.prefetch >= facts.workers and not facts.is_capped:
        return 0.0
    return _take(causes, facts.other_idle_s * _behind_one(facts))


def _take(causes: dict[str, float], seconds: float) -> float:
    """Take that much from the stages, as far as there is so much."""
    total = sum(causes.get(name, 0.0) for name in STAGE_CAUSES)
    taken = min(total, seconds)
    for name in STAGE_CAUSES:
        causes[name] = causes.get(name, 0.0) * (1.0 - taken / total) if total > 0 else 0.0
    return taken


def _unexplained(facts: Facts, causes: dict[str, float]) -> float:
    """Taken from the stages: what workers cannot have been at work, as they were so seldom."""
    running_s = facts.workers * max(1e-9, facts.wall_s - facts.causes.get("startup", 0.0))
    at_work = min(1.0, (facts.busy_s + sum(pool.transit_s for pool in facts.pools.values())) / running_s)
    stages = sum(causes.get(name, 0.0) for name in STAGE_CAUSES)
    return _take(causes, stages * (1.0 - at_work))


def _queueing(facts: Facts) -> tuple[float, float, bool]:
    """Of what was neither CPU time in loading nor in collating: which part was spent on run queues; and whether that
    cannot be told although it matters."""
    load_s, collate_s, load_wait_s, collate_wait_s = 0.0, 0.0, 0.0, 0.0
    unknown_cpu_s, far_unclear = 0.0, False
    for name, pool in facts.pools.items():
        load_wait_s += max(0.0, pool.load_s - pool.load_cpu_s)
        collate_wait_s += max(0.0, pool.collate_s - pool.collate_cpu_s)
        queued_s = _queued(facts, name, pool)
        if queued_s is None:
            unknown_cpu_s += pool.cpu_s if name == LOCAL else 0.0
            far_unclear |= name == REMOTE and _is_unclear(pool)
            continue
        load_s += queued_s * pool.load_cpu_s / max(1e-9, pool.cpu_s)
        collate_s += queued_s * pool.collate_cpu_s / max(1e-9, pool.cpu_s)
    used = (unknown_cpu_s + facts.trainer_cpu_s) / max(1e-9, facts.wall_s) + (facts.others or 0.0)
    undecided = far_unclear or (unknown_cpu_s > 0 and used >= 0.8 * facts.cpus)
    return _part(load_s, load_wait_s), _part(collate_s, collate_wait_s), undecided


def _is_unclear(pool: PoolFacts) -> bool:
    """Whether both computing and waiting matter, so that waiting for a CPU would."""
    waiting_s = max(0.0, pool.load_s + pool.collate_s - pool.load_cpu_s - pool.collate_cpu_s)
    return min(waiting_s, pool.cpu_s) > _UNCLEAR * pool.busy_s


def _queued(facts: Facts, name: str, pool: PoolFacts) -> float | None:
    """A pool's seconds on run queues; of the training thread's, what falls on batches made there."""
    if pool.queued_s is not None or name != INLINE or facts.trainer_queued_s is None:
        return pool.queued_s
    own_s = pool.busy_s + facts.work_s
    return facts.trainer_queued_s * pool.busy_s / own_s if own_s > 0 else 0.0


def _part(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0


def _collating(facts: Facts) -> tuple[float, float]:
    """Shares of collating that are CPU time, and not."""
    wall = sum(pool.collate_s for pool in facts.pools.values())
    cpu = min(wall, sum(pool.collate_cpu_s for pool in facts.pools.values()))
    return (cpu / wall, 1.0 - cpu / wall) if wall > 0 else (1.0, 0.0)


def _transfer(facts: Facts, causes: Mapping[str, float], taking_in_s: float) -> dict[str, float]:
    streamed, stored = (facts.moved_bytes.get(path, 0.0) for path in ("network", "object_store"))
    way = "the object store" if stored > streamed else "the network"
    return {
        "serialisation": causes.get("encode", 0.0),
        way: causes.get("transit", 0.0),
        "host-to-device": causes.get("h2d", 0.0),
        "taking batches in": taking_in_s,
    }

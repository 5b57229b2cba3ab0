"""Gives every second of the training loop's wait one cause, from sums over a run. Pure.

`dpex.measure.consumer_time` gives each second a name when it is measured: the stage of a batch, the order, the start,
or what ``next()`` did. Here each rule of `RULES` takes the seconds of its cause from what the rules before it have
left. The last one takes the rest. So the seconds add up to the wait.

Sums know better than single waits:

1. A wait behind a slow batch (`STRAGGLER`) comes from the order only as far as other workers were idle meanwhile. While
   all are busy they make batches as fast as they can, and the wait is that of their stages.

2. Wall time that is no CPU time is waiting (`STORAGE`) only if it was not spent on a run queue.

3. While workers are idle and nothing is ready, too few batches may be in flight.

4. Batches that take less than `TINY_S` to make cost more to dispatch and receive than to make. The stages then account
   for the share of the time in which workers were busy. The rest is dispatch.

5. Time of the training thread on a run queue, while it draws or dispatches, is a lack of CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dpex.diagnose import causes
from dpex.diagnose.causes import Cause
from dpex.diagnose.facts import Facts, queueing_s
from dpex.measure.consumer_time import STAGE_CAUSES, by_stage
from dpex.measure.sums import PoolStats
from dpex.schedule.names import INLINE

Seconds = Mapping[str, float]
"""Seconds by what was measured: the names of `dpex.measure.consumer_time.CAUSES`, and `_TAKING_IN`."""
Rule = Callable[[Facts, Seconds], Seconds]
"""The seconds that a cause takes from those that are left."""

_TAKING_IN = "taking batches in"
STREAM = "the stream"
"""The place of reading where other workers decode: their times say nothing of it."""
_OWN = ("sampler", "dispatch", "unknown")
"""The work of the training thread in ``next()`` beside making batches and taking them in."""
_PLACES = {
    **dict.fromkeys(("read", "transform"), "the dataset"),
    "collate": "the collate function",
    "encode": "serialisation",
    "transit": "the network",
    "h2d": "host-to-device",
    "stream": STREAM,
    _TAKING_IN: _TAKING_IN,
}
"""The part of the work by what was measured."""
TINY_S = 0.0005
"""Dispatching and receiving a batch costs some 50 to 100 µs (README.md has figures): a fifth of that and more."""
_AT_HAND = 4.0
"""Times the prefetch that a larger ``memory_budget`` may reasonably allow."""


@dataclass(frozen=True, kw_only=True)
class LostTime:
    """Seconds of the wait by the key of their cause.

    Attributes:
        places: For each cause, its seconds by place.
        queued_s: The part of "cpu" in which workers waited for a CPU.
    """

    by_cause: Mapping[str, float]
    places: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    queued_s: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(self.by_cause.values())

    @property
    def ranked(self) -> list[tuple[str, float]]:
        """Keys and seconds, the largest first."""
        return sorted(self.by_cause.items(), key=lambda pair: -pair[1])

    def place(self, cause: str) -> str:
        """Return where most of it is, and where else if that is not nearly all; "" if unknown."""
        places = sorted(self.places.get(cause, {}).items(), key=lambda pair: -pair[1])
        total = sum(seconds for _, seconds in places)
        return " and ".join(name for name, seconds in places if seconds >= 0.3 * total) if total > 0 else ""


def is_tiny(facts: Facts) -> bool:
    """Return True if workers get batches that take hardly any time to make."""
    return facts.workers > 0 and facts.tickets > 0 and facts.busy_s / facts.tickets < TINY_S


def losses(facts: Facts) -> LostTime:
    """Attribute the wait; see the module."""
    left, queued_s = _measured(facts), 0.0
    taken: dict[str, dict[str, float]] = {cause.key: {} for cause, _ in RULES}
    for cause, rule in RULES:
        seconds = {name: min(left[name], most) for name, most in rule(facts, left).items()}
        left = {name: known - seconds.get(name, 0.0) for name, known in left.items()}
        for name, each in seconds.items():
            taken[cause.key][name] = taken[cause.key].get(name, 0.0) + each
        queued_s = sum(seconds.values()) if rule is _queueing else queued_s
    return LostTime(
        by_cause={key: sum(seconds.values()) for key, seconds in taken.items()},
        places={key: _by_place(taken[key]) for key in ("cpu", "storage", "transfer")},
        queued_s=queued_s,
    )


def _measured(facts: Facts) -> Seconds:
    """The wait as it was measured, with waits behind a slow batch put down to the stages while workers were busy."""
    found = {**dict.fromkeys((*STAGE_CAUSES, "h2d", "straggler", "startup", "stream", *_OWN), 0.0), **facts.causes}
    order_s = min(found["straggler"], facts.head_idle_s * _behind_one(facts))
    rest_s, found["straggler"] = found["straggler"] - order_s, order_s
    made = [sum(stage) for stage in zip(*(by_stage(pool) for pool in facts.pools.values()), strict=True)]
    for name, seconds in zip(STAGE_CAUSES, made, strict=False):
        found[name] += rest_s * seconds / sum(made) if sum(made) > 0 else 0.0
    if not sum(made) > 0:
        found["unknown"] += rest_s
    return {**found, _TAKING_IN: facts.transfer_s}


def _by_place(seconds: Seconds) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for name, each in seconds.items():
        found[_PLACES[name]] = found.get(_PLACES[name], 0.0) + each
    return found


# -- rules -------------------------------------------------------------------------------------------------------------


def _all_of(*names: str) -> Rule:
    return lambda _, left: {name: left[name] for name in names}


def _part_of(left: Seconds, names: tuple[str, ...], seconds: float) -> Seconds:
    """Return ``seconds`` of these names together, in proportion."""
    total = sum(left[name] for name in names)
    part = min(1.0, seconds / total) if total > 0 else 0.0
    return {name: part * left[name] for name in names}


def _behind_one(facts: Facts) -> float:
    """Return N / (N - 1) for N batches at the same time, since the place of the late batch is not idle behind it."""
    return facts.at_once / (facts.at_once - 1) if facts.at_once > 1 else 0.0


def _narrow(facts: Facts, left: Seconds) -> Seconds:
    """Workers were idle as fewer batches may be in flight than they can make at the same time.

    What the order costs is in it where ``memory_budget`` keeps the prefetch below what slow batches would take.
    """
    if facts.prefetch >= facts.at_once and not facts.is_capped:
        return {}
    slowest_s = max(facts.services_s, default=0.0)
    needed = slowest_s * facts.batches / max(1e-9, facts.wall_s) + facts.at_once
    order_s = left["straggler"] if facts.is_capped and needed <= _AT_HAND * facts.prefetch else 0.0
    return {**_part_of(left, STAGE_CAUSES, facts.other_idle_s * _behind_one(facts)), "straggler": order_s}


def _crowded(facts: Facts, left: Seconds) -> Seconds:
    """The training thread was on a run queue in ``next()``.

    Taking in and making batches there queue as well. That is their time, as it would go if they took none.
    """
    busy_s = sum(left[name] for name in _OWN)
    total_s = busy_s + facts.transfer_s + facts.pools.get(INLINE, PoolStats()).busy_s
    if is_tiny(facts) or total_s <= 0:
        return {}
    return _part_of(left, _OWN, busy_s * min(1.0, facts.loop_queued_s / total_s))


def _dispatch(facts: Facts, left: Seconds) -> Seconds:
    """Dispatching; of tiny batches also the stages while workers were not busy, and what has no other cause."""
    if not is_tiny(facts):
        return {"dispatch": left["dispatch"]}
    running_s = facts.workers * max(1e-9, facts.wall_s - facts.causes.get("startup", 0.0))
    busy = min(1.0, (facts.busy_s + sum(pool.transit_s for pool in facts.pools.values())) / running_s)
    idle = {name: (1.0 - busy) * left[name] for name in STAGE_CAUSES}
    return idle | {name: left[name] for name in ("dispatch", "unknown", _TAKING_IN)}


def _computing(facts: Facts, left: Seconds) -> Seconds:
    """CPU time of the dataset, of the collate function, and of readers whose samples other workers decode."""
    wall_s, cpu_s = (
        sum(getattr(pool, name) for pool in facts.pools.values()) for name in ("collate_s", "collate_cpu_s")
    )
    return {
        "transform": left["transform"],
        "collate": left["collate"] * (_part(cpu_s, wall_s) if wall_s > 0 else 1.0),
        "stream": left["stream"] * _part(facts.read_cpu_s, facts.read_s),
    }


def _queueing(facts: Facts, left: Seconds) -> Seconds:
    """Waits of the workers for a CPU, among all that is no CPU time."""
    load, collate = queueing_parts(facts)
    return {"read": left["read"] * load, "collate": left["collate"] * collate}


RULES: tuple[tuple[Cause, Rule], ...] = (
    (causes.STARTUP, _all_of("startup")),
    (causes.MEMORY, _narrow),
    (causes.STRAGGLER, _all_of("straggler")),
    (causes.CROWDING, _crowded),
    (causes.DISPATCH, _dispatch),
    (causes.SAMPLER, _all_of("sampler")),
    (causes.TRANSFER, _all_of("encode", "transit", "h2d", _TAKING_IN)),
    (causes.CPU, _computing),
    (causes.CPU, _queueing),
    (causes.STORAGE, _all_of("read", "collate", "stream")),
    (causes.UNKNOWN, lambda _, left: left),
)
"""Each cause with its rule, in the order in which they take their seconds."""


# -- waiting for a CPU -------------------------------------------------------------------------------------------------


def queueing_parts(facts: Facts) -> tuple[float, float]:
    """Parts, 0 to 1, of what is no CPU time in loading and in collating that workers spent on run queues."""
    load_s, collate_s, load_wait_s, collate_wait_s = 0.0, 0.0, 0.0, 0.0
    for name, pool in facts.pools.items():
        load_wait_s += max(0.0, pool.load_s - pool.load_cpu_s)
        collate_wait_s += max(0.0, pool.collate_s - pool.collate_cpu_s)
        queued_s = _queued(facts, name, pool) / max(1e-9, pool.cpu_s)
        load_s += queued_s * pool.load_cpu_s
        collate_s += queued_s * pool.collate_cpu_s
    return _part(load_s, load_wait_s), _part(collate_s, collate_wait_s)


def _queued(facts: Facts, name: str, pool: PoolStats) -> float:
    """A pool's seconds on run queues, 0 if unknown; of the training thread's, what falls on batches made there."""
    queued_s = queueing_s(pool)
    if queued_s is not None or name != INLINE or facts.trainer_queued_s is None:
        return queued_s or 0.0
    total_s = pool.busy_s + facts.work_s
    return facts.trainer_queued_s * pool.busy_s / total_s if total_s > 0 else 0.0


def _part(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0

"""The causes of a wait and all other verdicts, each declared once with its measurement, text and remedy. PURE.

`dpex.measure.consumer_time` gives each second of the wait a name of `TIMED` when it is measured: the stage of a batch,
delivery in order, the start, or the work of ``next()``. Then each cause in `WAITS`, one after the other, takes its part
of the seconds that are left. The last cause takes the rest, so the seconds add up to the wait.

Sums over many waits correct the names of single waits:

1. Delivery in order causes a wait behind a slow batch only as far as other workers were idle meanwhile. While all
   workers are busy, they make batches as fast as they can, and the wait belongs to their stages.

2. Wall time that is no CPU time is waiting for data only if it was not spent on a run queue.

3. While workers are idle and nothing is ready, too few batches may be in flight.

4. Dispatching and receiving is a large part of the cost of batches that workers make in less than `TINY_S`. Of waits
   for such batches, stages get only the share of the time in which workers were busy. The rest is dispatch.

5. Time of the training thread on a run queue, while it draws or dispatches, is a lack of CPUs.

To add a cause, add a name and a `Cause` here, and call `Tally.busy` or `Tally.block` where it is timed. Counts,
metrics, verdicts, predictions, reports, the live page and ``docs/how-to/gpu-starves.md`` are made from this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dpex.measure.batch_times import BatchTimes
from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import Reading
from dpex.measure.settings import INLINE

# -- names of seconds --------------------------------------------------------------------------------------------------

TIMED = (
    *("read", "transform", "collate", "encode", "transit", "h2d", "straggler", "startup"),
    *("sampler", "dispatch", "unknown", "stream"),
)
"""All names of seconds of the wait, in this order: the keys of `Reading.causes`, and the metric's label values."""
READ, TRANSFORM, COLLATE, ENCODE, TRANSIT, H2D, STRAGGLER, STARTUP, SAMPLER, DISPATCH, UNKNOWN, STREAM = range(
    len(TIMED)
)
"""Indices in `TIMED`. Waits are counted by index, because counting by name takes 0.1 µs more per batch."""
STAGE_CAUSES = TIMED[: TRANSIT + 1]
"""Names of waits for a stage of the awaited batch."""
TAKING_IN = "taking batches in"
"""The name of the seconds in `Reading.transfer_s`."""
PLACES = {
    **dict.fromkeys(("read", "transform"), "the dataset"),
    "collate": "the collate function",
    "encode": "serialisation",
    "transit": "the network",
    "h2d": "host-to-device",
    "stream": "the stream",
    TAKING_IN: TAKING_IN,
}
"""The place of the work, by the name of its seconds. Workers that decode do not count "stream" in their times."""
Seconds = Mapping[str, float]
"""Seconds by name, with the names of `TIMED` and `TAKING_IN`."""
Rule = Callable[[Reading, Seconds], Seconds]
"""Returns the seconds that a cause takes from the remaining seconds."""
TINY_S = 0.0005
"""A batch is tiny if a worker makes it in fewer seconds. Dispatching and receiving a batch costs some 50 to 100 µs
(README.md has figures), a tenth to a fifth of this time."""
_AT_HAND = 4.0
"""Maximum growth of the prefetch, as a factor, that a larger ``memory_budget`` may reasonably allow."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause of a wait, or another verdict.

    Attributes:
        key: The value of `Verdict.cause`.
        title: The verdict in words.
        part: The name of its seconds.
        explanation: Completes the sentence "The training loop waits, because ...".
        evidence: The measurement.
        advice: The remedy.
        colour: The CSS colour.
        takes: The rules that give it its seconds, in order; () for a verdict without seconds.
        cheaper: A prediction of cheaper work: its kind, the change in words, and the share of seconds that is saved.
        is_own: True for the training thread's own work in ``next()``. ``key`` is also the name of its seconds.
        is_loop: True for time of the training thread, which more workers do not shorten.
        is_order: True for waits due to delivery in order, which a larger prefetch avoids.
        is_apart: True if its seconds do not count when dpex decides whether loading is the limit.
        is_making: True for the time of making batches, which the times of single calls can explain.
        has_places: True if its seconds are reported by place.
    """

    key: str
    title: str
    part: str = ""
    explanation: str = ""
    evidence: str = ""
    advice: str = ""
    colour: str = "#b0b4ba"
    takes: tuple[Rule, ...] = ()
    cheaper: tuple[str, str, float] | None = None
    is_own: bool = False
    is_loop: bool = False
    is_order: bool = False
    is_apart: bool = False
    is_making: bool = False
    has_places: bool = False


def is_tiny(reading: Reading) -> bool:
    """Return True if a worker takes less than `TINY_S` for the mean batch."""
    return reading.workers > 0 and reading.tickets > 0 and reading.busy_s / reading.tickets < TINY_S


# -- rules -------------------------------------------------------------------------------------------------------------


def _all_of(*names: str) -> Rule:
    return lambda _, left: {name: left[name] for name in names}


def _part_of(left: Seconds, names: tuple[str, ...], seconds: float) -> Seconds:
    """Take ``seconds`` in all from ``names``, in proportion to the seconds that each name has left."""
    total = sum(left[name] for name in names)
    part = min(1.0, seconds / total) if total > 0 else 0.0
    return {name: part * left[name] for name in names}


def _behind_one(reading: Reading) -> float:
    """Return N / (N - 1) for N batches at once. One worker makes the late batch, so at most (N - 1) / N of all idle."""
    return reading.at_once / (reading.at_once - 1) if reading.at_once > 1 else 0.0


def _narrow(reading: Reading, left: Seconds) -> Seconds:
    """Return waits while workers were idle because fewer batches may be in flight than all workers can make at once.

    Waits behind slow batches are included if ``memory_budget`` keeps the prefetch below what these batches need.
    """
    if reading.prefetch >= reading.at_once and not reading.is_capped:
        return {}
    slowest_s = max(reading.services_s, default=0.0)
    needed = slowest_s * reading.batches / max(1e-9, reading.wall_s) + reading.at_once
    order_s = left["straggler"] if reading.is_capped and needed <= _AT_HAND * reading.prefetch else 0.0
    return {**_part_of(left, STAGE_CAUSES, reading.other_idle_s * _behind_one(reading)), "straggler": order_s}


def _crowded(reading: Reading, left: Seconds) -> Seconds:
    """Return the part of the training thread's own work in ``next()`` that it spent on a run queue.

    The thread is also on a run queue while it takes in or makes batches. Queueing during that work is charged to it,
    because it would vanish with the work.
    """
    busy_s = sum(left[name] for name in OWN)
    total_s = busy_s + reading.transfer_s + reading.pools.get(INLINE, PoolReading()).busy_s
    if is_tiny(reading) or total_s <= 0:
        return {}
    return _part_of(left, OWN, busy_s * min(1.0, reading.loop_queued_s / total_s))


def _dispatch(reading: Reading, left: Seconds) -> Seconds:
    """Return dispatching. If batches are tiny, add taking in, unknown seconds, and stages while workers were idle."""
    if not is_tiny(reading):
        return {"dispatch": left["dispatch"]}
    running_s = reading.workers * max(1e-9, reading.wall_s - reading.causes.get("startup", 0.0))
    busy = min(1.0, (reading.busy_s + sum(pool.transit_s for pool in reading.pools.values())) / running_s)
    idle = {name: (1.0 - busy) * left[name] for name in STAGE_CAUSES}
    return idle | {name: left[name] for name in ("dispatch", "unknown", TAKING_IN)}


def _computing(reading: Reading, left: Seconds) -> Seconds:
    """Return the CPU time of the dataset, of the collate function, and of readers whose samples others decode."""
    wall_s, cpu_s = (
        sum(getattr(pool, name) for pool in reading.pools.values()) for name in ("collate_s", "collate_cpu_s")
    )
    return {
        "transform": left["transform"],
        "collate": left["collate"] * (_part(cpu_s, wall_s) if wall_s > 0 else 1.0),
        "stream": left["stream"] * _part(reading.read_cpu_s, reading.read_s),
    }


def _queueing(reading: Reading, left: Seconds) -> Seconds:
    """Return the part of loading and of collating, beyond CPU time, that workers spent on run queues."""
    load, collate = reading.queueing_parts
    return {"read": left["read"] * load, "collate": left["collate"] * collate}


def _part(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0


NARROW = ("narrow", "a quarter of the bytes (uint8 until the device)", 0.75)
"""See `Cause.cheaper`: smaller types for batches, which travel to the training process or to the device."""


# -- the table, in the order in which causes take their seconds --------------------------------------------------------

WAITS: tuple[Cause, ...] = (
    Cause(
        key="startup",
        title="start-up",
        part="starting",
        explanation="the first batch of each epoch takes long",
        evidence="the first batch of each epoch, and waits while no worker ran",
        advice="Keep the workers between epochs (`persistent_workers=True`).",
        colour="#a7953a",
        takes=(_all_of("startup"),),
        is_apart=True,
    ),
    Cause(
        key="memory",
        title="memory-bound",
        part="too few batches in flight",
        explanation="too few batches may be in flight, so that workers idle",
        evidence="waits while workers were idle because no more batches may be in flight",
        advice="Allow more batches in flight (`memory_budget`, `prefetch_factor`), or make them smaller.",
        colour="#b5588f",
        takes=(_narrow,),
        is_order=True,
    ),
    Cause(
        key="straggler",
        title="straggler-bound",
        part="single slow batches",
        explanation="single slow batches delay finished later batches, while workers are idle",
        evidence="waits while later batches were ready, as far as other workers were idle",
        advice="Use a larger `prefetch_factor`, and look at the slowest samples.",
        colour="#3f7fb5",
        takes=(_all_of("straggler"),),
        is_order=True,
    ),
    Cause(
        key="crowding",
        title="too few CPUs for the training loop",
        part="next() waiting for a CPU",
        explanation="other programs or workers use the CPUs that the training loop itself needs",
        evidence="the training thread's run queue inside next(), from the kernel's schedstat",
        advice="Use fewer workers, or run fewer other programs.",
        colour="#7a4a3a",
        takes=(_crowded,),
        is_apart=True,
    ),
    Cause(
        key="dispatch",
        title="dispatch-bound",
        part="dispatching work and receiving batches",
        explanation="dispatching work to the workers and receiving what they report keeps the training loop itself "
        "busy",
        evidence="timed around messages in next(); of tiny batches also waits while workers were idle",
        advice="Use larger batches, workers on this machine, or `num_workers=0` where batches are tiny.",
        colour="#7d8794",
        takes=(_dispatch,),
        cheaper=("larger", "batches of four times the size, counted as four each", 0.75),
        is_own=True,
        is_loop=True,
    ),
    Cause(
        key="sampler",
        title="sampler-bound",
        part="drawing from the sampler",
        explanation="drawing from the sampler takes long, and the training loop does it in next()",
        evidence="timed around drawing from the sampler in next()",
        advice="Use a faster sampler, which draws the indices of an epoch at once.",
        colour="#5d8f5a",
        takes=(_all_of("sampler"),),
        cheaper=("cheaper", "the sampler at half its cost", 0.5),
        is_own=True,
        is_loop=True,
    ),
    Cause(
        key="transfer",
        title="transfer-bound",
        part="moving batches",
        explanation="moving batches takes long",
        evidence="waits, by serialising and transit of the batch waited for; pinning; taking batches in",
        advice="Use smaller types (`uint8` until the device, with a device transform), and tensors instead of objects.",
        colour="#8a63b8",
        takes=(_all_of("encode", "transit", "h2d", TAKING_IN),),
        cheaper=NARROW,
        is_loop=True,
        has_places=True,
    ),
    Cause(
        key="cpu",
        title="CPU-bound preprocessing",
        part="computing batches",
        explanation="making batches takes CPU time",
        evidence="waits, by the CPU time and run queues of the stages of the batch waited for",
        advice="Make the transforms cheaper, use more workers while CPUs are idle, or the CPUs of a cluster.",
        colour="#c9574a",
        takes=(_computing, _queueing),
        is_making=True,
        has_places=True,
    ),
    Cause(
        key="storage",
        title="storage-bound reading",
        part="reading data",
        explanation="making batches waits for data",
        evidence="waits, by wall less CPU time and run queues of the stages of the batch waited for",
        advice="Use more workers, or a cache.",
        colour="#d08a2e",
        takes=(_all_of("read", "collate", "stream"),),
        is_making=True,
        has_places=True,
    ),
    Cause(
        key="unknown",
        title="cause unknown",
        part="causes that were not measured",
        explanation="something in next() takes long that is neither waiting for a batch, nor making one, drawing or "
        "dispatching",
        evidence="next(), less all that has a cause",
        advice="Profile `next()` (py-spy, cProfile).",
        takes=(lambda _, left: left,),
        is_own=True,
        is_loop=True,
    ),
)
STEP = Cause(
    key="consumer",
    title="training-bound",
    part="the training step",
    explanation="loading does not limit the run",
    advice="Look at the training step.",
    colour="#4a8f5a",
)
MIXED = Cause(
    key="mixed",
    title="mixed",
    explanation="no single cause stands out",
    advice="Follow the first advice of the report.",
)
TOO_EARLY = Cause(
    key="too-early",
    title="too early to say",
    explanation="too few batches were measured",
    advice="Let training run for longer, and ask again.",
)
CAUSES = {one.key: one for one in (STEP, *WAITS, MIXED, TOO_EARLY)}
"""All verdicts by key."""
HELD = Cause(key="held", title=CAUSES["crowding"].title, part="the step waiting for a CPU", colour="#9a5a44")
OWN = tuple(cause.key for cause in WAITS if cause.is_own)
"""Names of the training thread's work in ``next()``, except making batches and taking batches in."""


def by_stage(times: BatchTimes | PoolReading) -> tuple[float, float, float, float, float]:
    """Return the seconds by the names of `STAGE_CAUSES`."""
    transform_s = min(times.load_s, times.load_cpu_s)
    return times.load_s - transform_s, transform_s, times.collate_s, times.encode_s, times.transit_s


# -- seconds -----------------------------------------------------------------------------------------------------------


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

    def flagged_s(self, flag: str) -> float:
        """Return the seconds of all causes with a flag, such as "is_order"."""
        return sum(self.by_cause[cause.key] for cause in WAITS if getattr(cause, flag))

    def place(self, cause: str) -> str:
        """Return the places that each have 30 % or more of a cause's seconds, the largest first; "" if unknown."""
        places = sorted(self.places.get(cause, {}).items(), key=lambda pair: -pair[1])
        total = sum(seconds for _, seconds in places)
        return " and ".join(name for name, seconds in places if seconds >= 0.3 * total) if total > 0 else ""


def losses(reading: Reading) -> LostTime:
    """Attribute the wait to causes, as the module describes."""
    left, queued_s = _measured(reading), 0.0
    taken: dict[str, dict[str, float]] = {cause.key: {} for cause in WAITS}
    for key, rule in ((cause.key, rule) for cause in WAITS for rule in cause.takes):
        seconds = {name: min(left[name], most) for name, most in rule(reading, left).items()}
        left = {name: known - seconds.get(name, 0.0) for name, known in left.items()}
        for name, each in seconds.items():
            taken[key][name] = taken[key].get(name, 0.0) + each
        queued_s = sum(seconds.values()) if rule is _queueing else queued_s
    return LostTime(
        by_cause={key: sum(seconds.values()) for key, seconds in taken.items()},
        places={cause.key: _by_place(taken[cause.key]) for cause in WAITS if cause.has_places},
        queued_s=queued_s,
    )


def _measured(reading: Reading) -> Seconds:
    """Return the wait by name. "straggler" keeps only the part with other workers idle; the stages get the rest."""
    found = {**dict.fromkeys(TIMED, 0.0), **reading.causes}
    order_s = min(found["straggler"], reading.head_idle_s * _behind_one(reading))
    rest_s, found["straggler"] = found["straggler"] - order_s, order_s
    made = [sum(stage) for stage in zip(*(by_stage(pool) for pool in reading.pools.values()), strict=True)]
    for name, seconds in zip(STAGE_CAUSES, made, strict=False):
        found[name] += rest_s * seconds / sum(made) if sum(made) > 0 else 0.0
    if not sum(made) > 0:
        found["unknown"] += rest_s
    return {**found, TAKING_IN: reading.transfer_s}


def _by_place(seconds: Seconds) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for name, each in seconds.items():
        found[PLACES[name]] = found.get(PLACES[name], 0.0) + each
    return found

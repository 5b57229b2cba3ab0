"""What limits the run, in one word and one sentence, with how sure that is and why. Pure.

Rules, first match:

1. Too little was seen (`ENOUGH_BATCHES`, `ENOUGH_S`; of long batches `FEW_BATCHES`, `FEW_S`): nothing is concluded.
2. Once started, less than `LIMIT` of the time is lost (of the GPU's, where that is known), or less than `SMALL` and
   less than `LIMIT` to any one cause, and the start took less than `START_LIMIT`: the consumer is the limit. Time in
   which the training thread waits for a CPU that others hold is not lost to loading, as long as it is below `SMALL`.
3. Seconds lost are put down to causes (`dpex.diagnose.attribution`). The largest is the verdict if it is at least
   `ALONE` times the second; else "mixed".
4. What the order costs where ``memory_budget`` keeps the depth small, and a deeper queue would help by replay, is the
   memory's fault.

Confidence, 0 to 1, is a product: how far the first cause is from the second, (a - b) / (a + b), for "mixed" 1 less
that, for the consumer how far below the limit the loss is; how much was seen, n / (n + 25) for n batches; and, near the
limit, how clearly anything is lost at all. It is halved where a full machine hides whether workers computed or waited.
`SURE` is what a verdict may be acted on without another look.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dpex.diagnose.attribution import Losses, is_tiny, losses
from dpex.diagnose.facts import Facts, TransformFacts

Cause = Literal[
    "consumer",
    "cpu",
    "storage",
    "transfer",
    "straggler",
    "memory",
    "dispatch",
    "crowding",
    "unknown",
    "startup",
    "mixed",
    "too-early",
]
ENOUGH_BATCHES = 50
"""A cause that takes turns with another one shows by then: at 50 a share of one half is known to within 14 points."""
ENOUGH_S = 1.0
"""Below a second the kernel's own time slices and ticks are as large as what is told apart."""
FEW_BATCHES = 20
FEW_S = 12.0
"""Batches that take so long are mostly measured well one by one, and nobody waits for fifty of them: the confidence
says how few they were."""
LIMIT = 0.05
"""XProf calls an input pipeline "not the bottleneck" below that (openxla/xprof, input_pipeline_analysis)."""
SMALL = 0.1
"""A loss that several causes share, each below `LIMIT`, is worth nobody's time below twice that."""
START_LIMIT = 0.1
"""Of the start, which weighs less the longer a run goes on."""
ALONE = 2.0
"""Removing a cause that is no more than twice the next one leaves a third of the loss or more."""
SURE = 0.6
MOST = 0.5
"""A transform with that share of the computing, or waiting, is named."""
APART = 4.0
"""A sample that took so many times the mean, each time on average, is named where it comes up repeatedly."""
HELPS = 1.1
"""A deeper queue counts as helping from this many times the rate on: less is within the replay's own error."""
_HALF_KNOWN = 25
_TOLD = 0.01
"""From this share of the time on a cause is told of beside a training step that is the limit."""

TITLES: dict[str, str] = {
    "consumer": "training-bound",
    "cpu": "CPU-bound preprocessing",
    "storage": "storage-bound reading",
    "transfer": "transfer-bound",
    "straggler": "straggler-bound",
    "memory": "memory-bound",
    "dispatch": "dispatch-bound",
    "crowding": "too few CPUs for the training loop",
    "unknown": "cause unknown",
    "startup": "start-up",
    "mixed": "mixed",
    "too-early": "too early to say",
}

LOST_TO: dict[str, str] = {
    "cpu": "computing batches",
    "storage": "waiting for data",
    "transfer": "moving batches",
    "straggler": "single slow batches",
    "memory": "too few batches in flight",
    "dispatch": "handing out and taking in",
    "crowding": "the training loop waiting for a CPU",
    "unknown": "causes that were not measured",
    "startup": "starting",
}


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A number, its unit, and how it was got."""

    name: str
    value: float
    unit: str
    how: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """See the module. where: which part of the work, "" if unsaid. lost_ratio, gpu_lost_ratio: shares of wall time that
    the training loop and the GPU's stream lost, the latter None if unknown. shares: of what is lost, by cause."""

    cause: Cause
    where: str
    sentence: str
    confidence: float
    lost_ratio: float
    gpu_lost_ratio: float | None
    shares: tuple[tuple[str, float], ...]
    evidence: tuple[Evidence, ...]

    @property
    def title(self) -> str:
        """The cause in words."""
        return TITLES[self.cause]

    @property
    def is_sure(self) -> bool:
        """Whether it may be acted on without another look."""
        return self.confidence >= SURE


def judge(facts: Facts, deeper: float | None = None) -> Verdict:
    """The verdict; ``deeper``: how many times the rate would be with more batches in flight, None if unknown."""
    found = _blaming_memory(facts, losses(facts), deeper)
    seen = facts.batches / (facts.batches + _HALF_KNOWN)
    cause, confidence, causes = _cause(facts, found)
    where = _where(facts, found, cause)
    total = max(1e-12, found.total_s)
    return Verdict(
        cause=cause,
        where=where,
        sentence=_sentence(facts, found, cause, where, causes),
        confidence=min(1.0, max(0.0, confidence * seen)),
        lost_ratio=facts.lost_ratio,
        gpu_lost_ratio=facts.gpu_lost_ratio,
        shares=tuple((name, seconds / total) for name, seconds in found.ranked if seconds > 0),
        evidence=tuple(_evidence(facts, found, cause, deeper)),
    )


def _blaming_memory(facts: Facts, found: Losses, deeper: float | None) -> Losses:
    if not facts.is_capped or deeper is None or deeper < HELPS:
        return found
    by_cause = dict(found.by_cause)
    by_cause["memory"] += by_cause["straggler"]
    by_cause["straggler"] = 0.0
    return Losses(by_cause=by_cause, places=found.places, queued_s=found.queued_s, is_undecided=found.is_undecided)


def _cause(facts: Facts, found: Losses) -> tuple[Cause, float, list[str]]:
    """The cause, how sure it is but for the number of batches, and what is mixed."""
    if not _is_enough(facts):
        return "too-early", 0.0, []
    lost = _lost_to_loading(facts, found)
    if lost < LIMIT and found.by_cause["startup"] < START_LIMIT * facts.wall_s:
        return "consumer", min(1.0, 2.0 * (1.0 - lost / LIMIT)), []
    (first, a), (_, b) = found.ranked[:2]
    apart = (a - b) / max(1e-12, a + b)
    clear = min(1.0, facts.lost_ratio / (2.0 * LIMIT)) * (0.5 if found.is_undecided else 1.0)
    if a < ALONE * b:
        return "mixed", (1.0 - apart) * clear, [name for name, seconds in found.ranked if ALONE * seconds > a]
    return first, apart * clear, [first]  # type: ignore[return-value]


def _is_enough(facts: Facts) -> bool:
    if facts.wall_s >= FEW_S:
        return facts.batches >= FEW_BATCHES
    return facts.batches >= ENOUGH_BATCHES and facts.wall_s >= ENOUGH_S


def _lost_to_loading(facts: Facts, found: Losses) -> float:
    """Share of the time that decides whether loading is the limit: all that is lost, the start left out; the largest
    cause alone where all is `SMALL`."""
    crowding = found.by_cause["crowding"] / facts.wall_s
    lost = facts.stall_ratio if facts.gpu_lost_ratio is None else min(facts.gpu_lost_ratio, facts.stall_ratio)
    lost = max(0.0, lost - crowding) if crowding < SMALL else lost
    if lost >= SMALL:
        return lost
    dearest_s = max(s for name, s in found.by_cause.items() if name not in ("startup", "crowding"))
    return min(lost, dearest_s / facts.wall_s)


def _where(facts: Facts, found: Losses, cause: str) -> str:
    if cause == "memory":
        return "memory_budget" if facts.is_capped else "prefetch"
    if cause == "startup" and facts.passes > 1:
        return f"{facts.passes} passes"
    return _place(facts, found, cause)


def _culprit(facts: Facts) -> str:
    """The sample that was slow again and again, if there is one."""
    again = [slow for slow in facts.slow_samples if slow.times > 1 and slow.times_mean_ratio >= APART]
    if not again:
        return ""
    worst = max(again, key=lambda slow: slow.times * slow.times_mean_ratio)
    return f"dataset index {worst.index} was slow {worst.times} times"


def _place(facts: Facts, found: Losses, cause: str) -> str:
    """Where most of it is, with the transform that takes most of that; the sample that holds others up."""
    if cause == "straggler":
        return _culprit(facts)
    place = found.place(cause)
    step = dominant(facts, cause)
    if not place or step is None or " and " in place or step[0].is_collating != (place == "the collate function"):
        return place
    one, share = step
    which = f"the transform {one.short}" if one.is_within else "its own code, beside its transforms"
    return f"{place}, {_percent(share)} of it in {which}"


def dominant(facts: Facts, cause: str) -> tuple[TransformFacts, float] | None:
    """The step that takes most of what batches compute ("cpu") or wait ("storage"), and which share of the dataset's or
    the collate function's it is; None: none is `MOST` of it, or nothing is known of single transforms."""
    steps = facts.transforms or ()
    if cause not in ("cpu", "storage") or not any(one.is_within for one in steps):
        return None

    def seconds(one: TransformFacts) -> float:
        return one.all_cpu_s if cause == "cpu" else max(0.0, one.all_wall_s - one.all_cpu_s)

    dearest = max(steps, key=seconds)
    stage = [one for one in steps if one.is_collating == dearest.is_collating]
    share = seconds(dearest) / max(1e-12, sum(map(seconds, stage)))
    return (dearest, share) if share >= MOST and any(one.is_within for one in stage) else None


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"


def _sentence(facts: Facts, found: Losses, cause: str, where: str, causes: list[str]) -> str:
    lost = _percent(facts.lost_ratio)
    if cause == "too-early":
        return (
            f"Too early to say: {facts.batches} batches in {facts.wall_s:.1f} s were seen; "
            f"{ENOUGH_BATCHES} in {ENOUGH_S:g} s, or {FEW_BATCHES} in {FEW_S:g} s, are the least to conclude from."
        )
    if cause == "consumer":
        return _consumer(facts, found, lost)
    if cause == "mixed":
        parts = " and ".join(_because(name, _place(facts, found, name)) for name in causes)
        return f"The training loop loses {lost} of its time to loading, for several reasons: {parts}."
    because = _because(cause, where)
    full = " The machine is full: workers wait for a CPU." if cause == "cpu" and _is_full(found) else ""
    return f"The training loop loses {lost} of its time to loading, as {because}.{full}"


def _consumer(facts: Facts, found: Losses, lost: str) -> str:
    gpu = facts.gpu_lost_ratio
    if gpu is not None and facts.lost_ratio >= LIMIT:
        idle = f"it lay idle for {_percent(gpu)}"
        return f"Not data-bound: next() waits for {lost} of the time, but the GPU has work meanwhile: {idle}."
    shares = {LOST_TO[name]: seconds / facts.wall_s for name, seconds in found.ranked}
    beside = ", ".join(f"{_percent(share)} to {name}" for name, share in shares.items() if share >= _TOLD)
    rest = f": {beside}" if facts.lost_ratio >= LIMIT and beside else ""
    return f"The training step is the limit: {lost} of the time is lost beside it{rest}."


def _because(cause: str, where: str) -> str:
    return _BECAUSE[cause] + (f" ({where})" if where else "")


def _is_full(found: Losses) -> bool:
    return found.queued_s > 0.3 * found.by_cause["cpu"]


_BECAUSE = {
    "cpu": "making batches is computing",
    "storage": "making batches is waiting for data",
    "transfer": "batches take long to move",
    "straggler": "single slow batches hold up others that are ready, and workers idle behind them",
    "memory": "too few batches may be in flight, and workers idle",
    "dispatch": "batches are so small that handing them out and taking them in costs more than making them",
    "crowding": "other programs, or workers, hold the CPUs that the training loop itself needs",
    "unknown": "something in next() takes long that is neither waiting for a batch nor making one: drawing from the "
    "sampler, handing out work, or errors",
    "startup": "it waits for the first batches of its passes",
}


def _evidence(facts: Facts, found: Losses, cause: str, deeper: float | None) -> list[Evidence]:
    evidence = [
        Evidence(name="time lost to loading", value=facts.lost_ratio, unit="ratio", how="timed around every next()"),
        Evidence(name="batches", value=facts.batches, unit="", how="counted"),
        Evidence(name="wall time in passes", value=facts.wall_s, unit="s", how="timed around every next()"),
    ]
    if facts.gpu_lost_ratio is not None:
        how = "CUDA events on the training stream as next() is entered and left"
        evidence.append(Evidence(name="GPU time lost", value=facts.gpu_lost_ratio, unit="ratio", how=how))
    if facts.tickets:
        each = facts.tickets
        cpu_s = sum(lane.cpu_s for lane in facts.lanes.values())
        evidence += [
            Evidence(
                name="making a batch", value=facts.busy_s / each, unit="s", how="wall time where it is made, mean"
            ),
            Evidence(
                name="CPU time of that",
                value=cpu_s / each,
                unit="s",
                how="CPU clocks of all threads that work for it, mean",
            ),
        ]
    evidence += [
        Evidence(name=f"lost to {LOST_TO[name]}", value=seconds, unit="s", how=_HOW[name])
        for name, seconds in found.ranked
        if seconds > 0.02 * found.total_s
    ]
    if cause == "cpu" and found.queued_s > 0:
        how = "run queues, from the kernel's schedstat"
        evidence.append(Evidence(name="of that, waiting for a CPU", value=found.queued_s, unit="s", how=how))
    if cause == "memory" and deeper is not None:
        how = "replay of measured times with four times the depth"
        evidence.append(Evidence(name="rate with a deeper queue", value=deeper, unit="times", how=how))
    if is_tiny(facts):
        evidence.append(
            Evidence(name="batch size", value=facts.batch_bytes, unit="bytes", how="mean of what was moved")
        )
    return evidence


_HOW = {
    "crowding": "the training thread's run queue inside next(), from the kernel's schedstat",
    "unknown": "next(), less all that has a cause",
    "cpu": "waits, by the CPU time and run queues of the stages of the batch waited for",
    "storage": "waits, by wall less CPU time and run queues of the stages of the batch waited for",
    "transfer": "waits, by serialising and transit of the batch waited for; pinning; taking batches in",
    "straggler": "waits while later batches were ready, as far as other workers had nothing to do",
    "memory": "waits while workers had nothing to do as no more may be in flight",
    "dispatch": "next() busy with handing out and taking in, and waits for workers that were not at work",
    "startup": "the first batch of each pass, and waits while no worker ran",
}

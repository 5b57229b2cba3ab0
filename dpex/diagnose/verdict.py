"""The limit of a run in one word and one sentence, with confidence and evidence. Pure.

Rules, first match:

1. "too-early" with too few batches (`ENOUGH_BATCHES`, `ENOUGH_S`; for long batches `FEW_BATCHES`, `FEW_S`).
2. The transfer, if the training stream waits at least `LIMIT` of the time for finished batches to reach the device, and
   at least `ALONE` times as long as loading stalls the loop.
3. Too few CPUs, if the training thread waits for a CPU (in its steps and in ``next()``) at least `SMALL` of the time,
   and at least as long as for batches. Else the consumer, if starts take less than `START_LIMIT` of the time, and the
   loop (or the GPU, if measured) waits less than `LIMIT` of the time after the starts. A wait below `SMALL` counts only
   if a single cause reaches `LIMIT`.
4. The largest cause of the wait (`dpex.measure.causes`), if it is at least `ALONE` times the second; else
   "mixed".

Confidence, 0 to 1, is a product of three factors. The first is the distance of the first cause a from the second b,
(a - b) / (a + b). For "mixed" it is 1 minus this distance, and for the consumer the distance of the loss from the
limit. The second factor is n / (n + 25) for n batches. The third is below 1 for losses near the limit. The product is
halved if the machine is full and its kernel does not report waits for a CPU, because workers may have waited for a CPU
instead of data. From `SURE` on, the user may act on a verdict without another measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dpex.diagnose.facts import Facts
from dpex.diagnose.hot_calls import HotCall, is_blocking, of_cause
from dpex.measure.causes import CAUSES, PLACES, WAITS, LostTime, is_tiny
from dpex.measure.readable import duration, percent, rounded
from dpex.measure.views import cpus_used, is_full

ENOUGH_BATCHES = 50
"""Minimum batches for a verdict. After 50 batches, a share of one half is known to within 14 percentage points."""
ENOUGH_S = 1.0
"""Minimum seconds for a verdict, because time slices and ticks of the kernel distort shorter measurements."""
FEW_BATCHES = 20
FEW_S = 12.0
"""Minimum batches and seconds if batches are long. Fewer are enough, because each is measured precisely and 50 would
take too long. The confidence is lower."""
LIMIT = 0.05
"""Minimum wait ratio of a bottleneck. XProf has the same limit (openxla/xprof, input_pipeline_analysis)."""
SMALL = 0.1
"""Minimum share of the time for a loss if each of its causes is below `LIMIT`, and for a lack of CPUs, because every
program on a machine in use waits for a CPU now and then."""
START_LIMIT = 0.1
"""The `LIMIT` for starts of passes. It is higher, because the share of the starts falls as a run goes on."""
ALONE = 2.0
"""Minimum ratio of the largest cause to the second for a verdict of one cause. Below it, removing the largest cause
leaves a third of the loss or more."""
SURE = 0.6
"""Minimum confidence with which the user may act on a verdict without another measurement."""
MOST = 0.5
"""A call with this share of the computing, or waiting, of its stage is named in the verdict."""
BUSY = 0.9
"""A GPU that runs kernels for this share of the time or more does not wait for a CPU."""
APART = 4.0
"""A sample is named if it was slow repeatedly, and took on average this many times the mean time of a sample."""
FULL = 0.3
"""A machine is called full if waits for a CPU are more than this share of the seconds of the cause "cpu"."""
_HALF_KNOWN = 25
"""Batches after which a confidence is half of its final value."""
IDLE = 0.2
"""A GPU that idles while batches are ready is mentioned from this share of the time on; short kernels leave gaps."""
COPIES, TRANSFORM = "copies to the device", "device transform"
"""What the training stream may have to wait for. The transform of a batch follows its copy, while earlier steps run."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A number that a verdict rests on.

    Attributes:
        name: The measured quantity.
        value: The number.
        unit: Its unit: "s", "bytes", "ratio", or "" for a count.
        how: How it was measured.
    """

    name: str
    value: float
    unit: str
    how: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The limit of a run, with confidence and evidence.

    Attributes:
        cause: The cause in one word.
        where: The part of the work, or "".
        sentence: The verdict in words.
        confidence: From 0 to 1. Act on a verdict from 0.6 on.
        shares: Causes of the wait with their shares, largest first.
        evidence: The measured numbers.
    """

    cause: str
    where: str
    sentence: str
    confidence: float
    shares: Mapping[str, float]
    evidence: tuple[Evidence, ...]

    @property
    def title(self) -> str:
        """The cause in words."""
        return CAUSES[self.cause].title

    @property
    def is_sure(self) -> bool:
        """True if the user may act on the verdict without another measurement."""
        return self.confidence >= SURE


def judge(facts: Facts, found: LostTime) -> Verdict:
    """Conclude what limits the run."""
    seen = facts.batches / (facts.batches + _HALF_KNOWN)
    cause, confidence, causes = _cause(facts, found)
    where = _where(facts, found, cause)
    total = max(1e-12, found.total_s)
    return Verdict(
        cause=cause,
        where=where,
        sentence=_sentence(facts, found, cause, where, causes),
        confidence=min(1.0, max(0.0, confidence * seen)),
        shares={name: seconds / total for name, seconds in found.ranked if seconds > 0},
        evidence=tuple(_evidence(facts, found, cause)),
    )


def _cause(facts: Facts, found: LostTime) -> tuple[str, float, list[str]]:
    """Return the cause, the confidence before the factor of the number of batches, and the causes of "mixed"."""
    if not _is_enough(facts):
        return "too-early", 0.0, []
    lost = _lost_to_loading(facts, found)
    if _is_late_on_device(facts, found):
        return "transfer", min(1.0, facts.copies_ratio / (2.0 * LIMIT)), ["transfer"]
    lack = _held_share(facts) + found.by_cause["crowding"] / facts.wall_s
    starts = found.by_cause["startup"] / facts.wall_s
    if lack >= max(SMALL, lost) and starts < max(START_LIMIT, lack):
        return "crowding", min(1.0, lack / (2.0 * LIMIT)), ["crowding"]
    if lost < LIMIT and starts < START_LIMIT:
        return "consumer", min(1.0, 2.0 * (1.0 - lost / LIMIT)), []
    (first, a), (_, b) = found.ranked[:2]
    apart = (a - b) / max(1e-12, a + b)
    clear = min(1.0, facts.wait_ratio / (2.0 * LIMIT))
    if is_full(facts) and any(pool.tickets and pool.queueing_s is None for pool in facts.pools.values()):
        clear *= 0.5  # workers may have waited for a CPU, which the kernel did not report
    if a < ALONE * b:
        return "mixed", (1.0 - apart) * clear, [name for name, seconds in found.ranked if ALONE * seconds > a]
    return first, apart * clear, [first]


def _held_share(facts: Facts) -> float:
    """Return the share of the time in which the training step waited for a CPU; 0 if the GPU was busy."""
    return 0.0 if facts.kernel_ratio is not None and facts.kernel_ratio >= BUSY else facts.held_ratio


def _is_late_on_device(facts: Facts, found: LostTime) -> bool:
    """Return True if the training stream waits mainly for finished batches that have not reached the device."""
    return facts.copies_ratio >= max(LIMIT, ALONE * _lost_to_loading(facts, found))


def _is_enough(facts: Facts) -> bool:
    if facts.wall_s >= FEW_S:
        return facts.batches >= FEW_BATCHES
    return facts.batches >= ENOUGH_BATCHES and facts.wall_s >= ENOUGH_S


def _lost_to_loading(facts: Facts, found: LostTime) -> float:
    """Return the share of the time that decides whether loading is the limit.

    It is the loop's wait, or the GPU's stall if that is shorter, without starts and without the training thread's waits
    for a CPU. Below `SMALL`, it is at most the largest cause.
    """
    lost = facts.running_wait_ratio
    lost = lost if facts.gpu_stall_ratio is None else min(facts.gpu_stall_ratio, lost)
    lost = max(0.0, lost - found.by_cause["crowding"] / facts.wall_s)
    if lost >= SMALL:
        return lost
    dearest_s = max(found.by_cause[one.key] for one in WAITS if not one.is_apart)
    return min(lost, dearest_s / facts.wall_s)


def _where(facts: Facts, found: LostTime, cause: str) -> str:
    if cause == "transfer" and _is_late_on_device(facts, found):
        return waited_for(facts)
    if cause == "memory":
        return "memory_budget" if facts.is_capped else "prefetch"
    if cause == "startup" and facts.passes > 1:
        return f"{facts.passes} epochs"
    return _place(facts, found, cause)


def _culprit(facts: Facts) -> str:
    """Return the sample that was slow repeatedly, or ""."""
    least_s = APART * facts.sample_s
    again = [slow for slow in facts.slow_samples if slow.times > 1 and slow.total_s >= least_s * slow.times]
    worst = max(again, key=lambda slow: slow.total_s, default=None)
    return "" if worst is None else f"dataset index {worst.shown} was slow {worst.times} times"


def _place(facts: Facts, found: LostTime, cause: str) -> str:
    """Return the costliest place with its costliest call, or the sample that delays other batches."""
    if cause == "straggler":
        return _culprit(facts)
    if CAUSES[cause].is_own and CAUSES[cause].cheaper:
        return "" if cause == "dispatch" and is_tiny(facts) else _each_batch(facts, cause)
    place = found.place(cause)
    step = dominant(facts, cause)
    if not place or step is None or PLACES["stream"] in place or " and " in place:
        return place
    one, share = step
    if one.is_collating != (place == "the collate function"):
        return place
    blocks = ", which blocks the event loop, so that the other samples of the worker cannot go on"
    return f"{place}, {percent(share)} of it in {one.title}{blocks if is_blocking(facts, one) else ''}"


def _each_batch(facts: Facts, cause: str) -> str:
    """Return a text with the training loop's mean time per batch. For "dispatch" it mentions remote workers."""
    to_cluster = ", with workers on the cluster" if cause == "dispatch" and facts.remote_workers else ""
    return f"{1e3 * facts.causes.get(cause, 0.0) / max(1, facts.batches):.2g} ms per batch{to_cluster}"


def dominant(facts: Facts, cause: str) -> tuple[HotCall, float] | None:
    """Return the hot call that computes ("cpu") or waits ("storage") longest, and its share of all computing or waiting
    in its stage; None if there is no such call, or if its share is below `MOST`."""
    found = of_cause(facts, cause) if CAUSES[cause].is_making else ()
    if not found:
        return None
    (dearest, seconds), calls = found[0], facts.calls
    stage = [one for one in calls if one.is_collating == dearest.is_collating]
    all_s = sum(one.all_cpu_s if cause == "cpu" else max(0.0, one.all_wall_s - one.all_cpu_s) for one in stage)
    share = min(1.0, seconds / max(1e-12, all_s))
    return (dearest, share) if share >= MOST else None


def _sentence(facts: Facts, found: LostTime, cause: str, where: str, causes: list[str]) -> str:
    waits = f"The training loop waits for {percent(facts.wait_ratio)} of its time"
    if cause == "too-early":
        return (
            f"{facts.batches} batches in {facts.wall_s:.1f} s were measured. A conclusion needs "
            f"{ENOUGH_BATCHES} batches and {ENOUGH_S:g} s, or {FEW_BATCHES} batches and {FEW_S:g} s."
        )
    if cause == "consumer":
        held = f" {_held_up(facts)}" if _held_share(facts) >= LIMIT else ""
        return _consumer(facts) + held + _not_the_loader(facts)
    if where in (COPIES, TRANSFORM):
        return _late_batches(facts)
    if cause == "crowding" and facts.held_s >= found.by_cause["crowding"]:
        return f"{_held_up(facts)} The wait for batches is {percent(facts.wait_ratio)} of the time."
    held = f" {_held_up(facts)}" if _held_share(facts) >= LIMIT else ""
    who = "workers wait" if facts.workers else "next() waits"
    full = (
        f" The machine is full: {who} for a CPU."
        if "cpu" in causes and found.queued_s > FULL * found.by_cause["cpu"]
        else ""
    )
    if cause == "mixed":
        parts = "; ".join(_because(facts, name, _place(facts, found, name)) for name in causes)
        return f"{waits}, for several reasons: {parts}.{full}{_gpu(facts)}{held}"
    return f"{waits}, because {_because(facts, cause, where)}.{full}{_gpu(facts)}{held}"


def _gpu(facts: Facts) -> str:
    """Return a sentence on the GPU's stall; "" if the stall was not measured."""
    gpu = facts.gpu_stall_ratio
    return "" if gpu is None else f" The GPU waits for data for {percent(gpu)} of the time, by CUDA events."


def _held_up(facts: Facts) -> str:
    """Return a sentence on how much waits for a CPU lengthen the step, and on the programs that hold the CPUs."""
    used = cpus_used(facts)
    own, others = used["the workers"], used["other programs"]
    names = {"other programs": others, "the loader's own workers": own}
    top = max(names.values())
    holders = [name for name, count in names.items() if count > 0 and count >= top / ALONE] or ["others"]
    held = sum(names.get(name, 0.0) for name in holders)
    count = f"{rounded(held)} of the {rounded(facts.cpus)} CPUs" if held else "the CPUs"
    step_s = (facts.work_s - facts.held_s) / max(1, facts.batches)
    times = facts.work_s / max(1e-9, facts.work_s - facts.held_s)
    return f"The training step takes {times:.2g} times its {duration(step_s)}, as {' and '.join(holders)} hold {count}."


def _consumer(facts: Facts) -> str:
    gpu, wait = facts.gpu_stall_ratio, percent(facts.wait_ratio)
    if gpu is not None and facts.wait_ratio >= LIMIT:
        return (
            f"Not data-bound: next() waits for {wait} of the time, but the GPU has work meanwhile and, by CUDA events, "
            f"it is idle for {percent(gpu)}."
        )
    return f"The training step is the limit: the wait is {wait} of the time."


# -- the GPU's side ----------------------------------------------------------------------------------------------------


def waited_for(facts: Facts) -> str:
    """Return whether the training stream waits for copies or for the device transform; "" where it hardly waits."""
    if facts.copies_ratio < LIMIT:
        return ""
    return TRANSFORM if (facts.feed_transform_s or 0.0) > (facts.feed_copy_s or 0.0) else COPIES


def _late_batches(facts: Facts) -> str:
    is_transform = waited_for(facts) == TRANSFORM
    seconds = (facts.feed_transform_s if is_transform else facts.feed_copy_s) or 0.0
    what = "the device transform takes" if is_transform else "copying one takes"
    return (
        f"The training stream waits for {percent(facts.copies_ratio)} of the time for batches that are made and not "
        f"ready on the device: {what} {duration(seconds / max(1, facts.batches))}. More workers change nothing."
    )


def _not_the_loader(facts: Facts) -> str:
    """Return the evidence of NVML that the GPU idles while batches are ready, or ""."""
    if facts.supplied_kernel_ratio is None or facts.supplied_idle_ratio < IDLE:
        return ""
    busy = percent(facts.supplied_kernel_ratio)
    return (
        f" While batches are ready the GPU runs kernels for {busy} of the time by NVML: it does not wait for the "
        "loader."
    )


# -- words and numbers -------------------------------------------------------------------------------------------------


def _because(facts: Facts, cause: str, where: str) -> str:
    because = _SO_SMALL if cause == "dispatch" and is_tiny(facts) else CAUSES[cause].explanation
    return because + (f" ({where})" if where else "")


_SO_SMALL = "batches are so small that dispatching and receiving them costs more than making them"


def _evidence(facts: Facts, found: LostTime, cause: str) -> Iterator[Evidence]:
    """Yield the measured numbers that support the verdict."""
    made = max(1, facts.tickets)
    late = facts.copies_ratio if facts.copies_ratio >= LIMIT else None
    making_s = (facts.busy_s / made, facts.cpu_s / made) if facts.tickets else (None, None)
    causes = [(CAUSES[name], seconds) for name, seconds in found.ranked if seconds > 0.02 * found.total_s]
    known: tuple[tuple[str, float | None, str, str], ...] = (
        ("wait", facts.wait_ratio, "ratio", "time in next(), timed around every call"),
        ("batches", facts.batches, "", "counted"),
        ("wall time in epochs", facts.wall_s, "s", "timed around every next()"),
        ("GPU stall", facts.gpu_stall_ratio, "ratio", "CUDA events on the training stream around next()"),
        ("step waiting for a CPU", facts.held_ratio or None, "ratio", "run queue of the training thread in its steps"),
        ("making a batch", making_s[0], "s", "wall time where it is made, mean"),
        ("CPU time of that", making_s[1], "s", "CPU clocks of all threads that work for it, mean"),
        ("waiting for the device's batches", late, "ratio", "events of the device around the stream's wait for each"),
        ("GPU runs kernels", facts.kernel_ratio, "ratio", "NVML, once a second while the loader was tuned"),
        *((f"of the wait: {words.part}", seconds, "s", words.evidence) for words, seconds in causes),
        ("of that, waiting for a CPU", found.queued_s or None if cause == "cpu" else None, "s", "run queues"),
        ("batch size", facts.batch_bytes if is_tiny(facts) else None, "bytes", "mean of what was moved"),
    )
    for name, value, unit, how in known:
        if value is not None:
            yield Evidence(name=name, value=value, unit=unit, how=how)

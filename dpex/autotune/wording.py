"""Say what a decision changes, why, and what is expected, in one or two plain sentences. PURE.

Every text names both settings once, gives its evidence with units, and ends with a full stop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dpex.autotune.types import Settings
from dpex.core.names import WORKER_POOLS
from dpex.core.readable import duration, fine_percent, percent, rounded, size

_NEGLIGIBLE = 0.005
"""A gain smaller than that is no gain: figures are said in percent."""
_MUCH_MORE = 0.1
"""A share of the time; by so much what is lost is more than the waits for batches, which needs a word."""
NO_ROOM_FOR_PREFETCH = "there is no room for a larger prefetch"
NO_STEP = "the first half of the way does not leave the present settings"
SHORT_QUEUE = "all batches that may be drawn are in flight and none is ready, so that workers have no ticket"
PREFETCH_IS_NEEDED = "it needs memory of batches in flight, of which there are too few already"
JUST_CHANGED = "the settings were changed only a moment ago"
NOT_SEEN_ENOUGH = "too few batches were seen to be sure that fewer will do"
NOTHING_IS_LEFT = "the limits leave nothing of it"


def named(settings: Settings) -> str:
    """A setting in words, such as "6 local workers (prefetch 12)"."""
    if not settings.workers:
        return "in-process loading"
    counts = [(place, getattr(settings, place)) for place in WORKER_POOLS]
    workers = [f"{count} {place} worker{'s' if count > 1 else ''}" for place, count in counts if count]
    return f"{' and '.join(workers)} (prefetch {settings.prefetch})"


def faster(old: Settings, new: Settings, rate: float, evidence: Mapping[str, float]) -> str:
    """The model expects more of another setting."""
    return (
        f"From {_move(old, new)}, because {_lost(evidence)}. A batch takes {_time(evidence['worker_cpu_ms'])} of CPU "
        f"time and {_time(evidence['worker_wait_ms'])} of waiting; a training step takes {_time(evidence['step_ms'])}. "
        f"{_rates(rate, evidence)}"
    )


def fewer(old: Settings, new: Settings, rate: float, evidence: Mapping[str, float]) -> str:
    """Fewer workers are as fast."""
    return f"From {_move(old, new)}, because fewer are just as fast. {_rates(rate, evidence)}"


def too_much_memory(old: Settings, new: Settings, free_bytes: float) -> str:
    """The memory has a limit."""
    memory = size(abs(free_bytes))
    if free_bytes > 0:
        return f"From {_move(old, new)}, because loading may take only {memory} more memory than it takes now."
    return f"From {_move(old, new)}, because loading takes {memory} more memory than the training process can spare."


def no_place(old: Settings, new: Settings, unplaced: int, rate: float) -> str:
    """Remote workers that cannot run."""
    workers = "1 of the remote workers" if unplaced == 1 else f"{unplaced} of the remote workers"
    return f"From {_move(old, new)}, because the cluster has no room for {workers}. Expected: {_rate(rate)}."


def share_is(old: Settings, new: Settings, granted: int, rate: float) -> str:
    """Others on the cluster need the room more."""
    return (
        f"From {_move(old, new)}, because {granted} of the cluster's workers are this loader's share beside the other "
        f"loaders there. Expected: {_rate(rate)}."
    )


def out_of_turn(head: float) -> str:
    """Later batches are ready while the next one in turn is not."""
    return f"{_share(head)} of the time only the next batch in order was missing, while later ones were ready"


def burst(fullest: int, prefetch: int) -> str:
    """The queue is full at one time, and empty at another."""
    return (
        f"the training loop waits at one time, and {fullest} of {prefetch} batches are ready at another, so that the "
        "workers rest"
    )


def longer_queue(old: Settings, new: Settings, why: str, rate: float) -> str:
    """The queue of batches says that it is too short."""
    return f"From {_move(old, new)}, because {why}. With a larger prefetch, at most {_rate(rate)} are expected."


def held_up(old: Settings, new: Settings, gap_s: float) -> str:
    """One batch holds up all others for so long."""
    return (
        f"From {_move(old, new)}, because a single batch has held up all others for {gap_s:.1f} s while the workers "
        "had nothing to do. With a larger prefetch they go on meanwhile."
    )


def trial(old: Settings, new: Settings, evidence: Mapping[str, float]) -> str:
    """Something that the model knows no reason for."""
    return (
        f"A trial: from {_move(old, new)}, because {_lost(evidence)} and the model knows no better setting. "
        "It is undone unless it clearly helps."
    )


def trial_in_process(old: Settings, new: Settings, rate: float, evidence: Mapping[str, float]) -> str:
    """Without workers."""
    return (
        f"A trial: from {_move(old, new)}, because {_lost(evidence)} and a batch takes only "
        f"{_time(evidence['worker_cpu_ms'])} of CPU time, so that handing it over may cost more than it saves. "
        f"{_rates(rate, evidence)} It is undone unless it clearly helps."
    )


def undone(old: Settings, new: Settings, gain: float, error: float, rates: tuple[float, float, float]) -> str:
    """``old``, which was tried, is given up. gain, error: of the rate, by what batches cost. rates: before, since, and
    expected."""
    before, since, expected = rates
    back = f"Back from {_move(old, new)}, because"
    if since <= 0:
        return f"{back} no batch has arrived since then; {_rate(expected)} were expected."
    compared = f"{_rate(since)} since then, {_rate(before)} before, {_rate(expected)} expected"
    if gain < -_NEGLIGIBLE:
        return f"{back} batches became {_percent(-gain)} slower ({compared})."
    if gain <= error:
        margin = f"is within its error of ±{_percent(error)}" if math.isfinite(error) else "cannot be told from chance"
        return f"{back} a gain of {_percent(gain)} {margin} ({compared})."
    return f"{back} a gain of {_percent(gain)} ± {_percent(error)} is too small ({compared})."


def queueing(old: Settings, new: Settings, cost_s: tuple[float, float], rates: tuple[float, float]) -> str:
    """``old`` is given up, as its workers queued for something. cost_s: seconds that a worker took for a batch before
    and since, the latter 0 if that is not known; rates: likewise."""
    was_s, now_s = cost_s
    takes = (
        f"a worker takes {_time(1e3 * now_s)} for a batch, where it took {_time(1e3 * was_s)}, and " if now_s else ""
    )
    return (
        f"Back from {_move(old, new)}, because {takes}the rate went from {_rate(rates[0])} to {_rate(rates[1])}. The "
        "workers wait for one another at something that they share: storage, a network or a lock."
    )


def changed(what: Sequence[str], then: str) -> str:
    """The work has changed, and ``then`` follows from it."""
    return f"The work has changed: {', '.join(what)}. {then}"


def cut(text: str, allowed: Settings) -> str:
    """The limits allow only a part of it."""
    return f"{text} The limits allow only {named(allowed)}."


def gpu_is_busy(evidence: Mapping[str, float]) -> str:
    """Why nothing is added: the GPU has enough to do."""
    waits = f"the training loop waits for {_share(evidence['loop_waited'])} of the time"
    return f"the GPU is busy for {_share(evidence['gpu_busy'])} of the time by NVML, though {waits}"


def by_gpu(text: str, evidence: Mapping[str, float], *, is_held_up: bool) -> str:
    """The same, and what the GPU says of it. is_held_up: it idles although batches are ready."""
    said = "" if "GPU" in text else f" {_gpu(evidence)}."
    idle = f" It runs kernels for {_share(evidence['gpu_busy'])} of the time" if is_held_up else ""
    elsewhere = f"{idle} although batches are ready: what it waits for is not the loader." if is_held_up else ""
    copies = evidence.get("gpu_waits_for_copies")
    waits = f" It waits for copies to it for {_share(copies)} of the time, which no worker shortens." if copies else ""
    return f"{text}{said}{elsewhere}{waits}"


def failed_lately(left_s: float) -> str:
    """Why a change is not made: it did not help."""
    return f"such a change did not help; it is not tried again for {left_s:.3g} s"


def votes(count: int, needed: int) -> str:
    """Why a change is not made yet: one window more or less is no reason."""
    return f"{count} of {needed} windows in a row agree"


def level(what: str, before_s: float, now_s: float) -> str:
    """A quantity that is another now."""
    return f"{what} {_time(1e3 * before_s)} → {_time(1e3 * now_s)}"


def _move(old: Settings, new: Settings) -> str:
    return f"{named(old)} to {named(new)}"


def _rates(expected: float, evidence: Mapping[str, float]) -> str:
    return f"Expected: {_rate(expected)}; measured so far: {_rate(evidence['rate'])}."


def _time(milliseconds: float) -> str:
    return duration(1e-3 * milliseconds)


def _lost(evidence: Mapping[str, float]) -> str:
    """The time that is no training step's, nor would be if nothing else used the CPUs."""
    lost = evidence["wait"]
    if "gpu_stall" in evidence:
        return f"the GPU waits for data for {_share(lost)} of the time, by CUDA events"
    if "gpu_busy" in evidence:
        return f"the GPU idles for {_share(lost)} of the time while the training loop waits, by NVML"
    is_more_than_waiting = lost - evidence["blocked"] > _MUCH_MORE
    return f"{_share(lost)} of the time is lost to loading{' or to waiting for a CPU' if is_more_than_waiting else ''}"


def _gpu(evidence: Mapping[str, float]) -> str:
    lost = _lost(evidence)
    return lost[0].upper() + lost[1:]


def _share(share: float) -> str:
    return percent(share)


def _percent(part: float) -> str:
    return fine_percent(part)


def _rate(rate: float) -> str:
    return f"{rounded(rate)} batches/s"

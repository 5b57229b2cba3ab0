"""Say what a decision changes, why, and what is expected, in one or two plain sentences. PURE.

Every text names both settings once, gives its evidence with units, and ends with a full stop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dpex.autotune.types import Settings

_NEGLIGIBLE = 0.005


def faster(old: Settings, new: Settings, rate: float, evidence: Mapping[str, float]) -> str:
    """The model expects more of another setting."""
    return (
        f"From {old} to {new}, as {_lost(evidence)}: a batch takes {_time(evidence['worker_cpu_ms'])} of CPU and "
        f"{_time(evidence['worker_wait_ms'])} of waiting, a step {_time(evidence['step_ms'])}. "
        f"Expected are {_rate(rate)}; measured so far are {_rate(evidence['rate'])}."
    )


def fewer(old: Settings, new: Settings, rate: float, evidence: Mapping[str, float]) -> str:
    """Fewer workers are as fast."""
    return (
        f"From {old} to {new}, which is as fast and leaves the rest to others. "
        f"Expected are {_rate(rate)}; measured so far are {_rate(evidence['rate'])}."
    )


def too_much_memory(old: Settings, new: Settings, free_bytes: float) -> str:
    """The memory has a limit."""
    room = f"{free_bytes / 1e6:.3g} MB more" if free_bytes > 0 else f"{-free_bytes / 1e6:.3g} MB less"
    return f"From {old} to {new}, as loading may take {room} memory than it has now, and the trainer needs the rest."


def no_place(old: Settings, new: Settings, unplaced: int, rate: float) -> str:
    """Remote workers that cannot run."""
    workers = "1 of the remote workers" if unplaced == 1 else f"{unplaced} of the remote workers"
    return f"From {old} to {new}, as the cluster has no place for {workers}. Expected are {_rate(rate)}."


def out_of_turn(old: Settings, new: Settings, head: float, rate: float) -> str:
    """Later batches are ready while the next one in turn is not."""
    return (
        f"From {old} to {new}, as {_share(head)} of the time later batches were ready and only the next one in turn "
        f"was missing. With more batches in flight up to {_rate(rate)} are hoped for."
    )


def held_up(old: Settings, new: Settings, gap_s: float) -> str:
    """One batch holds up all others for so long."""
    return (
        f"From {old} to {new}, as a single batch has held up all others for {gap_s:.1f} s while the workers had "
        "nothing to do. With more batches in flight they go on meanwhile."
    )


def trial(old: Settings, new: Settings, evidence: Mapping[str, float]) -> str:
    """Something that the model knows no reason for."""
    return (
        f"A trial, from {old} to {new}, as {_lost(evidence)} and the model knows no better setting. "
        "It is undone unless it surely helps."
    )


def trial_in_process(old: Settings, new: Settings, rate: float, evidence: Mapping[str, float]) -> str:
    """Without workers."""
    return (
        f"A trial, from {old} to {new}, as {_lost(evidence)} and a batch takes only {_time(evidence['worker_cpu_ms'])} "
        f"of CPU: handing it over may cost more than it saves. Expected are {_rate(rate)}; measured so far are "
        f"{_rate(evidence['rate'])}; it is undone unless it surely helps."
    )


def undone(old: Settings, new: Settings, gain: float, error: float, rates: tuple[float, float, float]) -> str:
    """``old``, which was tried, is given up. gain, error: of the rate, by what batches cost. rates: before, since, and
    expected."""
    before, since, expected = rates
    back = f"Back from {old} to {new}: "
    if since <= 0:
        return f"{back}no batch came since, and {_rate(expected)} were expected."
    came = f"{_rate(since)} since, {_rate(before)} before, {_rate(expected)} expected"
    if gain < -_NEGLIGIBLE:
        return f"{back}it made batches {_percent(-gain)} slower to come by ({came})."
    if gain <= error:
        margin = f"±{_percent(error)}" if math.isfinite(error) else "no end"
        return f"{back}a gain of {_percent(gain)} with an error of {margin} may be chance ({came})."
    return f"{back}a gain of {_percent(gain)} ± {_percent(error)} is too little to keep it for ({came})."


def queueing(old: Settings, new: Settings, cost_s: tuple[float, float], rates: tuple[float, float]) -> str:
    """``old`` is given up, as its workers queued for something. cost_s: seconds that a worker took for a batch before
    and since; rates: likewise."""
    was_s, now_s = cost_s
    return (
        f"Back from {old} to {new}: a batch takes a worker {now_s * 1e3:.3g} ms in place of {was_s * 1e3:.3g} ms, and "
        f"{_rate(rates[1])} came in place of {_rate(rates[0])}. The workers queue for something of which there is no "
        f"more: a storage, a network or a lock."
    )


def changed(what: Sequence[str], then: str) -> str:
    """The work has changed, and ``then`` follows from it."""
    return f"The work has changed: {', '.join(what)}. {then}"


def cut(text: str, allowed: Settings) -> str:
    """The limits allow only a part of it."""
    return f"{text} The limits allow only {allowed}."


def level(what: str, before_s: float, now_s: float) -> str:
    """A quantity that is another now."""
    return f"{what} {_time(1e3 * before_s)} → {_time(1e3 * now_s)}"


def _time(milliseconds: float) -> str:
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.3g} s"
    return f"{milliseconds:.3g} ms" if milliseconds >= 0.001 else "0 ms"


def _lost(evidence: Mapping[str, float]) -> str:
    return f"{_share(evidence['stall'])} of the time is lost to loading"


def _share(share: float) -> str:
    return f"{100 * share:.0f} %"


def _percent(part: float) -> str:
    return f"{100 * part:.{0 if part >= 0.095 else 1}f} %"


def _rate(rate: float) -> str:
    return f"{rate:.3g} batches/s"

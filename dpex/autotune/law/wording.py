"""Put a decision of the law into sentences: the change, its reason, its evidence, and its expected effect. PURE.

Every text begins with both settings, gives its evidence with units, and ends with the predicted rate, step and wait,
where ``rate * step + wait`` is 1.
"""

from __future__ import annotations

from collections.abc import Mapping

from dpex.autotune.law.evidence import SettingStats
from dpex.autotune.law.model import Model
from dpex.autotune.types import Decision, Reason
from dpex.measure.readable import duration, percent, plural, rounded, size
from dpex.measure.reading import Reading, Signal
from dpex.measure.settings import WORKER_POOLS, Settings

_WAITS: Mapping[Signal, str] = {
    "wait": "the training loop waits for data",
    "events": "the GPU waits for data, by CUDA events,",
    "nvml": "the GPU idles while the training loop waits, by NVML,",
}


def expected(
    model: Model | None, new: Settings, record: SettingStats, window: Reading
) -> tuple[float, float, dict[str, float]]:
    """Return the expected rate and wait under ``new``, and the measurements behind them, by name with a unit.

    Without a model, return zeros and no measurements.
    """
    if model is None:
        return 0.0, 0.0, {}
    rate, step_s = model.expected(new)
    step_s = _outside_next_s(step_s, record, window)
    evidence = measured(record, window) | {
        "service_s": model.local.service_s,
        "cpu_s": model.local.cpu_s,
        "step_s": model.step_s,
        "expected_step_s": step_s,
        "cpus": model.cpus,
        "others": model.others,
    }
    return rate, max(0.0, 1.0 - rate * step_s), evidence


def _outside_next_s(step_s: float, record: SettingStats, window: Reading) -> float:
    """Return the part outside ``next()`` of ``step_s``, which are all seconds of a step without blocked ones."""
    seen = _counted(record, window).sum
    return step_s * (1.0 - min(1.0, seen.next_busy_s / max(1e-9, seen.seconds - seen.blocked_s)))


def measured(record: SettingStats, window: Reading) -> dict[str, float]:
    """Return rate and wait under the present setting, or in the latest window if no window counts yet.

    The rate is missing if the windows are too short for a rate. The wait is the share of all time in ``next()``.
    """
    seen = _counted(record, window)
    return {"rate": seen.rate()[0], "wait": seen.sum.wait} if seen.has_rate else {"wait": seen.sum.wait}


def _counted(record: SettingStats, window: Reading) -> SettingStats:
    """Return the windows under the present setting, or else the latest window."""
    if len(record):
        return record
    latest = SettingStats()
    latest.add(window, 0.0)
    return latest


def named(settings: Settings) -> str:
    """Return a setting in words, such as "6 local workers (prefetch 12)"."""
    counts = [(place, getattr(settings, place)) for place in WORKER_POOLS]
    workers = [plural(count, f"{place} worker") for place, count in counts if count]
    return f"{' and '.join(workers) or 'no worker'} (prefetch {settings.prefetch})"


def decided(decision: Decision, window: Reading, failed: Decision | None = None) -> str:
    """Return the text of a decision. ``failed``: The earlier decision that an "undo" reverts."""
    old, new = decision.old, decision.new
    if decision.reason == "undo":
        return f"Back from {named(old)} to {named(new)}, because {_failure(failed)}.{_expected(decision, 0.0)}"
    why = _limit(old, new, window) if decision.reason == "limit" else _reason(decision)
    expected = _expected(decision, decision.evidence.get("rate", 0.0))
    return f"From {named(old)} to {named(new)}, because {why}.{_costs(decision)}{expected}"


def brought(decision: Decision) -> str:
    """Describe the effect of a decision in a few words."""
    outcome = decision.outcome
    if outcome is None:
        return "not judged yet"
    result = "kept" if outcome.kept else "undone"
    return f"measured {_rate(outcome.rate)} with a wait of {percent(outcome.wait)}, {result}"


def described(one: Decision) -> str:
    """Return a decision on one line: the change, its reason, the expectation and the effect. A decision without an
    expectation shows its text."""
    change = f"{one.new}" if one.old == one.new else f"{one.old} → {one.new}"
    if not one.predicted_rate:
        return f"{change} ({one.reason}): {one.text}"
    return f"{change} ({one.reason}): expected {expectation(one)}; {brought(one)}"


def expectation(one: Decision) -> str:
    """Return the expected rate and wait. For a larger prefetch the model predicts no gain, so the rate is a minimum."""
    least = "at least " if one.reason == "spread" else ""
    return f"{least}{_rate(one.predicted_rate)} with a wait of {percent(one.predicted_wait)}"


def _reason(decision: Decision) -> str:
    known, told = decision.evidence, _WAITS[decision.signal]
    waits = f"{told} for {percent(known.get('wait', 0.0))} of the time"
    reasons: Mapping[Reason, str] = {
        "too few": waits,
        "too many": f"fewer workers are enough: {waits}",
        "spread": f"{waits}, and more batches in flight keep the workers busy while one batch is slow",
        "explore": f"{waits} and the model knows no better setting; this trial is undone unless the rate rises",
    }
    return reasons.get(decision.reason, decision.reason)


def _failure(failed: Decision | None) -> str:
    if failed is None or failed.outcome is None:
        return "the change before did not help"
    before, after = failed.evidence.get("rate", 0.0), failed.outcome.rate
    compared = f"{_rate(after)} since the change, {_rate(before)} before" if before else f"{_rate(after)} since then"
    return f"it did not help ({compared}, {_rate(failed.predicted_rate)} were expected)"


def _limit(old: Settings, new: Settings, window: Reading) -> str:
    """Name the limit that was met."""
    remote, free = window.remote, window.memory_free
    if new.remote < old.remote:
        if remote.granted is not None and remote.granted < old.remote:
            return f"{remote.granted} of the cluster's workers are this loader's share"
        return f"the cluster has no room for {plural(old.remote - new.remote, 'remote worker')}"
    if free is not None and free < 0:
        return f"loading takes {size(-free)} more memory than the training process can spare"
    if free is not None and new.workers < old.workers:
        return f"loading may take only {size(free)} more memory than it takes now"
    return "the memory for batches allows no more" if new.workers >= old.workers else "the limits allow no more"


def _costs(decision: Decision) -> str:
    """Return a sentence with a batch's time and CPU time, and a step's time without queueing for a CPU."""
    known = decision.evidence
    if not known.get("service_s"):
        return ""
    batch = f"{duration(known['service_s'])}, {duration(known['cpu_s'])} of it CPU time"
    step = f"{duration(known['step_s'])} without a wait for a CPU"
    return f" A batch takes a worker {batch}; a training step takes {step}."


def _expected(decision: Decision, measured_rate: float) -> str:
    if not decision.predicted_rate:
        return ""
    measured = f"; measured so far: {_rate(measured_rate)}" if measured_rate else ""
    step_s = decision.evidence.get("expected_step_s")
    steps = f" and steps of {duration(step_s)}" if step_s else ""
    return f" Expected: {expectation(decision)}{steps}{measured}."


def _rate(rate: float) -> str:
    return f"{rounded(rate)} batches/s"

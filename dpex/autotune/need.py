"""What a loader tells others of its need: the other loaders on its cluster. PURE."""

from __future__ import annotations

from dpex.autotune.types import Sample

MOST_WAIT = 0.999
"""Of the loop's time: a window of a second cannot show a smaller rest."""


def remote_need(sample: Sample, wait_goal: float) -> float | None:
    """The number of remote workers, any fraction; None if the window does not tell.

    The loop takes ``rate`` batches a second and would take ``rate / (1 - w)`` if it did not wait for its share ``w`` of
    the time. What is missing would be made by workers that take as long for a batch as those there are. A loop that
    hardly waits needs what it has.
    """
    total_s = sample.wait_s + sample.own_s + sample.work_s
    if not sample.batches or total_s <= 0:
        return None
    wait = min(sample.wait_s / total_s, MOST_WAIT)
    if wait <= wait_goal:
        return float(sample.remote.requested)
    batch_s = _batch_s(sample)
    if batch_s is None:
        return None
    missing = sample.rate * wait / (1.0 - wait)
    return sample.remote.running + missing * batch_s


def made_without(sample: Sample) -> float:
    """What this machine makes, as the number of remote workers that it would take."""
    batch_s = _batch_s(sample)
    if batch_s is None or sample.seconds <= 0:
        return 0.0
    return sample.local.tickets / sample.seconds * batch_s


def _batch_s(sample: Sample) -> float | None:
    """How long a remote worker takes for a batch; what others took, where there is none; None: nobody made any."""
    made = next((pool for pool in (sample.remote, sample.local) if pool.tickets), None)
    return None if made is None else made.busy_s / made.tickets

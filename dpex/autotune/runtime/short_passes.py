"""How many local workers make a short pass the quickest, where each pass starts workers of its own. PURE."""

from __future__ import annotations

from dpex.autotune.checked import LONGEST_S
from dpex.autotune.types import Sample

_EACH = 0.3
"""What each further worker for each CPU adds to the start of a pass, over the start with none. Measured on two cores:
the first batch came after 0.09 s with one worker, 0.11 with two, 0.15 with four and 0.25 with 14."""
_FELT = 0.05
"""A start that takes a smaller part of the shortest pass is not worth a thought."""
_EQUAL = 0.02
"""Passes that take this much longer are as quick."""
MOST = 64
"""Numbers of workers that are looked at."""


def quickest(sample: Sample) -> int | None:
    """Return the fewest local workers that make a pass the quickest, by what the window measured.

    None if that is not known, or passes are so long that their start does not count.

    A pass takes its start and its batches: ``start(W) + batches / min(W / s, C / c, 1 / t)``, with W workers, s seconds
    and c CPU seconds of a worker for a batch, C CPUs, and a step of t seconds.
    """
    made, batches, cpus = sample.local, sample.pass_batches, max(1.0, sample.machine.cpus)
    if not (sample.starts_anew and batches and made.tickets and sample.batches):
        return None
    if not 0.0 < sample.start_s + made.busy_s + made.cpu_s + sample.work_s < LONGEST_S or not sample.start_s > 0.0:
        return None
    service_s = max(1e-9, made.busy_s / made.tickets)
    cpu_s = max(1e-9, made.cpu_s / made.tickets)
    step_s = max(1e-9, sample.work_s / sample.batches)
    shortest_s = batches / min(MOST / service_s, cpus / cpu_s, 1.0 / step_s)
    if sample.start_s < _FELT * shortest_s:
        return None
    bare_s = sample.start_s / (1.0 + _EACH * max(1, sample.settings.local) / cpus)

    def pass_s(workers: int) -> float:
        rate = min(workers / service_s, cpus / cpu_s, 1.0 / step_s)
        return bare_s * (1.0 + _EACH * workers / cpus) + batches / rate

    seconds = {workers: pass_s(workers) for workers in range(1, min(MOST, batches) + 1)}
    least_s = min(seconds.values())
    return min(workers for workers, each_s in seconds.items() if each_s <= (1.0 + _EQUAL) * least_s)

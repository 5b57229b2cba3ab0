"""The number of local workers that make a short pass the quickest, where each pass starts workers anew. PURE."""

from __future__ import annotations

from dpex.autotune.checked import LONGEST_S
from dpex.autotune.law.constants import CONSTANTS
from dpex.autotune.types import Sample

_EACH = 0.3
"""Part of a start without workers that each worker for each CPU adds. Measured on two cores: the first batch came after
0.09 s with one worker, 0.11 with two, 0.15 with four and 0.25 with 14. `Start` assumes more, which the simulator's
worlds need: with this figure their mean regret was 0.84 % instead of 0.49 %."""
_FELT = 0.05
"""A start that takes a smaller part of the shortest pass is left to the law."""
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
    return min(workers for workers, each_s in seconds.items() if each_s <= (1.0 + CONSTANTS.same) * least_s)

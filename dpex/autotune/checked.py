"""Turn the reports of clocks, counters and the system into a sample that can be calculated with. PURE.

A legal sample (`dpex.autotune.types`) may hold nearly any number. This module decides once which of them are
measurements. Behind it no number is negative, infinite, or larger than a machine allows.

1. A window whose own times are no times is left out, and so is one in which all stood still. Times that add up to far
   more than the window become shares of it.

2. A pool whose times are no times has no tickets in that window. Its number of workers is still known.

3. No pool computes for longer than all CPUs of its machine could.

4. A missing or impossible number of the machine becomes the value for "unknown".

5. Time never goes back. Where the clock does, the window's own length is taken to have passed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from dpex.autotune.types import Sample, Settings
from dpex.measure.samples import MachineSample, PoolSample

LONGEST_S, SHORTEST_S = 1e6, 1e-9
"""Eleven days: a sum of times in one window beyond it comes from a clock that jumped. Clocks count nanoseconds."""
STOPPED_S, STOPPED = 30.0, 10.0
"""Seconds, and times the window before, from which a window was no wait for a batch: no thread read the clock
meanwhile."""
MOST_TIMES = 2.0
"""A call that began before the window adds its rest; times that add up to more are wrong."""
TICK_S = 0.01
"""The tick of the coarsest clock of CPU time."""
MOST_TICKETS, MOST_WORKERS, MOST_CPUS, MOST_BYTES = 10**9, 10**5, 1e5, 2**60
"""More than any window, cluster, or machine has; a larger size is no size."""
LEAST_CPUS = 0.01
"""The smallest share that a container is given."""


class SampleChecker:
    """Checks the samples of one run, in their order."""

    def __init__(self) -> None:
        self._cpus = 1.0
        self._at = self._offset = self._seconds = 0.0

    def check(self, sample: Sample) -> Sample | None:
        """Return a sample to calculate with; None if the window measured nothing."""
        times = (sample.seconds, sample.wait_s, sample.own_s, sample.work_s)
        if not all(_is_time(value) for value in times) or sample.seconds < SHORTEST_S or self._stood_still(sample):
            return None
        wait_s, own_s, work_s = _parts(sample)
        machine = self._machine(sample.machine)
        return replace(
            sample,
            at=self._passed(sample),
            settings=_settings(sample.settings),
            batches=_count(sample.batches, MOST_TICKETS),
            wait_s=wait_s,
            own_s=own_s,
            work_s=work_s,
            head_s=min(wait_s, _time(sample.head_s)),
            ready=_count(sample.ready, MOST_TICKETS),
            in_flight=_count(sample.in_flight, MOST_TICKETS),
            batch_bytes=_bytes(sample.batch_bytes),
            pass_batches=_count(sample.pass_batches, MOST_TICKETS),
            start_s=_time(sample.start_s),
            local=_pool(sample.local, machine.cpus),
            remote=_pool(sample.remote, MOST_CPUS),
            machine=machine,
            **_gpu(sample),
        )

    def _stood_still(self, sample: Sample) -> bool:
        """Return True if the process, or the whole machine, was stopped in the window."""
        usual_s, self._seconds = self._seconds, sample.seconds
        return sample.seconds > max(STOPPED_S, STOPPED * usual_s)

    def _passed(self, sample: Sample) -> float:
        """When the window ended, on a clock that only goes forward."""
        at = sample.at + self._offset
        if not self._at <= at <= self._at + LONGEST_S:
            at = self._at + sample.seconds
            self._offset = at - sample.at if math.isfinite(sample.at) else self._offset
        self._at = at
        return at

    def _machine(self, machine: MachineSample) -> MachineSample:
        if math.isfinite(machine.cpus) and machine.cpus > 0:
            self._cpus = min(max(machine.cpus, LEAST_CPUS), MOST_CPUS)
        budget = machine.batch_budget
        return replace(
            machine,
            cpus=self._cpus,
            others=_known(machine.others, MOST_CPUS) or 0.0,
            trainer_cpu_s=_time(machine.trainer_cpu_s),
            trainer_queued_s=_known(machine.trainer_queued_s, LONGEST_S),
            memory_free=_free(machine.memory_free),
            batch_budget=None if budget is None else _count(budget, MOST_BYTES),
            worker_bytes=_bytes(machine.worker_bytes),
            runnable=_known(machine.runnable, MOST_CPUS),
        )


def _parts(sample: Sample) -> tuple[float, float, float]:
    """Waiting, own time and steps of the training loop, in seconds that the window can hold."""
    parts = (_time(sample.wait_s), _time(sample.own_s), _time(sample.work_s))
    factor = sample.seconds / sum(parts) if sum(parts) > MOST_TIMES * sample.seconds else 1.0
    return parts[0] * factor, parts[1] * factor, parts[2] * factor


def _gpu(sample: Sample) -> dict[str, Any]:
    """The readings of the GPU."""
    steps = _count(sample.gpu_steps, MOST_TICKETS) if _is_time(sample.gpu_step_s) else 0
    stall_s = sample.gpu_stall_s
    return {
        "gpu_busy": _known(sample.gpu_busy, 1.0),
        "gpu_stall_s": stall_s if stall_s is not None and _is_time(stall_s) else None,
        "gpu_steps": steps,
        "gpu_step_s": _time(sample.gpu_step_s) if steps else 0.0,
        "feed_wait_s": _time(sample.feed_wait_s),
    }


def _is_time(value: float) -> bool:
    return 0.0 <= value <= LONGEST_S


def _time(value: float) -> float:
    """Return the seconds, 0 for an impossible number."""
    return value if _is_time(value) and value >= SHORTEST_S else 0.0


def _known(value: float | None, most: float) -> float | None:
    """Return a number from 0 to ``most``, None for an impossible one."""
    if value is None or not math.isfinite(value) or value < 0:
        return None
    return min(value, most) if value >= SHORTEST_S else 0.0


def _count(value: float, most: int) -> int:
    """A whole number from 0 to ``most``."""
    if not value > 0:
        return 0
    return most if value >= most else int(value)


def _bytes(value: float) -> float:
    """A size of at least a byte, 0 where it is unknown."""
    return min(value, float(MOST_BYTES)) if math.isfinite(value) and value >= 1.0 else 0.0


def _free(value: float | None) -> int | None:
    if value is None or not math.isfinite(value):
        return None
    return int(max(-MOST_BYTES, min(value, MOST_BYTES)))


def _settings(settings: Settings) -> Settings:
    return Settings(
        local=_count(settings.local, MOST_WORKERS),
        remote=_count(settings.remote, MOST_WORKERS),
        prefetch=max(1, _count(settings.prefetch, MOST_TICKETS)),
    )


def _pool(pool: PoolSample, cpus: float) -> PoolSample:
    """Return the measurements of a pool on a machine with ``cpus`` CPUs."""
    stages = (pool.load_s, pool.collate_s, pool.encode_s, pool.cpu_s)
    counts = {name: getattr(pool, name) for name in ("requested", "running", "unplaced", "room", "granted")}
    counts = {name: None if count is None else _count(count, MOST_WORKERS) for name, count in counts.items()}
    known = replace(pool, **counts)
    if not all(_is_time(value) for value in stages):
        return replace(
            known, tickets=0, load_s=0.0, collate_s=0.0, encode_s=0.0, cpu_s=0.0, queued_s=None, services_s=()
        )
    timed = replace(known, load_s=_time(pool.load_s), collate_s=_time(pool.collate_s), encode_s=_time(pool.encode_s))
    return replace(
        timed,
        tickets=_count(pool.tickets, MOST_TICKETS),
        cpu_s=min(_time(pool.cpu_s), MOST_TIMES * max(1.0, cpus) * max(timed.busy_s, TICK_S)),
        queued_s=_known(pool.queued_s, LONGEST_S),
        services_s=tuple(value for value in pool.services_s if SHORTEST_S <= value <= LONGEST_S),
    )

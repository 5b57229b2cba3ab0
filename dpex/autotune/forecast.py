"""From what one thread took per batch to what workers would make of it, by the tuner's own model. PURE.

Not in it: the network between here and remote workers, and that some machines' memory is slower with all CPUs at work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.limits import bounds
from dpex.autotune.model import Estimate
from dpex.autotune.planner import Bounds, best, expect
from dpex.autotune.types import Sample, Settings
from dpex.measure.samples import MachineSample

SUFFICES = 0.03
"""A share of time lost to loading that is as good as none: predictions are not finer."""
HANDLING_S = 1e-4
"""CPU of the training process for a batch that comes from a worker; it was seen to be 0.02 to 0.2 ms."""
PREFETCH_PER_WORKER = 4
"""Batches in flight for each worker, so that none of them waits for the training loop."""
_MOST_REMOTE = 4096
""""Any number" of remote workers: the forecast says how many would be enough."""
_AT_ONCE = 1e-6
"""Seconds of a step that never waits, so that the workers alone set the rate."""


@dataclass(frozen=True, kw_only=True)
class MeasuredWork:
    """Seconds per batch in one thread. here_s: making it, without encoding it for another process.

    cpu_s, wait_s: CPU and waiting, encoding included. at_once: CPUs that it keeps busy at the same time while it
    computes. spread: single batches over their mean.
    cpus: that may be used, and that nobody else uses.
    """

    here_s: float
    cpu_s: float
    wait_s: float
    batch_bytes: float
    spread: tuple[float, ...] = (1.0,)
    cpus: float = 1.0
    at_once: float = 1.0

    @property
    def waiting(self) -> float:
        """Share of a worker's time that is not CPU, 0 to 1."""
        return self.wait_s / max(1e-12, self.cpu_s + self.wait_s)


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Batches per second that so many local workers make, if nobody holds them up."""

    workers: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class WorkersNeeded:
    """What a training step of ``step_s`` asks for. here: the best settings on this machine; 0 workers: in-process.

    rate: batches per second then, wait: share of time lost to loading, 0 to 1. anywhere: the best settings if there
    are CPUs like these elsewhere, of which the remote workers keep remote_cpus busy; the same as ``here`` if that
    suffices.
    """

    step_s: float
    here: Settings
    rate: float
    wait: float
    suffices: bool
    anywhere: Settings
    anywhere_wait: float
    remote_cpus: float


def rates(work: MeasuredWork) -> tuple[Rate, ...]:
    """For 0, 1, 2, 4, ... workers, up to what this machine would be given."""
    estimate = _estimate(work, _AT_ONCE, trainer_cpu=False)
    return tuple(Rate(workers=count, rate=_rate(estimate, count)) for count in _counts(_bounds(work).local))


def fastest(work: MeasuredWork) -> tuple[Settings, float]:
    """The cheapest settings here that are as fast as any, and their batches per second."""
    plan = best(_estimate(work, _AT_ONCE, trainer_cpu=False), _bounds(work), AutotuneConfig())
    return plan.settings, plan.rate


def need(work: MeasuredWork, step_s: float) -> WorkersNeeded:
    """For a step of that many seconds, whose process keeps a CPU busy all along."""
    estimate, found, config = _estimate(work, step_s, trainer_cpu=True), _bounds(work), AutotuneConfig()
    here = best(estimate, found, config)
    suffices = here.wait <= SUFFICES
    anywhere = here if suffices else best(estimate, replace(found, remote=_MOST_REMOTE), config)
    return WorkersNeeded(
        step_s=step_s,
        here=here.settings,
        rate=here.rate,
        wait=here.wait,
        suffices=suffices,
        anywhere=anywhere.settings,
        anywhere_wait=anywhere.wait,
        remote_cpus=anywhere.settings.remote * (1.0 - work.waiting),
    )


def _estimate(work: MeasuredWork, step_s: float, *, trainer_cpu: bool) -> Estimate:
    return Estimate(
        step_s=step_s,
        step_cpu_s=step_s if trainer_cpu else 0.0,
        own_s=HANDLING_S,
        here_s=work.here_s,
        cpu_s=work.cpu_s,
        wait_s=work.wait_s,
        far_s=work.cpu_s + work.wait_s,
        spread=work.spread,
        cpus=work.cpus,
        at_once=work.at_once,
    )


def _bounds(work: MeasuredWork) -> Bounds:
    """As the tuner has them on this machine."""
    machine = MachineSample(cpus=work.cpus)
    sample = Sample(at=0.0, seconds=1.0, settings=Settings(), machine=machine)
    return bounds(AutotuneConfig(), sample, work.batch_bytes, work.waiting)


def _rate(estimate: Estimate, workers: int) -> float:
    return expect(estimate, Settings(local=workers, prefetch=max(1, PREFETCH_PER_WORKER * workers))).rate


def _counts(most: int) -> Iterator[int]:
    yield 0
    for power in range(int(math.log2(max(1, most))) + 1):
        yield 1 << power
    if most & (most - 1):
        yield most

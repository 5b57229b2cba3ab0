"""From what one thread took per batch to what workers would make of it, by the model of the law. PURE.

Not in it: the network between here and remote workers, and that some machines' memory is slower with all CPUs at work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.law.model import Model, Place
from dpex.autotune.law.walls import Walls
from dpex.autotune.types import Settings

SUFFICES = 0.03
"""A share of time lost to loading that is as good as none: predictions are not finer."""
PREFETCH_PER_WORKER = 4
"""Batches in flight for each worker, so that none of them waits for the training loop."""
_MOST_REMOTE = 4096
""""Any number" of remote workers: the forecast says how many would be enough."""
_AT_ONCE = 1e-6
"""Seconds of a step that never waits, so that the workers alone set the rate."""
_AS_FAST = 0.98
"""Part of the highest rate from which fewer workers are as fast."""


@dataclass(frozen=True, kw_only=True)
class MeasuredWork:
    """Seconds per batch in one thread. here_s: making it, without encoding it for another process.

    cpu_s, wait_s: CPU and waiting, encoding included. at_once: CPUs that it keeps busy at the same time while it
    computes. spread: single batches over their mean. cpus: that may be used, and that no other program uses.
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
    """Batches per second that ``workers`` local workers make, if nothing holds them up; 0: in this process."""

    workers: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class WorkersNeeded:
    """What a training step of ``step_s`` asks for. here: the best settings on this machine.

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
    """For 0, 1, 2, 4, ... workers, up to what keeps this machine's CPUs busy."""
    model = _model(work, _AT_ONCE, step_cpu_s=0.0)
    here = Rate(workers=0, rate=1.0 / max(1e-12, work.here_s))
    return here, *(Rate(workers=count, rate=_rate(model, count)) for count in _counts(_most(model)))


def fastest(work: MeasuredWork) -> tuple[Settings, float]:
    """The fewest local workers that are as fast as any number, and their batches per second."""
    model = _model(work, _AT_ONCE, step_cpu_s=0.0)
    found = {count: _rate(model, count) for count in range(1, _most(model) + 1)}
    count = min(count for count, rate in found.items() if rate >= _AS_FAST * max(found.values()))
    return _settings(count), found[count]


def need(work: MeasuredWork, step_s: float) -> WorkersNeeded:
    """For a step of that many seconds, whose process keeps a CPU busy all along."""
    model = _model(work, step_s, step_cpu_s=step_s)
    headroom = AutotuneConfig().headroom
    here = _settings(*model.best(headroom))
    wait = model.wait(here).value
    suffices = wait <= SUFFICES
    wider = model.with_remote(_MOST_REMOTE)
    anywhere = here if suffices else _settings(*wider.best(headroom))
    return WorkersNeeded(
        step_s=step_s,
        here=here,
        rate=model.rate(here).value,
        wait=wait,
        suffices=suffices,
        anywhere=anywhere,
        anywhere_wait=wider.wait(anywhere).value,
        remote_cpus=anywhere.remote * (1.0 - work.waiting),
    )


def _model(work: MeasuredWork, step_s: float, *, step_cpu_s: float) -> Model:
    place = Place(service_s=work.cpu_s / work.at_once + work.wait_s, cpu_s=work.cpu_s)
    return Model(
        now=_settings(1),
        local=place,
        remote=place,
        step_s=step_s,
        step_cpu_s=step_cpu_s,
        cpus=work.cpus,
        others=0.0,
        walls=Walls(local=AutotuneConfig().max_waiting, remote=0, batch_bytes=work.batch_bytes),
    )


def _settings(local: int, remote: int = 0) -> Settings:
    return Settings(local=local, remote=remote, prefetch=PREFETCH_PER_WORKER * max(1, local + remote))


def _most(model: Model) -> int:
    return max(1, min(model.walls.local, model.filling()))


def _rate(model: Model, workers: int) -> float:
    return model.rate(_settings(workers)).value


def _counts(most: int) -> Iterator[int]:
    for power in range(int(math.log2(most)) + 1):
        yield 1 << power
    if most & (most - 1):
        yield most

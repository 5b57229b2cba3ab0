"""Turns windows of measurements into an estimate of the work, and notices when the work has changed."""

from __future__ import annotations

import math
from collections import deque

from dpex.autotune.model import Estimate
from dpex.autotune.types import LaneSample, Sample

_KEEP = 6
_SPREAD_KEPT = 192
_SATURATED = 0.8
_CHANGED = 1.35
_AGREE = 2
_TICKETS = 4
_CROWDED = 1.08


class Average:
    """A mean that forgets: it is about that of the latest ``memory`` things."""

    def __init__(self, memory: float = 300.0) -> None:
        self.value = math.nan
        self._memory = memory
        self._weight = 0.0

    def add(self, total: float, count: float) -> None:
        """Take in ``count`` things that are ``total`` together."""
        if count <= 0:
            return
        kept = self._weight
        self.value = (total + (self.value * kept if kept else 0.0)) / (kept + count)
        self._weight = min(kept + count, self._memory)

    def clear(self) -> None:
        """Know nothing any more."""
        self.value, self._weight = math.nan, 0.0

    def get(self, otherwise: float) -> float:
        """The mean, or something else while there is none."""
        return otherwise if math.isnan(self.value) else self.value


class Windows:
    """What is known of the work, from the windows since it last changed."""

    def __init__(self) -> None:
        self._step, self._step_cpu, self._own = Average(), Average(), Average()
        self._here, self._cpu, self._wait, self._far, self._far_cpu = (Average() for _ in range(5))
        self._others = Average(3.0)
        self._spread: deque[float] = deque(maxlen=_SPREAD_KEPT)
        self._drift = 0
        self._least_cpu = math.inf
        self.batch_bytes = 0.0
        self.tickets = 0

    def add(self, sample: Sample) -> bool:
        """Take a window in; True if it shows, after some that agree, that the work has changed."""
        changed = self._has_changed(sample)
        if changed:
            self.forget()
        if sample.batch_bytes:
            self.batch_bytes = sample.batch_bytes
        self._others.add(sample.host.others, 1)
        self._consumer(sample)
        for lane in (sample.made_here, sample.local, sample.remote):
            if lane.tickets and lane.services_s:
                usual = self._usual(lane, sample)
                if usual > 0:
                    self._spread.extend(service / usual for service in lane.services_s)
        self._lanes(sample)
        self.tickets += sample.made_here.tickets + sample.local.tickets + sample.remote.tickets
        return changed

    def forget(self) -> None:
        """The work is another now."""
        for average in (self._step, self._step_cpu, self._own, self._here, self._cpu, self._wait, self._far):
            average.clear()
        self._far_cpu.clear()
        self._spread.clear()
        self._least_cpu = math.inf
        self._drift = 0
        self.tickets = 0

    @property
    def is_crowded(self) -> bool:
        """A batch takes clearly more CPU than it once did, as where workers are in each other's way."""
        return self._cpu.get(0.0) > _CROWDED * self._least_cpu

    @property
    def known(self) -> bool:
        """Whether there is enough to decide on."""
        return self.tickets >= _TICKETS and not math.isnan(self._step.value)

    def estimate(self, cpus: float, ceiling: float, far_ceiling: float) -> Estimate:
        """What a batch costs, as far as it is known."""
        cpu = self._cpu.get(self._far_cpu.get(self._here.get(0.01)))
        wait = self._wait.get(0.0)
        here = self._here.get(cpu + wait)
        return Estimate(
            step_s=self._step.get(0.0),
            step_cpu_s=self._step_cpu.get(0.0),
            own_s=self._own.get(0.0002),
            here_s=here,
            cpu_s=cpu,
            wait_s=wait,
            far_s=self._far.get(cpu + wait),
            spread=tuple(self._spread) or (1.0,),
            cpus=max(0.5, cpus - self._others.get(0.0)),
            ceiling=ceiling,
            far_ceiling=far_ceiling,
        )

    # -- taking in -----------------------------------------------------------------------------------------------

    @staticmethod
    def _is_saturated(sample: Sample) -> bool:
        used = sample.local.cpu_s + sample.host.trainer_cpu_s
        return used / max(1e-9, sample.seconds) + sample.host.others >= _SATURATED * sample.host.cpus

    def _consumer(self, sample: Sample) -> None:
        if not sample.batches:
            return
        made_here = sample.made_here.tickets
        own_cpu = sample.own_s + (sample.made_here.cpu_s if made_here else 0.0)
        if made_here:
            self._here.add(sample.made_here.busy_s, made_here)
        else:
            self._own.add(sample.own_s, sample.batches)
        step_cpu = min(max(0.0, sample.host.trainer_cpu_s - own_cpu), sample.work_s)
        self._step_cpu.add(step_cpu, sample.batches)
        queueing = 0.0
        if self._is_saturated(sample):
            crowding = max(0.0, (self._at_it(sample.local) + 1.0 + sample.host.others) / sample.host.cpus - 1.0)
            queueing = min(step_cpu * crowding, sample.work_s - step_cpu)
        self._step.add(sample.work_s - queueing, sample.batches)

    def _lanes(self, sample: Sample) -> None:
        local, remote = sample.local, sample.remote
        if local.tickets:
            self._cpu.add(local.cpu_s, local.tickets)
            if local.tickets >= 2 * _TICKETS:
                self._least_cpu = min(self._least_cpu, local.cpu_s / local.tickets)
            if not self._is_saturated(sample) or math.isnan(self._wait.value):
                self._wait.add(self._waiting(sample, local), local.tickets)
        if sample.made_here.tickets and not local.tickets:
            self._cpu.add(sample.made_here.cpu_s, sample.made_here.tickets)
            waiting = sample.made_here.busy_s - sample.made_here.cpu_s
            self._wait.add(max(0.0, waiting), sample.made_here.tickets)
        if remote.tickets:
            self._far.add(remote.busy_s, remote.tickets)
            self._far_cpu.add(remote.cpu_s, remote.tickets)

    def _waiting(self, sample: Sample, local: LaneSample) -> float:
        """Waiting of local workers for anything but a CPU, in all: on a full machine some of it was for a CPU."""
        apart = max(0.0, local.busy_s - local.cpu_s)
        if not self._is_saturated(sample):
            return apart
        return max(0.0, apart - local.cpu_s * self._crowding(sample, local))

    def _crowding(self, sample: Sample, local: LaneSample) -> float:
        """By how much more than itself CPU work takes on a full machine: everybody who is there gets an equal part."""
        crowd = self._at_it(local) + sample.host.trainer_cpu_s / max(1e-9, sample.seconds) + sample.host.others
        return max(0.0, crowd / max(1e-9, sample.host.cpus) - 1.0)

    def _at_it(self, local: LaneSample) -> float:
        """How many local workers have or want a CPU, on average; the others wait for something else."""
        if not local.tickets or local.busy_s <= 0:
            return 0.0
        waiting = self._wait.get(0.0) * local.tickets
        return local.running * min(1.0, max(local.cpu_s, local.busy_s - waiting) / local.busy_s)

    def variation(self) -> float:
        """Standard deviation of service times over their mean."""
        if len(self._spread) < 2:
            return 1.0
        mean = sum(self._spread) / len(self._spread)
        return math.sqrt(sum((factor - mean) ** 2 for factor in self._spread) / len(self._spread)) / max(1e-9, mean)

    def _usual(self, lane: LaneSample, sample: Sample) -> float:
        """Mean service time of the lane, over more than this window where there was more."""
        known = self._far.value if lane is sample.remote else self._cpu.value + self._wait.value
        here = lane.busy_s / lane.tickets
        return here if math.isnan(known) or self._is_saturated(sample) else 0.5 * (here + known)

    # -- change --------------------------------------------------------------------------------------------------

    def _has_changed(self, sample: Sample) -> bool:
        seen: list[tuple[float, int, float]] = []
        local, remote, here = sample.local, sample.remote, sample.made_here
        if local.tickets >= _TICKETS:
            seen.append((local.cpu_s / local.tickets, local.tickets, self._cpu.value))
            if not self._is_saturated(sample):
                seen.append((self._waiting(sample, local) / local.tickets, local.tickets, self._wait.value))
        if remote.tickets >= _TICKETS:
            seen.append((remote.busy_s / remote.tickets, remote.tickets, self._far.value))
        if here.tickets >= _TICKETS:
            seen.append((here.busy_s / here.tickets, here.tickets, self._here.value))
        if sample.batches >= _TICKETS and not self._is_saturated(sample):
            seen.append((sample.work_s / sample.batches, sample.batches, self._step.value))
        whole = max((known for _, _, known in seen if not math.isnan(known)), default=0.0)
        off = False
        for now, count, known in seen:
            if known > 0.1 * whole > 0:
                noise = 1.0 + 3.0 * self.variation() / math.sqrt(count)
                limit = max(_CHANGED, noise)
                off = off or now > limit * known or now < known / limit
        self._drift = self._drift + 1 if off else 0
        return self._drift >= _AGREE

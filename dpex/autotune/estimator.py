"""Turns windows of measurements into an estimate of the work, and notices when the work has changed.

Where the kernel tells how long somebody could have run and had no CPU, that is taken off: what is left is the work as
it is on an idle machine. Where it does not, a full machine is reckoned with.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

from dpex.autotune import wording
from dpex.autotune.correlation import Correlation, variance_of_mean
from dpex.autotune.model import Estimate
from dpex.autotune.noise import Level
from dpex.autotune.types import Sample
from dpex.measure.samples import LaneSample

_SPREAD_KEPT = 512
_SPREAD_KNOWN = 32
_SATURATED = 0.8
_TICKETS = 4
_CROWDED = 1.1
_CROWDED_ERROR = 0.025
_ERROR_BEFORE = 0.04
_IDLE = 0.85
_OTHERS_KEPT = 4
_MATTERS = 0.2
_STEP_MATTERS = 0.05
_TRAVELS_KEPT = 3
_UNCERTAIN = 0.25
_SEVERAL = 1.2
"""CPU time of so many times the wall time shows that a batch keeps several CPUs busy; less may be the clocks' error."""
_MOST_SPREAD = 1000.0
"""How many times longer than usual a batch takes at most: what is beyond that would hide all others from the mean."""
_LEAST_DEARER = 0.02
"""Less is covered by `AutotuneConfig.headroom`."""
_MOST_DEARER = 0.5
"""A larger error says that nothing is known yet, and is no figure to plan by."""
_MANY_MORE, _HARDLY = 1.5, 0.1
"""With so many times the workers, or so few, waiting may be another: it may be queueing for a storage. What was known
of it counts as this part of a window then, so that the difference is not taken for a change of the work."""
_RESIZED_WINDOWS = 2
"""Windows after a change of the number of workers whose batches say nothing of the spread."""
_MOVED_WINDOWS = 2
"""Windows that were of the new level already when it was noticed."""
HERE_S = 8e-6
"""What a batch costs more in the training process than what a worker says: random states are set and put back."""


class Windows:
    """What is known of the work, from the windows since it last changed.

    correlation: over how many batches service times stay alike; see `dpex.autotune.correlation`.
    """

    def __init__(self) -> None:
        self._step, self._step_cpu, self._own = Level(), Level(), Level()
        self._here, self._cpu, self._wait, self._far, self._far_cpu = (Level() for _ in range(5))
        self._encode, self._at_once = Level(), Level()
        self._travel = math.inf
        self._travels: deque[float] = deque(maxlen=_TRAVELS_KEPT)
        self._away = 0.0
        self._step_spread = Level()
        self._others: deque[float] = deque(maxlen=_OTHERS_KEPT)
        self._spread: deque[float] = deque(maxlen=_SPREAD_KEPT)
        self._scatter = Correlation()
        self.correlation = 0.0
        self._running = (-1, -1)
        self._since_resized = 0
        self._carried = [0.0, 0.0]
        self._least_cpu = math.inf
        self.batch_bytes = 0.0
        self.stepping_s = 0.0
        self.tickets = 0

    def add(self, sample: Sample) -> tuple[str, ...]:
        """Take a window in; what of the work has changed by it, in words, if anything."""
        sample = _whole(sample)
        self._notice_workers(sample)
        changed = self._changes(sample)
        if sample.batch_bytes:
            self.batch_bytes = sample.batch_bytes
        self._others.append(sample.host.others * self._slowdown(sample))
        self._consumer(sample)
        self._lanes(sample)
        self._services(sample)
        self.correlation = self._scatter.length(self.variation())
        self.tickets += sample.made_here.tickets + sample.local.tickets + sample.remote.tickets
        return changed

    @property
    def known(self) -> bool:
        """Whether there is enough to decide on."""
        return self.tickets >= _TICKETS and self._step.known

    @property
    def is_crowded(self) -> bool:
        """A batch takes clearly more CPU than it once did, as where workers are in each other's way."""
        return self._cpu.get(0.0) > _CROWDED * self._least_cpu

    @property
    def step_s(self) -> float:
        """The consumer between two calls, 0 if unknown."""
        return self._step.get(0.0)

    @property
    def _threads(self) -> float:
        """CPUs that a batch keeps busy at once, on average over its computing; 1 unless it clearly is more."""
        at_once = self._at_once.get(1.0)
        return at_once if at_once > _SEVERAL else 1.0

    @property
    def _wait_s(self) -> float:
        """Waiting of a batch; measured, it may be a little less than nothing."""
        return max(0.0, self._wait.get(0.0))

    def estimate(self, cpus: float, ceiling: float, far_ceiling: float) -> Estimate:
        """What a batch costs, as far as it is known."""
        cpu = self._cpu.get(self._far_cpu.get(self._here.get(0.01)))
        wait = self._wait_s
        at_once = self._threads
        computing = max(0.0, cpu - self._encode.get(0.0)) / min(at_once, max(1.0, cpus))
        here = self._here.get(computing + wait + HERE_S)
        return Estimate(
            step_s=self._step.get(0.0),
            step_cpu_s=self._step_cpu.get(0.0),
            own_s=self._own.get(0.0002),
            here_s=here,
            cpu_s=cpu,
            wait_s=wait,
            far_s=self._far.get(cpu + wait),
            travel_s=self._travel if math.isfinite(self._travel) else 0.0,
            spread=tuple(self._spread) or (1.0,),
            step_spread=self._step_spread.get(0.0),
            correlation=self.correlation,
            cpus=max(0.5, cpus),
            others=sum(self._others) / len(self._others) if self._others else 0.0,
            ceiling=ceiling,
            far_ceiling=far_ceiling,
            at_once=at_once,
        )

    def slowest_s(self) -> float:
        """The longest that a batch took, of those remembered."""
        usual = max(self._far.get(0.0), self._cpu.get(0.0) + self._wait_s)
        return usual * max(self._spread, default=1.0)

    def variation(self) -> float:
        """Standard deviation of service times over their mean."""
        if len(self._spread) < 2:
            return 1.0
        mean = sum(self._spread) / len(self._spread)
        return math.sqrt(sum((factor - mean) ** 2 for factor in self._spread) / len(self._spread)) / max(1e-9, mean)

    def dearer(self, work: Estimate) -> Estimate:
        """The estimate with costs higher by their standard error, and as correlated as cannot be ruled out: what fewer
        workers must be enough for."""
        length = self._scatter.cautious_length(self.correlation)
        known_by = max(1.0, self._far.weight if self._far.known and not self._cpu.known else self._cpu.weight)
        error = self._error_of_mean(known_by, length)
        factor = 1.0 + min(_MOST_DEARER, error) if error > _LEAST_DEARER else 1.0
        return replace(
            work,
            cpu_s=work.cpu_s * factor,
            wait_s=work.wait_s * factor,
            far_s=work.far_s * factor,
            here_s=work.here_s * factor,
            correlation=length,
        )

    def uncertainty(self, batches: float) -> float:
        """Standard error of the mean cost of so many batches, over the cost."""
        return self._error_of_mean(max(1.0, batches), self.correlation)

    def _error_of_mean(self, batches: float, length: float) -> float:
        return self.variation() * math.sqrt(variance_of_mean(batches, length))

    # -- what a window says ------------------------------------------------------------------------------------------

    @staticmethod
    def is_saturated(sample: Sample) -> bool:
        """Whether the CPUs that this process may use were mostly in use."""
        used = sample.local.cpu_s + sample.host.trainer_cpu_s
        return used / max(1e-9, sample.seconds) + sample.host.others >= _SATURATED * sample.host.cpus

    def _slowdown(self, sample: Sample) -> float:
        """How many times longer than itself CPU work took: who wants a CPU gets an equal part of them."""
        local, host = sample.local, sample.host
        used = local.cpu_s + host.trainer_cpu_s
        if local.queued_s is not None or host.trainer_queued_s is not None:
            queued = (local.queued_s or 0.0) + (host.trainer_queued_s or 0.0)
            return 1.0 + queued / used if used > 0 else 1.0
        if not self.is_saturated(sample):
            return 1.0
        crowd = self._at_it(local) + host.trainer_cpu_s / max(1e-9, sample.seconds) + host.others
        crowd = max(crowd, host.runnable or 0.0)  # others may want more CPUs than they get
        return max(1.0, crowd / max(1e-9, host.cpus))

    def _at_it(self, local: LaneSample) -> float:
        """How many CPUs local workers have or want, on average; who else there is waits for something else."""
        if not local.tickets or local.busy_s <= 0:
            return 0.0
        waiting = self._wait_s * local.tickets
        return local.running * max(local.cpu_s, local.busy_s - waiting) / local.busy_s

    def _waiting(self, sample: Sample, local: LaneSample) -> float:
        """Waiting of local workers for anything but a CPU, in all.

        What was queued is uncertain by a part of itself. Where it is more than there is, waiting is below 0, as much as
        it is above 0 elsewhere: else noise would add up to waiting on a full machine. Several threads of a batch queue
        beside each other, which says nothing: hence a bound.
        """
        apart = max(0.0, local.busy_s - local.cpu_s)
        queued = local.queued_s
        if queued is None:
            queued = local.cpu_s * (self._slowdown(sample) - 1.0)
        return max(-_UNCERTAIN * apart, apart - queued)

    @staticmethod
    def _queued_here(sample: Sample) -> float:
        """Queueing for a CPU while the training process made batches."""
        if sample.made_here.queued_s is not None:
            return sample.made_here.queued_s
        inside = sample.work_s + sample.own_s
        return (sample.host.trainer_queued_s or 0.0) * sample.own_s / inside if inside > 0 else 0.0

    def _knows_waiting(self, sample: Sample) -> bool:
        return sample.local.queued_s is not None or not self.is_saturated(sample)

    def _stepping(self, sample: Sample) -> float:
        """Seconds of steps in the window, as they would be with a CPU always free."""
        queued = sample.host.trainer_queued_s
        inside = sample.work_s + sample.own_s
        here = sample.made_here
        if queued is not None and here.tickets and here.queued_s is not None:
            return max(0.0, sample.work_s - max(0.0, queued - here.queued_s))
        if queued is not None:
            return max(0.0, sample.work_s - queued * sample.work_s / inside) if inside > 0 else 0.0
        if not self.is_saturated(sample):
            return sample.work_s
        crowding = max(0.0, (self._at_it(sample.local) + 1.0 + sample.host.others) / sample.host.cpus - 1.0)
        cpu_s = self._step_cpu_s(sample)
        return sample.work_s - min(cpu_s * crowding, sample.work_s - cpu_s)

    @staticmethod
    def _step_cpu_s(sample: Sample) -> float:
        own_cpu = sample.made_here.cpu_s if sample.made_here.tickets else sample.own_s
        return min(max(0.0, sample.host.trainer_cpu_s - own_cpu), sample.work_s)

    # -- taking in -----------------------------------------------------------------------------------------------

    def _notice_workers(self, sample: Sample) -> None:
        """With another number of workers each may cost something else (caches), and that is no change of the work."""
        running = (sample.local.running, sample.remote.running)
        if running != self._running:
            self._travels.clear()
            if self._cpu.weight >= _TICKETS and self._cpu.weight >= (self.variation() / _ERROR_BEFORE) ** 2:
                self._least_cpu = min(self._least_cpu, self._cpu.value)
            before, after = max(1, sum(self._running)), max(1, sum(running))
            many = max(before, after) > _MANY_MORE * min(before, after)
            self._running = running
            for level in (self._cpu, self._far, self._step, self._at_once):
                level.loosen()
            self._wait.loosen(_HARDLY if many else 1.0)
            self._since_resized = 0

    def _consumer(self, sample: Sample) -> None:
        self.stepping_s = self._stepping(sample)
        self._carried[0] += self.stepping_s
        self._carried[1] += self._step_cpu_s(sample)
        if not sample.batches:
            return  # steps longer than the window
        if sample.made_here.tickets:
            here_s = max(0.0, sample.made_here.busy_s - self._queued_here(sample))
            self._here.add(here_s, sample.made_here.tickets)
        elif sample.local.tickets or sample.remote.tickets:
            self._own.add(sample.own_s, sample.batches)
        self._step.add(self._carried[0], sample.batches)
        self._step_cpu.add(self._carried[1], sample.batches)
        if sample.step_spread is not None:
            self._step_spread.add(sample.step_spread * sample.batches, sample.batches)
        self._carried = [0.0, 0.0]

    def _lanes(self, sample: Sample) -> None:
        local, remote, here = sample.local, sample.remote, sample.made_here
        spread = self.variation()
        self._learn_scatter(sample)
        if local.tickets:
            self._cpu.add(local.cpu_s, local.tickets, spread)
            self._encode.add(local.encode_s, local.tickets, spread)
            if local.tickets >= max(_TICKETS, (spread / _CROWDED_ERROR) ** 2):
                self._least_cpu = min(self._least_cpu, local.cpu_s / local.tickets)
            if self._knows_waiting(sample) or not self._wait.known:
                self._wait.add(self._waiting(sample, local), local.tickets, spread)
            self._learn_threads(sample, local, local.cpu_s * (self._slowdown(sample) - 1.0))
        if here.tickets and not local.tickets:
            self._cpu.add(here.cpu_s, here.tickets, spread)
            queued = self._queued_here(sample)
            self._wait.add(max(0.0, here.busy_s - here.cpu_s - queued), here.tickets, spread)
            self._learn_threads(sample, here, queued)
        if remote.tickets:
            self._far.add(remote.busy_s, remote.tickets, spread)
            self._far_cpu.add(remote.cpu_s, remote.tickets, spread)
        self._travelling(sample)

    def _learn_scatter(self, sample: Sample) -> None:
        """How far the window strays from what was known before it."""
        local, remote, here = sample.local, sample.remote, sample.made_here
        if local.tickets and self._cpu.known:
            waiting = self._waiting(sample, local) if self._knows_waiting(sample) else self._wait_s * local.tickets
            mean = (local.cpu_s + waiting) / local.tickets
            self._scatter.add(local.tickets, mean, self._cpu.value + self._wait_s, self._cpu.weight)
        elif remote.tickets and self._far.known:
            mean = remote.busy_s / remote.tickets
            self._scatter.add(remote.tickets, mean, self._far.value, self._far.weight)
        elif here.tickets and self._here.known:
            mean = max(0.0, here.busy_s - self._queued_here(sample)) / here.tickets
            self._scatter.add(here.tickets, mean, self._here.value, self._here.weight)

    def _learn_threads(self, sample: Sample, lane: LaneSample, queued_s: float) -> None:
        """CPUs that a batch keeps busy at once: seen where its CPU time is more than its wall time, and seen to be one
        where CPUs were free. On a full machine several threads of a batch look like one."""
        several = lane.cpu_s > _SEVERAL * lane.busy_s
        if several or not self.is_saturated(sample):
            computed_s = lane.cpu_s + (queued_s if several else 0.0)
            self._at_once.add(computed_s / max(1e-9, lane.busy_s) * lane.tickets, lane.tickets)

    def _travelling(self, sample: Sample) -> None:
        """What is drawn and in nobody's hands is under way, or waits for a worker (Little's law): the least of that is
        the way there and back. Where remote workers have time to spare nothing waits for them, and what is more than
        the way explains queues on it."""
        local, remote, seconds = sample.local, sample.remote, max(1e-9, sample.seconds)
        self._away = 0.0
        if not remote.tickets or remote.running < remote.requested:
            return
        at_work = (remote.busy_s + local.busy_s) / seconds
        away = max(0.0, sample.in_flight - at_work)
        self._travels.append(away * seconds / remote.tickets)
        if len(self._travels) == _TRAVELS_KEPT:
            self._travel = min(self._travel, sum(self._travels) / _TRAVELS_KEPT)
            if remote.busy_s < _IDLE * remote.running * seconds and sample.wait_s > 0:
                self._away = max(0.0, away - self._travel * remote.tickets / seconds)

    @property
    def jammed(self) -> float:
        """Batches that queued on the way from remote workers in the latest window."""
        return self._away

    def _services(self, sample: Sample) -> None:
        self._since_resized += 1
        if self._since_resized <= _RESIZED_WINDOWS and len(self._spread) >= _SPREAD_KNOWN:
            return  # another level, which is not known well enough to measure single batches by
        for lane in (sample.made_here, sample.local, sample.remote):
            usual = self._usual(lane, sample) if lane.tickets and lane.services_s else 0.0
            if usual > 0:
                self._spread.extend(min(_MOST_SPREAD, service / usual) for service in lane.services_s)

    def _usual(self, lane: LaneSample, sample: Sample) -> float:
        """Mean service time of the lane, over more than this window where there was more."""
        here = lane.busy_s / lane.tickets
        if lane is sample.remote:
            known = self._far.value
        else:
            known = self._cpu.value / self._threads * self._slowdown(sample) + self._wait_s
        return here if math.isnan(known) else known

    # -- change --------------------------------------------------------------------------------------------------

    def _changes(self, sample: Sample) -> tuple[str, ...]:
        """Levels that have moved start anew; parts of the work too small to matter are left alone."""
        local, remote, here = sample.local, sample.remote, sample.made_here
        spread = self.variation() if len(self._spread) >= _SPREAD_KNOWN else max(1.0, self.variation())
        stepped = self._carried[0] + self._stepping(sample)
        batches = sample.batches if sample.host.trainer_queued_s is not None or not self.is_saturated(sample) else 0
        seen = [
            ("CPU time of a batch", self._cpu, local.cpu_s, local.tickets, spread),
            ("time of a remote batch", self._far, remote.busy_s, remote.tickets, spread),
            ("time of a batch", self._here, here.busy_s, here.tickets, spread),
        ]
        if self._knows_waiting(sample):
            seen.append(("waiting of a batch", self._wait, self._waiting(sample, local), local.tickets, spread))
        seen.append(("step", self._step, stepped, batches, 0.0))
        values = [max(level.value, total / count) for _, level, total, count, _ in seen[:-1] if level.known and count]
        matters = _MATTERS * max(values, default=0.0)
        moved = []
        if self._is_held_up(sample):  # what is finished then is what took long, and no picture of the work
            seen = seen[-1:]
        for what, level, total, count, varies in seen:
            varies *= math.sqrt(count * variance_of_mean(count, self.correlation)) if count else 1.0
            least = matters if level is not self._step else _STEP_MATTERS * sample.seconds / max(1, batches)
            small = count and max(level.value, total / count) < least
            if small or not level.has_moved(total, count, varies):
                continue
            moved.append(wording.level(what, level.value, total / count))
            level.restart()
            if level is not self._step:
                self._forget_making(level)
        return tuple(moved)

    @staticmethod
    def _is_held_up(sample: Sample) -> bool:
        """Whether all waited for one batch, while those after it were long ready."""
        return not sample.batches and sample.head_s > 0.5 * sample.seconds

    def _forget_making(self, moved: Level) -> None:
        """A batch costs something else now: what the lanes that are not at it once said is of no use any more."""
        self._scatter.forget_latest(_MOVED_WINDOWS)
        self._at_once.clear()
        self._least_cpu = math.inf
        self._spread.clear()
        if moved is self._here:
            self._cpu.clear()
            self._wait.clear()
        else:
            self._here.clear()
        if not self._running[1]:
            self._far.clear()
            self._far_cpu.clear()


def _whole(sample: Sample) -> Sample:
    """The consumer's three times, made to add up to the window."""
    total = sample.wait_s + sample.own_s + sample.work_s
    if total <= 0 or not 0.5 * sample.seconds < total < 2.0 * sample.seconds:
        return sample
    factor = sample.seconds / total
    return replace(sample, wait_s=sample.wait_s * factor, own_s=sample.own_s * factor, work_s=sample.work_s * factor)

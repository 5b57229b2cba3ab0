"""Turns windows of measurements into an estimate of the work, and notices when the work has changed.

Queueing for a CPU is no part of the work (see `dpex.autotune.queueing`). The consumer is the training loop, or its GPU
where that is timed (`dpex.autotune.felt`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from dpex.autotune import queueing, wording
from dpex.autotune.constants.levels import LEVEL
from dpex.autotune.constants.measuring import ESTIMATOR
from dpex.autotune.correlation import Correlation, variance_of_mean
from dpex.autotune.felt import FeltSample
from dpex.autotune.link import Link
from dpex.autotune.model import Estimate
from dpex.autotune.noise import Level
from dpex.autotune.types import Sample
from dpex.core.durations import remainder
from dpex.measure.samples import PoolSample


class WorkEstimator:
    """What is known of the work, from the windows since it last changed.

    correlation: over how many batches service times stay alike; see `dpex.autotune.correlation`.
    """

    def __init__(self) -> None:
        self._step, self._step_cpu, self._own = Level(), Level(), Level()
        self._here, self._cpu, self._wait, self._far, self._far_cpu = (Level() for _ in range(5))
        self._encode, self._at_once = Level(), Level()
        self.link = Link()
        self._step_spread, self._launch = Level(), Level()
        self._others: deque[float] = deque(maxlen=ESTIMATOR.others_kept)
        self._starting = (-math.inf, 0.0)
        self._spread: deque[float] = deque(maxlen=ESTIMATOR.spread_kept)
        self._doubted: deque[int] = deque(maxlen=LEVEL.doubted_windows)
        self._scatter = Correlation()
        self.correlation = 0.0
        self._running = (-1, -1)
        self._since_resized = self._mixed = self._mixed_windows = 0
        self._carried = [0.0, 0.0]
        self._least_cpu = math.inf
        self.batch_bytes = 0.0
        self.stepping_s = 0.0
        self.tickets = 0

    def add(self, felt: FeltSample) -> tuple[str, ...]:
        """Take a window in; what of the work has changed by it, in words, if anything."""
        if felt.is_new:
            self._forget_consumer()
        sample = queueing.whole(felt.sample)
        self._notice_workers(sample)
        is_mixed = self._is_mixed(sample)
        changed = self._changes(sample, felt, is_mixed=is_mixed)
        if sample.batch_bytes:
            self.batch_bytes = sample.batch_bytes
        self._notice_others(sample)
        if felt.is_known:
            self._consumer(sample, felt)
        if not is_mixed:
            self._pools(sample)
            self._services(sample)
        self.link.add(sample)
        self.correlation = self._scatter.length(self.variation())
        self.tickets += sample.made_here.tickets + sample.local.tickets + sample.remote.tickets
        return changed

    @property
    def known(self) -> bool:
        """Whether there is enough to decide on."""
        return self.tickets >= ESTIMATOR.known_from and self._step.known

    @property
    def is_crowded(self) -> bool:
        """A batch takes clearly more CPU than it once did, as where workers are in each other's way."""
        return self._cpu.get(0.0) > ESTIMATOR.crowded * self._least_cpu

    @property
    def step_s(self) -> float:
        """The consumer between two calls, 0 if unknown."""
        return self._step.get(0.0)

    @property
    def usual_s(self) -> float:
        """What a worker takes for a batch, 0 if unknown: of the two kinds the slower."""
        return max(self._far.get(0.0), self._cpu.get(0.0) + self._wait_s)

    @property
    def _threads(self) -> float:
        """CPUs that a batch keeps busy at once, on average over its computing; 1 unless it clearly is more."""
        at_once = self._at_once.get(1.0)
        return at_once if at_once > ESTIMATOR.several_threads else 1.0

    @property
    def _wait_s(self) -> float:
        """Waiting of a batch, 0 if unknown."""
        return self._wait.get(0.0)

    def estimate(self, cpus: float, ceiling: float, far_ceiling: float) -> Estimate:
        """What a batch costs, as far as it is known."""
        cpu = self._cpu.get(self._far_cpu.get(self._here.get(0.01)))
        wait = self._wait_s
        at_once = self._threads
        computing = remainder(cpu, self._encode.get(0.0)) / min(at_once, max(1.0, cpus))
        here = self._here.get(computing + wait + ESTIMATOR.here_s)
        return Estimate(
            step_s=self._step.get(0.0),
            step_cpu_s=self._step_cpu.get(0.0),
            own_s=self._own.get(0.0002),
            here_s=here,
            cpu_s=cpu,
            wait_s=wait,
            far_s=self._far.get(cpu + wait),
            travel_s=self.link.travel_s,
            spread=tuple(self._spread) or (1.0,),
            step_spread=self._step_spread.get(0.0),
            correlation=self.correlation,
            cpus=max(0.5, cpus),
            others=sum(self._others) / len(self._others) if self._others else 0.0,
            ceiling=ceiling,
            far_ceiling=min(far_ceiling, self.link.rate(self.batch_bytes)),
            at_once=at_once,
            seen=max(self._cpu.weight, self._far.weight, self._here.weight),
            hidden_s=remainder(self.step_s, self._launch.value) if self._launch.known else 0.0,
        )

    def slowest_s(self) -> float:
        """The longest that a batch took, of those remembered."""
        return self.usual_s * max(self._spread, default=1.0)

    def variation(self) -> float:
        """Standard deviation of service times over their mean."""
        return _variation(self._spread)

    def dearer(self, work: Estimate) -> Estimate:
        """The estimate with costs higher by their standard error, and as correlated as cannot be ruled out: what fewer
        workers must be enough for."""
        length = self._scatter.cautious_length(self.correlation)
        known_by = max(1.0, self._far.weight if self._far.known and not self._cpu.known else self._cpu.weight)
        error = self._error_of_mean(known_by, length)
        factor = 1.0 + min(ESTIMATOR.most_dearer, error) if error > ESTIMATOR.least_dearer else 1.0
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

    # -- taking in -----------------------------------------------------------------------------------------------

    def _notice_others(self, sample: Sample) -> None:
        """What other programs take of the CPUs. Whoever starts workers is among them, and is gone once these run: what
        was measured meanwhile does not count, nor do later windows that still have that figure."""
        others = sample.machine.others
        if sample.local.running < sample.local.requested:
            self._starting = (sample.at, others)
        at, while_starting = self._starting
        if others != while_starting or sample.at - at >= ESTIMATOR.others_stale_s:
            self._others.append(others * queueing.slowdown(sample, self._wait_s))

    def _notice_workers(self, sample: Sample) -> None:
        """With another number of workers each may cost something else (caches), and that is no change of the work."""
        running = (sample.local.running, sample.remote.running)
        if running != self._running:
            self.link.resized()
            if self._cpu.weight >= max(ESTIMATOR.known_from, (self.variation() / ESTIMATOR.error_before) ** 2):
                self._least_cpu = min(self._least_cpu, self._cpu.value)
            before, after = max(1, sum(self._running)), max(1, sum(running))
            many = max(before, after) > ESTIMATOR.many_more * min(before, after)
            self._running = running
            for level in (self._cpu, self._far, self._step, self._at_once):
                level.loosen()
            self._wait.loosen(ESTIMATOR.hardly_known if many else 1.0)
            self._mixed = before if 0 < sum(running) < before else 0
            self._since_resized = self._mixed_windows = 0

    def _is_mixed(self, sample: Sample) -> bool:
        """Whether batches of this window were begun among the workers that there were before."""
        made = sample.local.tickets + sample.remote.tickets
        is_mixed, self._mixed = self._mixed > 0, self._mixed - made
        self._mixed_windows += is_mixed and made > 0
        return is_mixed and self._mixed_windows <= ESTIMATOR.mixed_windows

    def _consumer(self, sample: Sample, felt: FeltSample) -> None:
        self.stepping_s = queueing.stepping(sample, felt, self._wait_s)
        self._carried[0] += self.stepping_s
        self._carried[1] += queueing.step_cpu_s(sample)
        if not sample.batches:
            return  # steps longer than the window
        if sample.made_here.tickets:
            here_s = remainder(sample.made_here.busy_s, queueing.queued_here(sample))
            self._here.add(here_s, sample.made_here.tickets)
        elif sample.local.tickets or sample.remote.tickets:
            self._own.add(queueing.taking_over(sample), sample.batches)
        self._step.add(*self._steps(sample, felt))
        self._step_cpu.add(self._carried[1], sample.batches)
        spread = felt.spread if felt.is_gpu else sample.step_spread
        if spread is not None:
            self._step_spread.add(spread * sample.batches, sample.batches)
        if felt.launch_s is not None:
            self._launch.add(felt.launch_s * sample.batches, sample.batches)
        self._carried = [0.0, 0.0]

    def _steps(self, sample: Sample, felt: FeltSample) -> tuple[float, float]:
        """Seconds of steps, and how many these are: those of the GPU where it is timed."""
        if not felt.is_gpu:
            return self._carried[0], sample.batches
        queued = (sample.work_s - queueing.stepping(sample, felt, self._wait_s)) / max(1e-9, sample.work_s)
        return felt.step_s * (1.0 - queued), felt.steps

    def _forget_consumer(self) -> None:
        """It is timed by another clock from now on."""
        for level in (self._step, self._own, self._step_spread, self._launch):
            level.clear()
        self._carried = [0.0, 0.0]

    def _pools(self, sample: Sample) -> None:
        local, remote, here = sample.local, sample.remote, sample.made_here
        spread = self.variation()
        self._learn_scatter(sample)
        if local.tickets:
            self._cpu.add(local.cpu_s, local.tickets, spread)
            self._encode.add(local.encode_s, local.tickets, spread)
            if local.tickets >= max(ESTIMATOR.known_from, (spread / ESTIMATOR.crowded_error) ** 2):
                self._least_cpu = min(self._least_cpu, local.cpu_s / local.tickets)
            if queueing.knows_waiting(sample) or not self._wait.known:
                self._wait.add(queueing.waiting(sample, self._wait_s), local.tickets, spread)
            self._learn_threads(sample, local, local.cpu_s * (queueing.slowdown(sample, self._wait_s) - 1.0))
        if here.tickets and not local.tickets:
            self._cpu.add(here.cpu_s, here.tickets, spread)
            queued = queueing.queued_here(sample)
            self._wait.add(remainder(here.busy_s, here.cpu_s, queued), here.tickets, spread)
            self._learn_threads(sample, here, queued)
        if remote.tickets:
            self._far.add(remote.busy_s, remote.tickets, spread)
            self._far_cpu.add(remote.cpu_s, remote.tickets, spread)

    def _learn_scatter(self, sample: Sample) -> None:
        """How far the window strays from what was known before it."""
        local, remote, here = sample.local, sample.remote, sample.made_here
        if local.tickets and self._cpu.known:
            wait_s = self._wait_s
            waited_s = queueing.waiting(sample, wait_s) if queueing.knows_waiting(sample) else wait_s * local.tickets
            mean = (local.cpu_s + waited_s) / local.tickets
            self._scatter.add(local.tickets, mean, self._cpu.value + self._wait_s, self._cpu.weight)
        elif remote.tickets and self._far.known:
            mean = remote.busy_s / remote.tickets
            self._scatter.add(remote.tickets, mean, self._far.value, self._far.weight)
        elif here.tickets and self._here.known:
            mean = remainder(here.busy_s, queueing.queued_here(sample)) / here.tickets
            self._scatter.add(here.tickets, mean, self._here.value, self._here.weight)

    def _learn_threads(self, sample: Sample, pool: PoolSample, queued_s: float) -> None:
        """CPUs that a batch keeps busy at once: seen where its CPU time is more than its wall time, and seen to be one
        where CPUs were free. On a full machine several threads of a batch look like one."""
        several = pool.cpu_s > ESTIMATOR.several_threads * pool.busy_s
        if several or not queueing.is_saturated(sample):
            computed_s = pool.cpu_s + (queued_s if several else 0.0)
            self._at_once.follow(computed_s / max(1e-9, pool.busy_s) * pool.tickets, pool.tickets)

    def _services(self, sample: Sample) -> None:
        self._since_resized += 1
        self._doubted.append(0)
        if self._since_resized <= ESTIMATOR.resized_windows and len(self._spread) >= ESTIMATOR.spread_known:
            return  # another level, which is not known well enough to measure single batches by
        for pool in (sample.made_here, sample.local, sample.remote):
            usual = self._usual(pool, sample) if pool.tickets and pool.services_s else 0.0
            if usual > 0:
                self._spread.extend(min(ESTIMATOR.most_spread, service / usual) for service in pool.services_s)
                self._doubted[-1] += len(pool.services_s)

    def _usual(self, pool: PoolSample, sample: Sample) -> float:
        """Mean service time of the pool, over more than this window where there was more."""
        here = pool.busy_s / pool.tickets
        if pool is sample.remote:
            known = self._far.value
        else:
            known = self._cpu.value / self._threads * queueing.slowdown(sample, self._wait_s) + self._wait_s
        return here if math.isnan(known) else known

    # -- change --------------------------------------------------------------------------------------------------

    def _changes(self, sample: Sample, felt: FeltSample, *, is_mixed: bool) -> tuple[str, ...]:
        """Levels that have moved start anew; parts of the work too small to matter are left alone.

        With fewer workers than before the first batches say nothing of the work as it is now: as many as there were
        workers were begun among these.
        """
        local, remote, here = sample.local, sample.remote, sample.made_here
        spread = self._variation_before()
        stepped, batches = self._stepped(sample, felt)
        seen: list[tuple[str, Level, float, float, float]] = [
            ("CPU time of a batch", self._cpu, local.cpu_s, local.tickets, spread),
            ("time of a remote batch", self._far, remote.busy_s, remote.tickets, spread),
            ("time of a batch", self._here, here.busy_s, here.tickets, spread),
        ]
        if queueing.knows_waiting(sample):
            waited_s = max(0.0, queueing.waiting(sample, self._wait_s))
            seen.append(("waiting of a batch", self._wait, waited_s, local.tickets, spread))
        seen.append(("step", self._step, stepped, batches, 0.0))
        values = [max(level.value, total / count) for _, level, total, count, _ in seen[:-1] if level.known and count]
        matters = ESTIMATOR.matters * max(values, default=0.0)
        moved = []
        if is_mixed or queueing.is_held_up(sample):
            seen = seen[-1:]  # what is finished then is what took long, and no picture of the work
        for what, level, total, count, varies in seen:
            varies *= math.sqrt(count * variance_of_mean(count, self.correlation)) if count else 1.0
            least = matters if level is not self._step else ESTIMATOR.step_matters * sample.seconds / max(1, batches)
            small = count and max(level.value, total / count) < least
            if small or (level is self._wait and self._is_in_error(total, sample)):
                continue
            if not level.has_moved(total, count, varies):
                continue
            moved.append(wording.level(what, level.value, total / count))
            level.restart(total, count)
            if level is not self._step:
                self._forget_making(level)
        return tuple(moved)

    def _is_in_error(self, waited_s: float, sample: Sample) -> bool:
        """Whether workers' waiting in the window differs from what is known of it by no more than its error."""
        difference_s = abs(waited_s - self._wait_s * sample.local.tickets)
        return difference_s <= queueing.waiting_error(sample, self._wait_s)

    def _variation_before(self) -> float:
        """The variation without the latest windows, which may be the first of another level and are no spread then."""
        before = list(self._spread)[: max(0, len(self._spread) - sum(self._doubted))]
        return _variation(before) if len(before) >= ESTIMATOR.spread_known else max(1.0, self.variation())

    def _stepped(self, sample: Sample, felt: FeltSample) -> tuple[float, float]:
        """Seconds of steps since the last batch, and how many: none where a full machine hides what they are."""
        stepped, batches = self._carried[0] + queueing.stepping(sample, felt, self._wait_s), float(sample.batches)
        if felt.is_gpu:
            stepped, batches = self._steps(sample, felt)
        is_told = sample.machine.trainer_queued_s is not None or not queueing.is_saturated(sample)
        return stepped, batches if is_told and felt.is_known else 0

    def _forget_making(self, moved: Level) -> None:
        """A batch costs something else now: what the pools that are not at it once said is of no use any more."""
        self._scatter.forget_latest(ESTIMATOR.moved_windows)
        self._at_once.clear()
        self._least_cpu = math.inf
        self._spread.clear()
        self._doubted.clear()
        if moved is self._here:
            self._cpu.clear()
            self._wait.clear()
        else:
            self._here.clear()
        if not self._running[1]:
            self._far.clear()
            self._far_cpu.clear()


def _variation(factors: Sequence[float]) -> float:
    """Standard deviation over mean; 1 where there are too few to tell."""
    if len(factors) < 2:
        return 1.0
    mean = sum(factors) / len(factors)
    return math.sqrt(sum((factor - mean) ** 2 for factor in factors) / len(factors)) / max(1e-9, mean)

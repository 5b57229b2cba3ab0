"""The model of a loader: rate and wait of a setting, the best setting, and the needs of a loop that never waits. PURE.

Each of ``W`` workers takes ``s`` seconds and ``c`` CPU seconds for a batch. Other programs use ``o`` of ``C`` CPUs. A
step takes ``t`` seconds, and ``k`` CPU seconds of the training process. So::

    rate(W) = min(W / s, F / (c + k), 1 / t, limit of memory),   F = max(C - o, C W / (W + o))

In the second limit, batches of remote workers cost only ``k``. ``F`` is the larger of two values: the CPUs that other
programs leave, and an equal part for each thread that needs a CPU. The limits of workers are multiplied by the ratio of
the measured to the predicted rate of the present setting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dpex.autotune.constants import CONSTANTS
from dpex.autotune.limits import Limits
from dpex.measure.reading import Reading
from dpex.measure.settings import INLINE, LOCAL, REMOTE, Settings
from dpex.measure.views import net_mean_s, queued_s, unevenness

_TINY = 1e-9
_LEAST_STEP_S = 1e-6


@dataclass(frozen=True, kw_only=True)
class PoolCost:
    """The cost of a batch in a worker pool.

    Attributes:
        service_s: Seconds that a worker takes for a batch, queueing for a CPU not included.
        cpu_s: CPU seconds that a worker takes for a batch.
    """

    service_s: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class Range:
    """A prediction: the expected value, and an interval that contains the true value in most cases."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class EndOfStall:
    """The needs of a training loop that never waits for data.

    Attributes:
        rate: Batches per second that the training loop could take.
        cpus: Required CPUs, including the training process.
        more_cpus: CPUs that this machine lacks and other nodes can provide.
        cost: Share of a batch's CPU time for which this machine's CPUs suffice.
        workers: Required workers.
    """

    rate: float
    cpus: float
    more_cpus: float
    cost: float
    workers: int


@dataclass(frozen=True, kw_only=True)
class Start:
    """The start of a pass, where each pass starts workers anew.

    Attributes:
        seconds: From the beginning of a pass to its first batch.
        workers: Local workers that were started meanwhile.
        batches: Batches of a pass.
    """

    seconds: float
    workers: int
    batches: int

    def seconds_with(self, workers: int, cpus: float) -> float:
        """Return the seconds with another number of workers, which all start at the same time on ``cpus`` CPUs."""
        now, other = (1.0 + CONSTANTS.start_each * max(1.0, count / cpus) for count in (self.workers, workers))
        return self.seconds * other / now


@dataclass(frozen=True, kw_only=True)
class Model:
    """The work and the machine as they were measured. Times are seconds per batch.

    Attributes:
        now: The measured setting.
        local, remote: The costs of a batch in each pool.
        step_s: Time of the training loop for a batch without a wait.
        step_cpu_s: CPU time of the training process in ``step_s``.
        step_queued_s: Time of the training thread on run queues in a step, in addition to ``step_s``.
        cpus: CPUs that this job may use.
        others: The part of ``cpus`` that other programs use.
        unevenness: The ratio of the slowest batch's time to the mean time.
        measured_rate: Batches per second under ``now`` if the loop waited, else None.
        error: The relative standard error of ``measured_rate``.
        start: The cost of a start; None if workers persist.
        limits: Limits of memory, configuration and cluster.
        lanes: Batches that a worker makes at a time. A pool's ``service_s`` is a batch's part of a worker's time.
    """

    now: Settings
    local: PoolCost
    remote: PoolCost
    step_s: float
    step_cpu_s: float
    cpus: float
    others: float
    limits: Limits
    lanes: int = 1
    step_queued_s: float = 0.0
    unevenness: float = 1.0
    measured_rate: float | None = None
    error: float = 0.05
    start: Start | None = None

    @classmethod
    def of(
        cls,
        work: Reading,
        *,
        now: Settings,
        step_s: float,
        others: float,
        is_full: bool,
        limits: Limits,
        measured_rate: float | None,
        error: float,
        step_queued_s: float = 0.0,
        start: Start | None = None,
    ) -> Model:
        """Return the model of measured work, which has at least one batch and one step.

        A pool without batches gets the cost of another pool. A remote worker's time includes the transit. The arguments
        are `Model`'s, except ``is_full``, which tells whether hardly any CPU of this machine was idle. The law and a
        diagnosis pass different values for these reasons:

        - ``step_s``, ``step_queued_s``: In a window most waits have no cause yet, so the law takes the step from the
          clock. The law plans for less queueing. A diagnosis predicts the queueing of a step outside the model.
        - ``others``: The law takes the maximum of recent windows, because other programs come again. A diagnosis
          explains a run, and takes the mean.
        - ``is_full``: The law takes the windows under the present setting, and a diagnosis the whole run.
        - ``measured_rate``, ``error``: The law takes the rate and its scatter from windows under one setting. A
          diagnosis leaves out seconds that the setting does not explain, and adds the errors of past predictions.
        - ``start``: The law takes the latest start, to choose workers for the next. A diagnosis takes the mean.
        """

        def cost(name: str) -> PoolCost:
            place = next(one for one in (name, LOCAL, REMOTE, INLINE) if one in work.pools and work.pools[one].tickets)
            pool = work.pools[place]
            waited_s = queued_s(pool, has_full_cpus=is_full and place != REMOTE)
            service_s, cpu_s = net_mean_s(pool, waited_s), pool.cpu_s / pool.tickets
            transit_s = pool.transit_s / pool.tickets if name == REMOTE else 0.0
            return PoolCost(service_s=max(_TINY, service_s + transit_s), cpu_s=max(_TINY, min(service_s, cpu_s)))

        step_s = max(_LEAST_STEP_S, step_s)
        inline_s = work.pools[INLINE].cpu_s if INLINE in work.pools else 0.0
        trainer_cpu_s = max(0.0, work.trainer_cpu_s - inline_s) / max(1, work.later_batches)
        return cls(
            now=now,
            local=cost(LOCAL),
            remote=cost(REMOTE),
            step_s=step_s,
            step_cpu_s=min(step_s, trainer_cpu_s),
            step_queued_s=step_queued_s,
            cpus=work.cpus,
            others=others,
            limits=limits,
            lanes=work.lanes,
            unevenness=unevenness(work.services_s),
            measured_rate=measured_rate,
            error=error,
            start=start,
        )

    # -- the rate of a setting -----------------------------------------------------------------------------------------

    def rate(self, settings: Settings) -> Range:
        """Batches per second."""
        value = min(self._capacity(settings) * self._correction, self.demand)
        apart = abs(math.log(max(1, settings.workers) / max(1, self.now.workers)))
        error = math.hypot(self.error, CONSTANTS.far * apart / math.log(2.0))
        return Range(value=value, low=value / (1.0 + 2 * error), high=min(value * (1.0 + 2 * error), self.demand))

    def expected(self, settings: Settings) -> tuple[float, float]:
        """Return batches per second and the seconds of a step, in which the training loop is not blocked.

        Local workers take CPUs from the training thread. Its steps last longer by the time that it waits for a CPU.
        """
        step_s = self.step_s + self.step_queued_s * settings.local / max(1, self.now.local)
        return min(self.rate(settings).value, 1.0 / max(_TINY, step_s)), step_s

    @property
    def demand(self) -> float:
        """Batches per second that the training loop takes if it need not wait."""
        return 1.0 / max(_TINY, self.step_s)

    def free_cpus(self, local: int) -> float:
        """Return the CPUs that ``local`` workers can have.

        It is the larger of the CPUs that other programs leave and the equal part that a kernel gives each thread.
        """
        return max(self.cpus - self.others, self.cpus * local / max(_TINY, local + self.others))

    @property
    def cpu_share(self) -> float:
        """Share of CPU time in a local worker's time, queueing not included."""
        return min(1.0, max(_TINY, self.local.cpu_s / max(_TINY, self.local.service_s)))

    def _capacity(self, settings: Settings) -> float:
        """Batches per second that workers make, as far as the CPUs let them.

        Remote batches cost this machine only the CPU time of the training process. So ``x`` batches from local workers
        and ``y`` batches from remote workers need ``c x + k (x + y)`` CPUs.
        """
        far = settings.remote / max(_TINY, self.remote.service_s)
        near = settings.local / max(_TINY, self.local.service_s)
        free = self.free_cpus(settings.local) - self.step_cpu_s * min(far, self.demand)
        return max(_TINY, min(near, free / max(_TINY, self._cpu_s))) + far

    @property
    def lacks_cpus(self) -> bool:
        """True if CPUs, and not the number of workers, limit the rate of local workers in the present setting."""
        near = self.now.local / max(_TINY, self.local.service_s)
        return near > self.free_cpus(self.now.local) / max(_TINY, self._cpu_s)

    @property
    def _cpu_s(self) -> float:
        """CPU time that a batch of a local worker costs this machine."""
        return self.local.cpu_s + self.step_cpu_s

    @property
    def _correction(self) -> float:
        """Measured over predicted rate of the present setting."""
        if not self.measured_rate:
            return 1.0
        return min(2.0, max(0.5, self.measured_rate / min(self.demand, self._capacity(self.now))))

    # -- the best setting ----------------------------------------------------------------------------------------------

    def workers_to_fill(self, *, spared: float | None = None) -> int:
        """Return the local workers that keep all CPUs busy except the CPUs of the training process.

        More workers are needed if workers wait for data, or if other programs use CPUs, since the kernel divides the
        CPUs equally. ``spared``: Return instead the workers that leave this many CPUs idle.
        """
        share = self.cpu_share
        if spared is not None:
            return round(max(0.0, self.free_cpus(1) - spared) / share)
        used = self.step_cpu_s * min(self.demand, self.cpus / max(_TINY, self._cpu_s))
        beside = min(self.others, self.cpus)
        return max(1, math.ceil((1.0 + (1.0 - share) ** 2) * max(0.0, self.cpus - used + beside) / share))

    def best(self, headroom: float, limits: Limits | None = None) -> tuple[int, int]:
        """Return the fewest workers of each pool whose rate is ``headroom`` times the demand, or nearest to it.

        Local workers come first, because they need no other machine.
        """
        limits = limits or self.limits
        most = min(limits.most_local(self.unevenness), limits.local, limits.prefetch)
        wanted = max(1.0, headroom * self.local.service_s * self.demand)
        spared = 1.0 if limits.remote else None
        local = min(most, self.workers_to_fill(spared=spared), math.ceil(wanted - _TINY))
        near = min(local / max(_TINY, self.local.service_s), self.free_cpus(local) / max(_TINY, self._cpu_s))
        far = max(0.0, headroom * self.demand - near) * self.remote.service_s
        remote = min(limits.remote, math.ceil(far - _TINY), max(0, limits.most_prefetch(local) - local))
        local = max(local, limits.least_local, int(not remote))
        return self._quick_to_start(local), max(remote, limits.least_remote)

    def _quick_to_start(self, local: int) -> int:
        """Return the smallest number of workers that minimises the time of a pass, including its start."""
        start = self.start
        if start is None or not start.seconds:
            return local
        local = max(1, min(local, start.batches))

        def pass_s(workers: int) -> float:
            rate = self.rate(replace(self.now, local=workers)).value
            return start.seconds_with(workers, self.free_cpus(workers)) + start.batches / rate

        seconds = {workers: pass_s(workers) for workers in range(1, local + 1)}
        least_s = min(seconds.values())
        return min(workers for workers, each in seconds.items() if each <= (1.0 + CONSTANTS.equal_rates) * least_s)

    def prefetch(self, local: int, remote: int, depth: float) -> int:
        """Return ``depth`` batches in flight for each batch made at the same time, as far as memory allows."""
        workers = local + remote
        most = max(workers, self.limits.most_prefetch(local))
        return int(max(2, min(depth * self.lanes * workers, most)))

    # -- the end of the stall, and other work --------------------------------------------------------------------------

    def to_end_stall(self) -> EndOfStall:
        """Return the needs of a loader whose rate is the demand of the training loop."""
        cpus = self._cpu_s * self.demand
        workers = math.ceil(self.local.service_s * self.demand)
        free = self.free_cpus(workers)
        spare = free - self.step_cpu_s * self.demand
        return EndOfStall(
            rate=self.demand,
            cpus=cpus,
            more_cpus=max(0.0, cpus - free),
            cost=min(1.0, max(0.0, spare / max(_TINY, self.local.cpu_s * self.demand))),
            workers=workers,
        )

    def with_costs(self, local: PoolCost, remote: PoolCost) -> Model:
        """Return the model of work with other costs, and with the present ratio of measured to predicted rate."""
        other = replace(self, local=local, remote=remote, measured_rate=None)
        if not self.measured_rate:
            return other
        return replace(other, measured_rate=self._correction * min(other.demand, other._capacity(other.now)))

    def without_others(self, *, keeps_factor: bool = False, only_cpu: bool = False) -> Model:
        """Return the model without other programs.

        If CPUs limit the workers, other programs explain a low measured rate, so that rate corrects the prediction only
        with ``keeps_factor``. With ``only_cpu``, other programs also explain all time beyond CPU time.
        """
        alone = replace(self, others=0.0, step_queued_s=0.0)
        if only_cpu:
            computes = self.cpu_share > CONSTANTS.computes_from
            local = replace(self.local, service_s=self.local.cpu_s) if computes else self.local
            return replace(alone, local=local, step_s=max(_TINY, self.step_cpu_s), measured_rate=None)
        if not self.measured_rate:
            return alone
        factor = min(1.0, self._correction) if keeps_factor else 1.0 if self.lacks_cpus else self._correction
        return replace(alone, measured_rate=factor * min(alone.demand, alone._capacity(alone.now)))

    def with_remote(self, most: int) -> Model:
        """Return the model with places for ``most`` remote workers."""
        return replace(self, limits=replace(self.limits, remote=max(most, self.limits.remote)))

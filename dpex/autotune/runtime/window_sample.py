"""Turns the two ends of a window into the sample that the controller is given. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from dpex.autotune.runtime.windows import WindowMark
from dpex.autotune.types import Sample, Settings
from dpex.core.durations import remainder
from dpex.measure.consumer_time import EngineLook
from dpex.measure.samples import PoolSample
from dpex.measure.sums import relative_spread
from dpex.system.run_queue import RunQueueGrowth, RunQueueTimes


@dataclass(frozen=True)
class Window:
    """Its ends; see `dpex.autotune.runtime.windows`."""

    before: WindowMark
    after: WindowMark

    @cached_property
    def ran(self) -> RunQueueGrowth:
        """What ran in it, and waited for a CPU."""
        return self.after.queued.since(self.before.queued)

    @property
    def trainer_cpu_s(self) -> float:
        """CPU time of this process, without the part that fell between two passes."""
        base, look = self.before.look, self.after.look
        part = min(1.0, (look.times.seconds - base.times.seconds) / max(1e-6, look.at - base.at))
        return remainder(self.after.cpu_s, self.before.cpu_s) * max(0.0, part)

    @property
    def trainer_queued_s(self) -> float | None:
        """How long the training thread could have run and had no CPU, None where the kernel does not tell."""
        return None if self.ran.trainer is None else self.ran.trainer.queued_s

    def sample(self, began_at: float, settings: Settings) -> Sample:
        """All but the machine, the cluster and the GPU, under settings that began at ``began_at``."""
        base, look = self.before.look, self.after.look
        loop = look.times.since(base.times)
        steps, step_s, squares = _gpu_steps(base, look)
        return loop.narrowed(
            Sample,
            at=look.at - began_at,
            settings=replace(settings, local=look.sizes.local, remote=look.sizes.remote),
            epoch=look.epoch,
            step_spread=relative_spread(loop.batches, loop.work_s, loop.work_squared),
            ready=look.ready,
            in_flight=look.in_flight,
            batch_bytes=look.batch_bytes,
            pass_batches=look.pass_batches,
            start_s=look.start_s,
            starts_anew=look.starts_anew,
            gpu_stall_s=_gpu_stall_s(base.gpu_stall_s, look.gpu_stall_s),
            gpu_steps=steps,
            gpu_step_s=step_s,
            gpu_step_spread=relative_spread(steps, step_s, squares),
            feed_wait_s=remainder(look.feed_wait_s, base.feed_wait_s),
            made_here=with_queue(look.made_here.since(base.made_here), self.ran.here),
            local=with_queue(look.local.since(base.local), self.ran.workers),
            remote=look.remote.since(base.remote),
        )


def with_queue(pool: PoolSample, ran: RunQueueTimes | None) -> PoolSample:
    """The pool with the time its batches were on run queues, by what those who make them had to wait for a CPU."""
    return pool if ran is None or not pool.tickets else replace(pool, queued_s=pool.cpu_s * ran.delay)


def _gpu_steps(then: EngineLook, now: EngineLook) -> tuple[int, float, float]:
    """Steps of the GPU's stream in the window, their seconds, and the sum of the squares of these."""
    return (
        max(0, now.gpu_steps - then.gpu_steps),
        remainder(now.gpu_step_s, then.gpu_step_s),
        max(0.0, now.gpu_step_squared - then.gpu_step_squared),
    )


def _gpu_stall_s(then: float | None, now: float | None) -> float | None:
    return None if now is None else remainder(now, then or 0.0)

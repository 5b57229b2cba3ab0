"""Turns the two ends of a window into the sample that the law is given. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from dpex.autotune.runtime.windows import WindowMark
from dpex.autotune.types import Sample, Settings
from dpex.measure.readable import remainder
from dpex.measure.samples import PoolSample
from dpex.system.run_queue import RunQueueGrowth, RunQueueTimes


@dataclass(frozen=True)
class Window:
    """The two ends of a window; see `dpex.autotune.runtime.windows`."""

    before: WindowMark
    after: WindowMark

    @cached_property
    def ran(self) -> RunQueueGrowth:
        """Times on a CPU, and on run queues, within the window."""
        return self.after.queued.since(self.before.queued)

    @property
    def trainer_cpu_s(self) -> float:
        """CPU time of this process, without the part that fell between two passes."""
        base, look = self.before.look, self.after.look
        part = min(1.0, (look.times.seconds - base.times.seconds) / max(1e-6, look.at - base.at))
        return remainder(self.after.cpu_s, self.before.cpu_s) * max(0.0, part)

    @property
    def trainer_queued_s(self) -> float | None:
        """Seconds in which the training thread could have run and had no CPU; None where the kernel does not tell."""
        return None if self.ran.trainer is None else self.ran.trainer.queued_s

    def sample(self, began_at: float, settings: Settings) -> Sample:
        """All but the machine, the cluster and the GPU, under settings that began at ``began_at``."""
        base, look = self.before.look, self.after.look
        loop = look.times.since(base.times)
        return loop.narrowed(
            Sample,
            at=look.at - began_at,
            settings=replace(settings, local=look.sizes.local, remote=look.sizes.remote),
            epoch=look.epoch,
            ready=look.ready,
            in_flight=look.in_flight,
            batch_bytes=look.batch_bytes,
            pass_batches=look.pass_batches,
            start_s=look.start_s,
            starts_anew=look.starts_anew,
            gpu_stall_s=None if look.gpu_stall_s is None else remainder(look.gpu_stall_s, base.gpu_stall_s or 0.0),
            gpu_steps=max(0, look.gpu_steps - base.gpu_steps),
            gpu_step_s=remainder(look.gpu_step_s, base.gpu_step_s),
            feed_wait_s=remainder(look.feed_wait_s, base.feed_wait_s),
            local=with_queue(look.local.since(base.local), self.ran.workers),
            remote=look.remote.since(base.remote),
        )


def with_queue(pool: PoolSample, ran: RunQueueTimes | None) -> PoolSample:
    """The pool with the time its batches were on run queues, by what those who make them had to wait for a CPU."""
    return pool if ran is None or not pool.tickets else replace(pool, queued_s=pool.cpu_s * ran.delay)

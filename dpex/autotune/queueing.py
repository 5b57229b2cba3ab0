"""What of a window was work, and what was queueing for a CPU. PURE.

Where the kernel tells how long somebody could have run and had no CPU, that is taken off: what is left is the work as
it is on an idle machine. Where it does not, a full machine is reckoned with, by ``wait_s``: how long a local worker
waits for anything but a CPU in each batch, as far as that is known.
"""

from __future__ import annotations

from dataclasses import replace

from dpex.autotune.constants.measuring import ESTIMATOR
from dpex.autotune.felt import FeltSample
from dpex.autotune.types import Sample
from dpex.core.durations import remainder
from dpex.measure.samples import PoolSample


def whole(sample: Sample) -> Sample:
    """The consumer's three times, made to add up to the window."""
    total = sample.wait_s + sample.own_s + sample.work_s
    if total <= 0 or not 0.5 * sample.seconds < total < 2.0 * sample.seconds:
        return sample
    factor = sample.seconds / total
    return replace(sample, wait_s=sample.wait_s * factor, own_s=sample.own_s * factor, work_s=sample.work_s * factor)


def is_saturated(sample: Sample) -> bool:
    """Whether the CPUs that this process may use were mostly in use."""
    used = sample.local.cpu_s + sample.machine.trainer_cpu_s
    return used / max(1e-9, sample.seconds) + sample.machine.others >= ESTIMATOR.saturated * sample.machine.cpus


def is_held_up(sample: Sample) -> bool:
    """Whether all waited for one batch, while those after it were long ready."""
    return not sample.batches and sample.head_s > 0.5 * sample.seconds


def slowdown(sample: Sample, wait_s: float) -> float:
    """How many times longer than itself CPU work took: who wants a CPU gets an equal part of them."""
    local, machine = sample.local, sample.machine
    used = local.cpu_s + machine.trainer_cpu_s
    if local.queued_s is not None or machine.trainer_queued_s is not None:
        queued = (local.queued_s or 0.0) + (machine.trainer_queued_s or 0.0)
        return 1.0 + queued / used if used > 0 else 1.0
    if not is_saturated(sample):
        return 1.0
    crowd = _at_it(local, wait_s) + machine.trainer_cpu_s / max(1e-9, sample.seconds) + machine.others
    crowd = max(crowd, machine.runnable or 0.0)  # others may want more CPUs than they get
    return max(1.0, crowd / max(1e-9, machine.cpus))


def _at_it(local: PoolSample, wait_s: float) -> float:
    """How many CPUs local workers have or want, on average; who else there is waits for something else."""
    if not local.tickets or local.busy_s <= 0:
        return 0.0
    return local.running * max(local.cpu_s, local.busy_s - wait_s * local.tickets) / local.busy_s


def knows_waiting(sample: Sample) -> bool:
    """Whether the window tells `waiting` rather than what was believed before it."""
    return sample.local.queued_s is not None or not is_saturated(sample)


def waiting(sample: Sample, wait_s: float) -> float:
    """Waiting of local workers for anything but a CPU, in all, to be added to a mean. It may be below 0.

    What was queued is uncertain by a part of itself. Where it is more than there is, waiting is below 0, as much as it
    is above 0 elsewhere: else noise would add up to waiting on a full machine. Several threads of a batch queue beside
    each other, which says nothing: hence a bound.
    """
    apart = remainder(sample.local.busy_s, sample.local.cpu_s)
    return max(-ESTIMATOR.uncertain_queueing * apart, apart - _queued_locally(sample, wait_s))


def waiting_error(sample: Sample, wait_s: float) -> float:
    """Seconds by which `waiting` may be off either way: the part of the queueing by which that is uncertain."""
    return ESTIMATOR.uncertain_queueing * _queued_locally(sample, wait_s)


def _queued_locally(sample: Sample, wait_s: float) -> float:
    """Seconds for which the batches of local workers queued for a CPU, in all."""
    local = sample.local
    return local.cpu_s * (slowdown(sample, wait_s) - 1.0) if local.queued_s is None else local.queued_s


def queued_here(sample: Sample) -> float:
    """Queueing for a CPU while the training process made batches."""
    queued = sample.made_here.queued_s
    return _queued_in_next(sample) if queued is None else queued


def taking_over(sample: Sample) -> float:
    """Seconds of the training loop's own work in ``next()``, as they would be with a CPU always free."""
    return remainder(sample.own_s, _queued_in_next(sample))


def _queued_in_next(sample: Sample) -> float:
    """Of the training thread's queueing for a CPU the part that fell into its own work in ``next()``."""
    inside = sample.work_s + sample.own_s
    return (sample.machine.trainer_queued_s or 0.0) * sample.own_s / inside if inside > 0 else 0.0


def stepping(sample: Sample, felt: FeltSample, wait_s: float) -> float:
    """Seconds of steps in the window, as they would be with a CPU always free.

    A loop that runs ahead of its GPU loses as little by queueing for a CPU as by waiting for a batch.
    """
    unqueued_s = _unqueued(sample, wait_s)
    return unqueued_s if felt.part >= 1.0 else sample.work_s - felt.part * (sample.work_s - unqueued_s)


def _unqueued(sample: Sample, wait_s: float) -> float:
    """The same where all that holds up the training loop holds up its steps."""
    queued = sample.machine.trainer_queued_s
    inside = sample.work_s + sample.own_s
    here = sample.made_here
    if queued is not None and here.tickets and here.queued_s is not None:
        return remainder(sample.work_s, remainder(queued, here.queued_s))
    if queued is not None:
        return remainder(sample.work_s, queued * sample.work_s / inside) if inside > 0 else 0.0
    if not is_saturated(sample):
        return sample.work_s
    crowding = max(0.0, (_at_it(sample.local, wait_s) + 1.0 + sample.machine.others) / sample.machine.cpus - 1.0)
    cpu_s = step_cpu_s(sample)
    return sample.work_s - min(cpu_s * crowding, sample.work_s - cpu_s)


def step_cpu_s(sample: Sample) -> float:
    """CPU seconds of the training process in its steps."""
    own_cpu = sample.made_here.cpu_s if sample.made_here.tickets else sample.own_s
    return min(remainder(sample.machine.trainer_cpu_s, own_cpu), sample.work_s)

"""What a rank tells the other ranks on its machine, and what their division makes of a window. PURE."""

from __future__ import annotations

from dataclasses import replace

from dpex.autotune.felt import by_events
from dpex.autotune.types import Sample
from dpex.core.rank_shares import RankLoad


def load_of(sample: Sample) -> RankLoad | None:
    """What the window says of the rank's need of CPUs; None without a batch.

    What is lost is the GPU's time where that is known, and the training loop's else.
    """
    if not sample.batches or sample.seconds <= 0:
        return None
    felt = sample if sample.gpu_stall_s is None else by_events(sample).sample
    cpu_s = sample.local.cpu_s + sample.machine.trainer_cpu_s
    return RankLoad(cpu_s=cpu_s / sample.batches, rate=sample.rate, wait=felt.wait, used=cpu_s / sample.seconds)


def with_cpus(sample: Sample, cpus: float) -> Sample:
    """The window on a machine of which so many CPUs are this rank's; others keep the same part of them busy."""
    machine = sample.machine
    part = machine.others / machine.cpus if machine.cpus > 0 else 0.0
    return replace(sample, machine=replace(machine, cpus=cpus, others=part * cpus))

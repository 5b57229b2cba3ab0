"""What a tuner reads of a simulated training process.

Apart from `benchmarks.simulation.rank`, whose code is part of the keys of kept results (`benchmarks.simulation.kept`),
so that a change of the record leaves these as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dpex.measure.reading import Reading
from dpex.measure.settings import LOCAL, REMOTE

if TYPE_CHECKING:
    from benchmarks.simulation.rank import Rank
    from benchmarks.simulation.simulator import Simulator


def reading_of(rank: Rank, simulator: Simulator) -> Reading:
    """Return the reading of a rank's loader now."""
    now = rank.clock()
    near, far = (sum(worker.up and worker.remote == remote for worker in rank.workers) for remote in (False, True))
    link: dict[str, Any] = {"sending_s": rank.sending_s, "round_trip_s": simulator.world.rtt_s, "links": int(far > 0)}
    pools = {
        LOCAL: rank.local.reading(len(rank.workers) - rank.remotes, near),
        REMOTE: replace(rank.remote.reading(rank.remotes, far), **link),
    }
    return Reading(
        **rank.tally.counts(now),
        at=now,
        epoch=rank.epoch,
        settings=rank.settings,
        ready=len(rank.ready),
        in_flight=len(rank.making) + len(rank.pending),
        batch_bytes=simulator.work.batch_bytes,
        pools=pools,
        **_of_gpu(rank),
        **_of_passes(rank, simulator),
    )


def _of_gpu(rank: Rank) -> dict[str, Any]:
    if rank.gpu is None:
        return {}
    steps = rank.gpu.steps
    return {"gpu_running_stall_s": rank.gpu.stall_s, "gpu_steps": steps.number, "gpu_steps_s": steps.seconds}


def _of_passes(rank: Rank, simulator: Simulator) -> dict[str, Any]:
    epochs = simulator.world.epochs
    if epochs is None:
        return {}
    return {"pass_batches": epochs.batches, "start_s": rank.start_s, "starts_anew": not epochs.is_kept}

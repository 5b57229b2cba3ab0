"""Open the pool of a training that shares batches."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dpex.system.ray_package import is_ray_connected
from dpex.system.user_warnings import warn

if TYPE_CHECKING:
    from dpex.pools.local.worker_process import WorkerPlan
    from dpex.pools.share.facts import Facts
    from dpex.pools.share.place import MeetingPlace
    from dpex.pools.share.pool import SharedPool


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a loader shares, and with whom.

    kept_bytes: of made batches, for trainings that are behind. passes_before: those over the data that this loader has
    begun before. index_sampler: what draws the samples of a batch.
    """

    name: str
    kept_bytes: int
    passes_before: int
    index_sampler: Any

    def is_possible(self) -> bool:
        """Whether there can be a producer here; warns if not."""
        if is_ray_connected():
            warn(
                f"share={self.name!r}: Ray is connected in this process, whose threads make forking it unsafe, so this "
                "training makes its batches itself"
            )
            return False
        return True

    def key(self, environment: Mapping[str, str]) -> str:
        """What trainings must have alike to meet at all: the name, the pass, and which part of the data their rank
        reads."""
        ranks = environment.get("RANK", "0"), environment.get("WORLD_SIZE", "1")
        return "\n".join((self.name, str(self.passes_before), *ranks))

    def open(self, plan: WorkerPlan, first_workers: int, context: Any) -> SharedPool:
        """The pool of one pass. Raises ShareError, and OSError where the system refuses."""
        from dpex.pools.share.facts import facts_of
        from dpex.pools.share.place import MeetingPlace
        from dpex.pools.share.pool import SharedPool, SharePlan
        from dpex.pools.share.start import start_producer

        facts = facts_of(self.name, plan.setup, self.index_sampler)
        place = MeetingPlace(self.key(os.environ), os.environ)

        def start(listener: socket.socket) -> None:
            start_producer(listener, partial(_produce, listener, place, facts, plan, context))

        return SharedPool(SharePlan(facts=facts, place=place, kept_bytes=self.kept_bytes, start=start), first_workers)


def _produce(listener: socket.socket, place: MeetingPlace, facts: Facts, plan: WorkerPlan, context: Any) -> None:
    """Body of a producer."""
    from dpex.pools.local.fork_server import ForkStarter
    from dpex.pools.share.producer import Producer, ProducerPool

    place.forget_lock()
    Producer(listener, place, facts, ProducerPool(ForkStarter(context, plan))).run()

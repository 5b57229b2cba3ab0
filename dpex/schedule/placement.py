"""The worker pools as an epoch knows them, and the instructions to them. PURE.

`Placement` owns four collections, each under this one name:

* ``pools``: the status of each pool, as it was last reported;
* ``wanted``: the number of workers that each pool was asked for;
* ``dirty``: the queues that may have something to send;
* ``instructions``: what is to be performed, in order.

`EngineState` and its parts read and write them here. No other object keeps one of them.
"""

from __future__ import annotations

from typing import NamedTuple

from dpex.schedule.events import PoolStatus
from dpex.schedule.instructions import Instruction, Scale


class Place(NamedTuple):
    """A worker: the pool's name and the worker's number in it."""

    pool: str
    worker: int


class Placement:
    """See the module. Other threads may read ``pools`` and ``wanted``."""

    def __init__(self) -> None:
        self.pools: dict[str, PoolStatus] = {}
        self.wanted: dict[str, int] = {}
        self.dirty: set[int] = set()
        self.instructions: list[Instruction] = []

    def ask(self, pool: str, count: int, *, optional: bool = False) -> None:
        """Ask a pool for ``count`` workers."""
        self.wanted[pool] = count
        self.instructions.append(Scale(pool, count, optional))

    def places(self) -> list[Place]:
        """Return all workers that take tickets."""
        return [Place(name, worker) for name, status in self.pools.items() for worker in status.workers]

    def serves(self, place: Place) -> bool:
        """Return True if the worker takes instructions. One that has ended takes none, even before that is reported."""
        return place.worker in self.pools[place.pool].workers

    def serving(self) -> int:
        """Return the number of workers that take tickets."""
        return sum(len(status.workers) for status in self.pools.values())

    def running(self) -> int:
        """Return the number of workers that run, those that are about to leave included."""
        return sum(status.running for status in self.pools.values())

"""How many workers each pool is asked for: at the start, when sizes change, and when the cluster is lost. PURE.

``wanted`` is the plan; what the system was asked for and what runs are the pools' own status.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dpex.core.events import PoolStatus, ScaleRefused
from dpex.core.instructions import Instruction, Raise, Say, Scale
from dpex.core.logical_workers import LogicalWorkers
from dpex.core.names import LOCAL, REMOTE
from dpex.core.prefetch import Sizes
from dpex.errors import WorkerDiedError


class Scaling:
    """Workers wanted.

    Args:
        sizes: what is wanted from the start.
        logicals: knows which workers there are.
        pools: status of each pool.
        wanted: workers wanted by pool, written here.
        out: where instructions go.

    ``sizes``: what is wanted now. ``refused``: why a tuner cannot have remote workers, if so. Both may be read from any
    thread. ``has_one_stream``: a single worker is asked for, as there is one stream, or no other may begin.
    """

    def __init__(
        self,
        sizes: Sizes,
        logicals: LogicalWorkers,
        pools: Mapping[str, PoolStatus],
        wanted: dict[str, int],
        out: list[Instruction],
    ) -> None:
        self.sizes = sizes
        self.has_one_stream = False
        self._pools = pools
        self._wanted = wanted
        self._out = out
        self._former = sizes
        self._logicals = logicals
        self._took_over = 0
        """Local workers that took over from the cluster, and leave when that is there again."""
        self.refused: str | None = None

    def open(self) -> None:
        """Ask for what is wanted from the start."""
        for name, count in self._asked(self.sizes):
            if count > 0:
                self._ask(name, count)

    def _asked(self, sizes: Sizes) -> tuple[tuple[str, int], tuple[str, int]]:
        return _by_pool(one_worker(sizes) if self.has_one_stream else sizes)

    def resize(self, sizes: Sizes) -> None:
        """Ask for other numbers.

        A tuner's request for remote workers that cannot be granted must not end the user's training.
        """
        self._former, self.sizes = self.sizes, sizes
        self._took_over = 0
        for name, count in self._asked(sizes):
            if count > 0 or name in self._wanted:
                self._ask(name, count, optional=name == REMOTE and sizes.tuned_prefetch is not None)

    def keep_workers(self, sizes: Sizes) -> None:
        """Take over the prefetch only: logical workers stay on their workers as long as the iterator lives."""
        self.sizes = replace(sizes, local=self.sizes.local, remote=self.sizes.remote)

    def _ask(self, name: str, count: int, *, optional: bool = False) -> None:
        self._wanted[name] = count
        self._out.append(Scale(name, count, optional))

    def cannot_be_had(self, event: ScaleRefused) -> None:
        """A pool has no workers for this loader; where it was optional, there are local ones instead."""
        pool = event.scale.pool
        if pool not in self._pools:
            self._wanted.pop(pool, None)
        if not event.scale.optional:
            self.sizes = self._former
            return
        self._out.append(Say(f"no {pool} workers for this loader: {event.why}", warning=False))
        self.refused = event.why
        self.sizes = replace(self.sizes, remote=0, local=self.sizes.local or 1)
        self._ask(LOCAL, self.sizes.local)

    def take_over_locally(self, cpus: int) -> bool:
        """If no cluster is left, as many workers as this machine has CPUs for do its work; whether it is so."""
        remote = self._pools.get(REMOTE)
        if remote is None or remote.failed is None or self._logicals.places() or self._wanted.get(LOCAL):
            return False
        count = max(1, min(self.sizes.remote + self.sizes.local, cpus))
        self._out.append(Say(f"no remote worker is left ({remote.failed}): {count} local workers take over"))
        self._ask(LOCAL, count)
        self.sizes = replace(self.sizes, local=count)
        self._took_over = count if self.sizes.tuned_prefetch is None else 0
        return True

    def hand_back(self) -> None:
        """A worker came up: where as many remote ones run as took over locally, or as are wanted, those leave."""
        remote = self._pools.get(REMOTE)
        if not self._took_over or remote is None or remote.running < min(self._took_over, self.sizes.remote):
            return
        self._out.append(Say("remote workers run again: the local workers that took over leave", warning=False))
        self._took_over = 0
        self.sizes = replace(self.sizes, local=0)
        self._ask(LOCAL, 0)

    def give_up_if_nobody_can_come(self) -> None:
        """Every pool that is wanted has failed, and nobody is left: waiting would be for ever."""
        wanted = [(name, status) for name, status in self._pools.items() if self._wanted.get(name)]
        reasons = [_why_none_can_come(name, status) for name, status in wanted]
        if wanted and all(reasons) and not any(status.requested for _, status in wanted):
            self._out.append(Raise(WorkerDiedError("; ".join(reasons))))


def _why_none_can_come(name: str, status: PoolStatus) -> str:
    if status.failed is None and status.most == 0:
        return f"no {name} worker can be started: {status.why_most}{_REMEDY[name]}"
    return status.failed or ""


_REMEDY = {LOCAL: "; num_workers=0 makes batches in the training process", REMOTE: ""}


def one_worker(sizes: Sizes) -> Sizes:
    """The same with one worker instead of several."""
    return replace(sizes, local=min(1, sizes.local), remote=0 if sizes.local else min(1, sizes.remote))


def _by_pool(sizes: Sizes) -> tuple[tuple[str, int], tuple[str, int]]:
    return (LOCAL, sizes.local), (REMOTE, sizes.remote)

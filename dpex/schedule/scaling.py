"""The number of workers that each pool is asked for: at the start, after a resize, and without a cluster. PURE.

`Placement.wanted` is the plan. What the system was asked for and what runs are in each pool's own status.
"""

from __future__ import annotations

from dataclasses import replace

from dpex.errors import WorkerDiedError
from dpex.schedule.events import NO_STATUS, PoolStatus, ScaleRefused
from dpex.schedule.instructions import Raise, Say
from dpex.schedule.names import LOCAL, REMOTE
from dpex.schedule.placement import Placement
from dpex.schedule.prefetch import Sizes


class Scaling:
    """Workers wanted.

    Args:
        placement: The pools, and what they are asked for.
        sizes: Workers and prefetch from the start.

    Attributes:
        sizes: Workers and prefetch that are wanted now. Any thread may read it.
        refused: Why a tuner cannot have remote workers, or None. Any thread may read it.
        has_one_stream: A single worker is asked for, because one stream is read, or no other may begin yet.
    """

    def __init__(self, placement: Placement, sizes: Sizes) -> None:
        self._placement = placement
        self.sizes = sizes
        self.has_one_stream = False
        self.refused: str | None = None
        self._former = sizes
        self._took_over = 0
        """Local workers that took over from the cluster, and leave when it is there again."""

    def open(self) -> None:
        """Ask for what is wanted from the start."""
        for name, count in self._asked(self.sizes):
            if count > 0:
                self._placement.ask(name, count)

    def _asked(self, sizes: Sizes) -> tuple[tuple[str, int], tuple[str, int]]:
        return _by_pool(one_worker(sizes) if self.has_one_stream else sizes)

    def resize(self, sizes: Sizes) -> None:
        """Ask for other numbers.

        A tuner's request for remote workers that cannot be granted must not end the user's training.
        """
        self._former, self.sizes = self.sizes, sizes
        self._took_over = 0
        for name, count in self._asked(sizes):
            if count > 0 or name in self._placement.wanted:
                self._placement.ask(name, count, optional=name == REMOTE and sizes.tuned_prefetch is not None)

    def keep_workers(self, sizes: Sizes) -> None:
        """Take over the prefetch only: logical workers stay on their workers as long as the iterator lives.

        A pool that could not start all of its workers is asked for them again.
        """
        self.sizes = replace(sizes, local=self.sizes.local, remote=self.sizes.remote)
        for name, count in self._placement.wanted.items():
            status = self._placement.pools.get(name, NO_STATUS)
            if status.failed is not None or status.most is not None:
                self._placement.ask(name, count)

    def cannot_be_had(self, event: ScaleRefused) -> None:
        """Take in that a pool has no workers for this loader. If they were optional, local ones are asked for."""
        pool = event.scale.pool
        if pool not in self._placement.pools:
            self._placement.wanted.pop(pool, None)
        if not event.scale.optional:
            self.sizes = self._former
            return
        self._placement.instructions.append(Say(f"no {pool} workers for this loader: {event.why}", warning=False))
        self.refused = event.why
        self.sizes = replace(self.sizes, remote=0, local=self.sizes.local or 1)
        self._placement.ask(LOCAL, self.sizes.local)

    def take_over_locally(self, cpus: int) -> bool:
        """If no remote worker is left, ask for local ones, as many as ``cpus`` at the most. Return True if so."""
        remote = self._placement.pools.get(REMOTE)
        if remote is None or remote.failed is None or self._placement.serving() or self._placement.wanted.get(LOCAL):
            return False
        count = max(1, min(self.sizes.remote + self.sizes.local, cpus))
        self._placement.instructions.append(
            Say(f"no remote worker is left ({remote.failed}): {count} local workers take over")
        )
        self._placement.ask(LOCAL, count)
        self.sizes = replace(self.sizes, local=count)
        self._took_over = count if self.sizes.tuned_prefetch is None else 0
        return True

    def hand_back(self) -> None:
        """Let local workers that took over leave, once as many remote ones run as took over, or as are wanted."""
        remote = self._placement.pools.get(REMOTE)
        if not self._took_over or remote is None or remote.running < min(self._took_over, self.sizes.remote):
            return
        self._placement.instructions.append(
            Say("remote workers run again: the local workers that took over leave", warning=False)
        )
        self._took_over = 0
        self.sizes = replace(self.sizes, local=0)
        self._placement.ask(LOCAL, 0)

    def give_up_without_workers(self) -> None:
        """End the epoch if every pool that is wanted has failed and no worker is left, as it would wait for ever."""
        wanted = [(name, status) for name, status in self._placement.pools.items() if self._placement.wanted.get(name)]
        reasons = [_why_none_can_come(name, status) for name, status in wanted]
        if wanted and all(reasons) and not any(status.requested for _, status in wanted):
            self._placement.instructions.append(Raise(WorkerDiedError("; ".join(reasons))))


def _why_none_can_come(name: str, status: PoolStatus) -> str:
    if status.failed is None and status.most == 0:
        return f"no {name} worker can be started: {status.why_most}{_REMEDY[name]}"
    return status.failed or ""


_REMEDY = {LOCAL: "; num_workers=0 makes batches in the training process", REMOTE: ""}


def one_worker(sizes: Sizes) -> Sizes:
    """Return ``sizes`` with one worker instead of several."""
    return replace(sizes, local=min(1, sizes.local), remote=0 if sizes.local else min(1, sizes.remote))


def _by_pool(sizes: Sizes) -> tuple[tuple[str, int], tuple[str, int]]:
    return (LOCAL, sizes.local), (REMOTE, sizes.remote)

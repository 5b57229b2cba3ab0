"""How many hosts each lane is asked for: when it is opened, when sizes change, and when the cluster is lost.

Used by the thread that holds the engine's lock; ``refused`` may be read from any. A lane is made when it is first
needed and lives as long as the engine, which closes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from dpex.core.prefetch import Sizes
from dpex.engine.assignment import Tenancy
from dpex.engine.dispatch import Dispatch
from dpex.errors import WorkerDiedError
from dpex.pools.base import Lane
from dpex.system.cpus import static_worker_count
from dpex.system.user_warnings import warn

logger = logging.getLogger("dpex")

LaneName = Literal["local", "remote"]


class Staffing:
    """``lanes`` are the engine's own. ``refused``: why a tuner cannot have remote workers, if so."""

    def __init__(
        self,
        make_lane: Callable[[LaneName, int], Lane],
        lanes: dict[str, Lane],
        tenancy: Tenancy,
        dispatch: Dispatch,
    ) -> None:
        self._make_lane = make_lane
        self._lanes = lanes
        self._tenancy = tenancy
        self._dispatch = dispatch
        self.refused: str | None = None

    def open(self, sizes: Sizes) -> None:
        """Make the lanes that are needed from the start."""
        for name, count in _by_lane(sizes):
            if count > 0:
                self._ask(name, count, 0)

    def _ask(self, name: LaneName, count: int, epoch: int) -> None:
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = self._make_lane(name, count)
            lane.new_epoch(max(0, epoch))
            self._dispatch.add_lane(name)
        else:
            lane.resize(count)

    def grant(self, sizes: Sizes, epoch: int) -> Sizes:
        """Ask for these; returns what was asked for in the end.

        A tuner's wish for remote workers that cannot be granted must not end the user's training.
        """
        for name, count in _by_lane(sizes):
            if count > 0 or name in self._lanes:
                sizes = self._grant_lane(sizes, name, count, epoch)
        return sizes

    def _grant_lane(self, sizes: Sizes, name: LaneName, count: int, epoch: int) -> Sizes:
        try:
            self._ask(name, count, epoch)
        except Exception as error:
            if name == "local" or sizes.depth is None:
                raise
            logger.info("no remote workers for this loader: %s", error)
            self.refused = str(error)
            sizes = replace(sizes, remote=0, local=sizes.local or 1)
            self._ask("local", sizes.local, epoch)
        return sizes

    def take_over_locally(self, sizes: Sizes, epoch: int) -> Sizes | None:
        """No cluster is left: as many workers as this machine has CPUs for do the work. None: it is not so."""
        remote, local = self._lanes.get("remote"), self._lanes.get("local")
        if remote is None or remote.failed is None or self._tenancy.places() or (local and local.counts.wanted):
            return None
        count = max(1, min(sizes.remote + sizes.local, static_worker_count()))
        warn(f"no remote worker is left ({remote.failed}): {count} local workers take over")
        self._ask("local", count, epoch)
        return replace(sizes, local=count)

    def give_up_if_nobody_can_come(self) -> None:
        """Every lane that is wanted has failed, and nobody is left: waiting would be for ever.

        Raises:
            WorkerDiedError: it is so.
        """
        wanted = [lane for lane in self._lanes.values() if lane.counts.wanted]
        reasons = [_why_none_can_come(lane) for lane in wanted]
        if wanted and all(reasons) and not any(lane.counts.requested for lane in wanted):
            raise WorkerDiedError("; ".join(reasons))


def _why_none_can_come(lane: Lane) -> str:
    if lane.failed is None and lane.counts.most == 0:
        return f"no {lane.name} worker can be started: {lane.counts.why_most}"
    return lane.failed or ""


def _by_lane(sizes: Sizes) -> tuple[tuple[LaneName, int], tuple[LaneName, int]]:
    return ("local", sizes.local), ("remote", sizes.remote)

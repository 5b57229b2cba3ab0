"""What may not be done: hard walls, and changes that were tried and did not help."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dpex.autotune.checked import MOST_WORKERS
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.policy import Bounds
from dpex.autotune.types import Sample

_DEEPEST = 4096
_BESIDE = 2.0
"""Workers beyond those that would fill the CPUs if no two of them waited at once, where batches mostly wait: so many
times as many. Waits fall together by chance, and where slow batches come in a row."""


@dataclass
class _Failure:
    until: float
    times: int
    value: int


class Guard:
    """Bounds from limits, memory and what the cluster has; and the memory of what did not help."""

    def __init__(self, config: AutotuneConfig) -> None:
        self._config = config
        self._failures: dict[str, _Failure] = {}

    # -- walls ---------------------------------------------------------------------------------------------------

    def bounds(self, sample: Sample, batch_bytes: float, waiting: float) -> Bounds:
        """What is worth a look. ``waiting``: share of a local worker's time that is not CPU."""
        walls = self.walls(sample, batch_bytes)
        if self._config.max_local is not None:
            return walls
        at_once = 1.0 + _BESIDE * waiting
        by_cpu = math.ceil(at_once * sample.host.cpus / max(0.02, 1.0 - waiting)) + 1
        local = min(by_cpu, self._config.max_waiting, walls.local)
        return replace(walls, local=max(local, self._config.min_local))

    def walls(self, sample: Sample, batch_bytes: float) -> Bounds:
        """What no decision goes beyond."""
        config, host = self._config, sample.host
        local = MOST_WORKERS if config.max_local is None else config.max_local
        memory = math.inf
        if host.memory_free is not None:
            memory = host.memory_free + sample.held * batch_bytes + sample.local.requested * host.worker_bytes
        if host.worker_bytes > 0 and math.isfinite(memory):
            local = min(local, max(1, int((memory - batch_bytes) / host.worker_bytes)))
        there = sample.remote
        room = there.requested - there.unplaced + there.room if there.room is not None else 0
        remote = room if config.max_remote is None else min(config.max_remote, room)
        depth = _DEEPEST if config.max_depth is None else config.max_depth
        if host.batch_budget is not None and batch_bytes > 0:
            depth = max(1, min(depth, int(host.batch_budget / batch_bytes)))
        return Bounds(
            local=max(local, config.min_local),
            remote=max(remote, config.min_remote),
            depth=depth,
            memory=memory,
            worker_bytes=host.worker_bytes,
            batch_bytes=batch_bytes,
            least_local=config.min_local,
            least_remote=config.min_remote,
        )

    # -- memory --------------------------------------------------------------------------------------------------

    def remember(self, kind: str, now: float, value: int = 0) -> None:
        """A change of this kind, to this number, did not help; each time in a row it is remembered for longer."""
        times = self._failures[kind].times + 1 if kind in self._failures else 1
        keep_s = self._config.remember_s * min(10, 2 ** (times - 1))
        self._failures[kind] = _Failure(now + keep_s, times, value)

    def forget(self) -> None:
        """The work has changed: everything may be tried again."""
        self._failures.clear()

    def forbids(self, kind: str, now: float, value: int = 0) -> bool:
        """Whether such a change failed lately; where fewer workers were too few, a larger number may still do."""
        failure = self._failures.get(kind)
        if failure is None or now >= failure.until:
            return False
        return not kind.startswith("fewer") or value <= failure.value

"""Counts of one measurement window of a simulated rank."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dpex.measure.samples import LaneSample

_SERVICES_KEPT = 32


@dataclass
class WindowCounts:
    """What happened in a window."""

    batches: int = 0
    wait_s: float = 0.0
    own_s: float = 0.0
    work_s: float = 0.0
    head_s: float = 0.0
    steps: int = 0
    steps_squared: float = 0.0
    trainer_cpu_s: float = 0.0
    trainer_queued_s: float = 0.0
    lanes: dict[str, list[float]] = field(default_factory=dict)
    services: dict[str, list[float]] = field(default_factory=dict)

    def step_spread(self) -> float | None:
        """Standard deviation over mean of the steps that ended in it."""
        mean = self.work_s / self.steps if self.steps else 0.0
        if self.steps < 2 or mean <= 0:
            return None
        return math.sqrt(max(0.0, self.steps_squared / self.steps / mean**2 - 1.0))

    def made(
        self, remote: bool, cpu_s: float, encode_s: float, wall_s: float, queued_s: float, rng: random.Random
    ) -> None:
        """A worker made a batch; what of ``wall_s`` is not encoding counts as reading."""
        lane = "remote" if remote else "local"
        self._add(lane, (wall_s - encode_s, encode_s, cpu_s + encode_s, queued_s), wall_s, rng)

    def made_here(self, wall_s: float, cpu_s: float, queued_s: float) -> None:
        """The training process made a batch."""
        self.trainer_cpu_s += cpu_s
        self.trainer_queued_s += max(0.0, queued_s)
        self._add("here", (wall_s, 0.0, cpu_s, max(0.0, queued_s)), wall_s, None)

    def _add(self, lane: str, stages_s: Sequence[float], wall_s: float, rng: random.Random | None) -> None:
        sums = self.lanes.setdefault(lane, [0, 0.0, 0.0, 0.0, 0.0])
        sums[0] += 1
        for place, stage_s in enumerate(stages_s, 1):
            sums[place] += stage_s
        kept = self.services.setdefault(lane, [])
        if len(kept) < _SERVICES_KEPT:
            kept.append(wall_s)
        elif rng is not None and (place := rng.randrange(int(sums[0]))) < _SERVICES_KEPT:
            kept[place] = wall_s

    def lane(
        self,
        name: str,
        noise: Callable[[float], float],
        *,
        knows_queue: bool,
        requested: int = 0,
        running: int = 0,
        room: int | None = None,
        unplaced: int = 0,
    ) -> LaneSample:
        """The lane's part of a `Sample`."""
        tickets, read_s, encode_s, cpu_s, queued_s = self.lanes.get(name, [0, 0.0, 0.0, 0.0, 0.0])
        return LaneSample(
            requested=requested,
            running=running,
            tickets=int(tickets),
            read_s=noise(read_s),
            encode_s=noise(encode_s),
            cpu_s=noise(cpu_s),
            queued_s=noise(queued_s) if knows_queue else None,
            services_s=tuple(self.services.get(name, ())),
            room=room,
            unplaced=unplaced,
        )

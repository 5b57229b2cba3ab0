"""What `dpex.autotune.runtime.tuner` does for a loader, done for a simulated one on virtual time.

Windows begin and end by the tuner's own rules, and are measured by its own code: only the numbers come from
the simulator. So a trial costs here what it costs in a training run.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.simulation.history import Mark
from benchmarks.simulation.readings import reading_of
from benchmarks.simulation.steering import Steering
from dpex.autotune.constants import SHORTEST_WINDOW_S
from dpex.autotune.runtime.windows import MeasurementWindows
from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import EngineReport, Reading
from dpex.measure.settings import LOCAL, REMOTE
from dpex.system.meter import OTHERS_EVERY_S, OTHERS_FIRST_S, MachineCounts, QueueTimes

if TYPE_CHECKING:
    from benchmarks.simulation.rank import Rank
    from benchmarks.simulation.simulator import Simulator

_NOISY = ("blocked_s", "next_busy_s", "stepping_s", "straggler_s")
_NOISY_OF_POOLS = ("load_s", "encode_s", "load_cpu_s")
_WORKERS, _TRAINER = 1, 2


class Tuning:
    """Looks at a rank, has its steering decide, and carries that out."""

    def __init__(self, simulator: Simulator, rank: Rank, steering: Steering, seed: int, interval_s: float) -> None:
        self._simulator = simulator
        self._loop = simulator.loop
        self._rank = rank
        self._steering = steering
        self._interval_s = interval_s
        self._errors = random.Random(f"{seed} error")
        self._windows = MeasurementWindows(self._look)
        self._ended_at = self._others_at = 0.0
        self._others_s = self._others = 0.0
        self._engine = rank.engine

    def begin(self) -> None:
        """Look soon."""
        self._loop.after(SHORTEST_WINDOW_S, self._turn)

    def _turn(self) -> None:
        if self._engine != self._rank.engine:
            self._windows.forget(self._engine)
            self._windows.shorten()
            self._engine = self._rank.engine
        look = EngineReport(reading_of(self._rank, self._simulator))
        found = self._windows.turn([(self._engine, look)])
        if isinstance(found, float):
            self._loop.after(found, self._turn)
            return
        window = self._measured(found)
        self._look_back(window)
        decision = self._steering.step(window)
        if decision is not None:
            self._rank.carry_out(decision)
        self._windows.go_on(window, self._interval_s, is_changed=decision is not None)
        self._loop.after(self._windows.pause_s, self._turn)

    def _look(self, reading: Reading) -> MachineCounts:
        """CPU time and run queues, as the kernel would tell them; the training process has no other thread at work."""
        look = MachineCounts(at=reading.at, cpu_s=self._simulator.ticks(self._rank.trainer_cpu_s))
        if not self._simulator.world.knows_queue:
            return look
        trainer = self._rank.trainer
        workers = {_WORKERS: {_WORKERS: self._rank.local.ran}} if reading.local.running else {}
        return replace(look, queued=QueueTimes(by_pid=workers, here={_TRAINER: trainer}, trainer=trainer))

    # -- what is measured ----------------------------------------------------------------------------------------------

    def _measured(self, window: Reading) -> Reading:
        rank = self._rank
        room, unplaced = self._simulator.room(rank), self._simulator.unplaced(rank)
        noisy = self._with_noise(window, _NOISY)
        local = self._pool(window.local)
        return replace(
            window,
            **noisy,
            at=window.at - rank.began_at,
            settings=replace(rank.settings, local=window.settings.local, remote=window.settings.remote),
            stepped_s=window.stepped_s * (noisy["stepping_s"] / window.stepping_s if window.stepping_s else 1.0),
            pools={LOCAL: local, REMOTE: replace(self._pool(window.remote), room=room, unplaced=unplaced)},
            **self._machine(window),
            **self._gpu(window),
        )

    def _gpu(self, window: Reading) -> dict[str, Any]:
        gpu = self._rank.gpu
        if gpu is None:
            return {}
        stall_s, busy = window.gpu_running_stall_s, gpu.busy_ratio
        kernels = {} if busy is None else {"kernel_s": busy * window.seconds, "kernel_seen_s": window.seconds}
        return {
            **kernels,
            "gpu_running_stall_s": None if stall_s is None else self._noise(stall_s),
            "gpu_steps_s": self._noise(window.gpu_steps_s),
        }

    def _with_noise(self, measured: Reading | PoolReading, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: self._noise(getattr(measured, name)) for name in names}

    def _pool(self, pool: PoolReading) -> PoolReading:
        queued_s = self._noise(pool.queued_s) if pool.queue_known_s else 0.0
        return replace(pool, **self._with_noise(pool, _NOISY_OF_POOLS), queued_s=queued_s)

    def _machine(self, window: Reading) -> dict[str, Any]:
        simulator, world = self._simulator, self._simulator.world
        queued_s, others = window.trainer_queued_s, self._measure_others()
        return {
            "cpus": simulator.granted / world.ranks,
            "others_s": others,
            "others_over_s": 1.0,
            "trainer_cpu_s": self._noise(window.trainer_cpu_s),
            "trainer_queued_s": None if queued_s is None else self._noise(queued_s),
            "memory_free": int((world.memory - simulator.memory) / world.ranks),
            "worker_bytes": world.worker_bytes,
        }

    def _measure_others(self) -> float:
        """CPUs that others kept busy, looked at as seldom as on a real machine."""
        seconds = self._loop.now - self._others_at
        if seconds >= (OTHERS_EVERY_S if self._others_at else OTHERS_FIRST_S):
            others_s = self._simulator.ticks(self._simulator.cpus.taken_by_others())
            self._others = self._noise((others_s - self._others_s) / seconds / self._simulator.world.ranks)
            self._others_s, self._others_at = others_s, self._loop.now
        return self._others

    def _noise(self, value: float) -> float:
        level = self._simulator.world.noise
        return value * max(0.0, self._errors.gauss(1.0, level)) if level else value

    def _look_back(self, window: Reading) -> None:
        """Keep what the history is to tell of a window."""
        history, running = self._rank.history, window.local.running + window.remote.running
        seconds, self._ended_at = self._loop.now - self._ended_at, self._loop.now
        history.local_s += seconds * window.local.running
        history.remote_s += seconds * window.remote.running
        mark = Mark(
            at=self._loop.now,
            seconds=seconds,
            settings=self._rank.settings,
            running=running,
            rate=window.rate,
            wait=window.wait,
            memory=self._rank.most_memory(),
        )
        history.marks.append(mark)

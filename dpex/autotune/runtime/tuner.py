"""Tunes a running loader: takes windows of measurements, asks the law, and carries out its decisions.

One daemon thread ("dpex-tuner") per loader reads the loader's engines while they exist. The thread and the consumer
never wait for each other: the thread reads without the engine's lock, and the consumer's thread carries out its
requests in ``next()``. If `Tuner.turn` outlasts the epoch, for example in a call to Ray, the thread ends after that
turn, and the thread of the next epoch waits for that end. `dpex.autotune.runtime.windows` determines the start and the
end of a window.

The loader and its iterators refer to the tuner, and the tuner refers to neither. The thread refers to the tuner only
during a turn. It ends with the last iterator, with the tuner, or with the interpreter.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.constants import JOIN_S, MOST_WORKERS, ROOM_EVERY_S, SHORTEST_WINDOW_S
from dpex.autotune.law.law import initial_settings
from dpex.autotune.law.wording import named
from dpex.autotune.limits import Limits
from dpex.autotune.runtime.trace import recorder
from dpex.autotune.runtime.windows import MeasurementWindows
from dpex.autotune.supervisor import Supervisor
from dpex.autotune.types import Decision, Reason, Room, RoomFound, RoomWanted
from dpex.measure.reading import EngineReport, Reading
from dpex.measure.settings import LOCAL, REMOTE, WORKER_POOLS, Settings
from dpex.system.clock import Clock, monotonic
from dpex.system.cpus import local_ranks, parts_of_cpus, parts_of_machine, usable_cpus
from dpex.system.gpu.nvml import process_gpus
from dpex.system.meter import MachineMeter, free_memory

logger: logging.Logger = logging.getLogger("dpex")


def cold_start(cpus: float | None = None, ranks: int | None = None, memory: float | None = None) -> Settings:
    """Return the settings that the law starts with, for this rank's part of the CPUs and of the memory.

    Args:
        cpus: The job's CPUs on the machine; None: read from the system.
        ranks: The job's ranks on the machine; None: read from the environment.
        memory: Free bytes of the machine; None: read from the system.
    """
    cpus = usable_cpus() if cpus is None else cpus
    parts = parts_of_cpus(os.environ) if ranks is None else ranks
    ranks = local_ranks(os.environ) if ranks is None else ranks
    memory = free_memory() if memory is None else memory
    share = AutotuneConfig().memory_share
    return initial_settings(Limits(), cpus / parts, memory=None if memory is None else share * memory / ranks)


class Tunable(Protocol):
    """An engine as the tuner uses it."""

    @property
    def closed(self) -> bool:
        """True if the engine has ended."""

    def report(self) -> EngineReport:
        """Return the present state."""

    def request(self, settings: Settings) -> None:
        """Request other settings, which the consumer's thread applies in ``next()``."""


class Tuner:
    """See the module.

    Args:
        config: The configuration.
        start: The settings to begin with.
        limits: Limits of the configuration, the loader and the user.
        room: Returns the cluster's room. The tuner's thread calls it, so it may be slow.
        note: A note for the user on fixed workers, or "".
    """

    def __init__(
        self,
        config: AutotuneConfig,
        start: Settings,
        limits: Limits,
        *,
        room: Room | None = None,
        note: str = "",
        clock: Clock = monotonic,
        machine: MachineMeter | None = None,
    ) -> None:
        self.config = config
        self._limits = limits = limits.with_a_worker() if room is not None else limits.without_remote(start.local)
        self._room = room
        self._clock = clock
        self._machine = machine
        self._asked_for_room_at = 0.0
        self._gpus = process_gpus()
        self._engines: list[Tunable] = []
        self._windows = MeasurementWindows()
        self._began_at: float | None = None
        self._notes: list[Decision] = []
        self._start = start
        self._has_failed = False
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._changing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._recorder = recorder(config)
        self.kernels: Reading = Reading()
        """The sums of NVML's seconds over all windows."""
        self.settings: Settings = limits.clip(start)
        self._law: Supervisor = Supervisor(config, self.settings, limits, recorder=self._recorder)
        if note:
            self._notes.append(_noted(0.0, self.settings, self.settings, "start", note))
            logger.info("auto: %s", note)

    # -- settings ----------------------------------------------------------------------------------------------------

    def _renew(self, why: str, narrow: Callable[[Limits], Limits], **workers: Any) -> None:
        """Replace the law by one with narrower limits, which begins at the present setting with these ``workers``."""
        with self._changing:
            self._limits = limits = narrow(self._limits)
            self.settings = limits.clip(replace(self.settings, **workers))
            self._law = Supervisor(
                self.config, self.settings, limits, recorder=self._recorder, former=self._law, why=why
            )
            self._windows.clear()
            self._request()

    @property
    def decisions(self) -> list[Decision]:
        """The tuner's decisions, the oldest first."""
        return sorted([*self._law.decisions, *self._notes], key=lambda decision: decision.at)

    @property
    def found(self) -> Settings:
        """The setting in force, or the previous setting while the outcome of the latest decision is unknown."""
        for last in self._law.decisions[-1:]:
            if last.outcome is None and last.new == self.settings and last.reason != "limit":
                return last.old
        return self.settings

    @property
    def is_frozen(self) -> bool:
        """True if the user fixed everything, or tuning has failed."""
        return self._has_failed or self._limits.is_fixed

    def pin(self, pins: Mapping[str, int]) -> None:
        """Fix settings to the user's values from now on, and continue to tune all others."""
        why = f"{', '.join(f'{name}={count}' for name, count in pins.items())} is fixed by resize()"
        workers = {name: count for name, count in pins.items() if name in WORKER_POOLS}
        self._renew(why, lambda limits: limits.fixed(**pins), **workers)
        logger.info("auto: %s%s", why, "; nothing is tuned any more" if self.is_frozen else "")

    # -- engines -----------------------------------------------------------------------------------------------------

    def add_engine(self, engine: Tunable) -> None:
        """Tune this engine too. The thread starts with the first engine."""
        self._begin_in_this_process()
        self._engines.append(engine)
        if self._thread is None or self._stop.is_set() or not self._thread.is_alive():
            self._stop = threading.Event()
            self._windows.shorten()
            arguments = (weakref.ref(self), self._stop, self._room, self._thread)
            self._thread = threading.Thread(target=_run, args=arguments, name="dpex-tuner", daemon=True)
            self._thread.start()

    def _begin_in_this_process(self) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._engines, self._thread = [], None
            self._windows, self._changing = MeasurementWindows(), threading.Lock()

    def remove_engine(self, engine: Tunable) -> None:
        """Forget an engine that has ended. The thread ends with the last engine. Idempotent."""
        if self._pid != os.getpid():
            return
        self._engines = [other for other in self._engines if other is not engine]
        self._windows.forget(id(engine))
        if not self._engines:
            self._stop.set()
            if not threading.main_thread().is_alive():  # the program has ended
                self.await_room_request()

    def await_room_request(self) -> None:
        """Wait up to `JOIN_S` seconds for the tuner's thread if it may be calling Ray, before Ray is shut down."""
        thread = self._thread
        if self._room is not None and thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_S)

    # -- windows -----------------------------------------------------------------------------------------------------

    def turn(self) -> float:
        """Read the engines, decide, and return the seconds until the next turn."""
        if self.is_frozen:
            self._law.announce(self._elapsed_s())
            if self._room is not None:
                self._room.rest()
            return self.config.interval_s
        if self._machine is None:
            self._machine = MachineMeter(self._clock)
            self._machine.counts(())
        if self._began_at is None:
            self._began_at = self._asked_for_room_at = self._clock()
        numbered = [(id(engine), engine.report()) for engine in self._engines if not engine.closed]
        window, reports = self._windows.turn(numbered), [report for _, report in numbered]
        if isinstance(window, float):
            self._keep_place(reports)
            return window
        self._step(reports, self._completed(window))
        return self._windows.pause_s

    def _elapsed_s(self) -> float:
        """Seconds since the first reading; 0 before it."""
        return 0.0 if self._began_at is None else self._clock() - self._began_at

    def _completed(self, window: Reading) -> Reading:
        """Return the window with its settings, the machine, the GPU and the cluster."""
        workers = window.settings
        window = replace(
            window,
            at=window.at - (self._began_at or 0.0),
            settings=replace(self.settings, local=workers.local, remote=workers.remote),
            **self._of_machine(window),
            **self._of_gpu(window),
        )
        return self._with_room(window)

    def _of_gpu(self, window: Reading) -> dict[str, Any]:
        """Return the GPU's kernel time in the window, and add it to ``kernels``.

        NVML measures about the last second. The share of that second is used for the whole window.
        """
        busy = self._gpus.busy_ratio() if self._gpus is not None else None
        if busy is None or window.seconds <= 0:
            return {}
        supplied_s = window.seconds if window.ready else 0.0
        found: dict[str, Any] = {"kernel_s": busy * window.seconds, "kernel_seen_s": window.seconds}
        found |= {"kernel_supplied_s": busy * supplied_s, "supplied_s": supplied_s}
        self.kernels = self.kernels.plus(Reading(**found))  # only within passes, because the GPU idles after a pass
        return found

    def _of_machine(self, window: Reading) -> dict[str, Any]:
        """Return the fields about the machine. Free memory is the part of this rank, or of ranks that share batches.

        All ranks see the same free memory and grow at the same time. ``memory_share`` leaves a part to the trainer.
        """
        assert self._machine is not None
        local = window.local
        machine = self._machine.counts(window.pids, local.running, local.sharing_ranks, window.seconds)
        free = machine["memory_free"]
        if free is not None:
            batches = window.ready + min(window.in_flight, local.running + window.remote.running)
            held = batches * window.batch_bytes + local.requested * machine["worker_bytes"]
            free = free / parts_of_machine(os.environ, local.sharing_ranks)
            machine["memory_free"] = int(self.config.memory_share * (free + held) - held)
        return machine

    def _with_room(self, window: Reading) -> Reading:
        remote = window.remote
        if self._room is None or not self._limits.remote:
            return window
        found = self._find_room(self._wanted(remote.requested, remote.running), window.at)
        if found is None:
            return window
        return window.with_pools(
            remote=replace(remote, room=found.more, unplaced=found.unplaced, granted=found.granted)
        )

    def _find_room(self, wanted: RoomWanted, at: float) -> RoomFound | None:
        assert self._room is not None
        self._asked_for_room_at = self._clock()
        found = self._room.find(wanted)
        if found is not None and found.message:
            logger.info("auto: %s", found.message)
            self._notes.append(_noted(at, self.settings, self.settings, "demand", found.message))
        return found

    def _keep_place(self, reports: Sequence[EngineReport]) -> None:
        """Report this loader to the cluster while no window ends, for example before the first batch of a pass.

        A loader whose workers wait for room on the cluster has no batch, and so no window. Other loaders release the
        share of this loader only if it reports.
        """
        is_due = self._clock() - self._asked_for_room_at >= ROOM_EVERY_S
        if self._room is None or not self._limits.remote or not reports or not is_due:
            return
        far = [report.reading.remote for report in reports]
        requested, running = sum(pool.requested for pool in far), sum(pool.running for pool in far)
        self._find_room(self._wanted(requested, running), self._elapsed_s())

    def _wanted(self, requested: int, running: int) -> RoomWanted:
        """Return this loader's demand for the cluster. It requests nodes only up to the user's ``max_remote``."""
        most = self._limits.remote
        useful = self._law.useful_remote(most)
        return RoomWanted(requested=requested, running=running, useful=useful, may_grow=0 < most < MOST_WORKERS)

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _step(self, reports: Sequence[EngineReport], window: Reading) -> None:
        if any(self._learn(report) for report in reports):
            return
        law = self._law
        decision = law.step(window)
        if decision is not None:
            self._carry_out(decision, law)
        self._windows.go_on(window, self.config.interval_s, is_changed=decision is not None)

    def _learn(self, report: EngineReport) -> bool:
        """Take in a limit that an engine has met. Return True if the limit has replaced the law."""
        if report.refused is not None and self._limits.remote:  # the dataset cannot be sent, or the cluster is gone
            local, why = report.reading.settings.local, f"there can be no remote workers: {report.refused}"
            self._renew(why, lambda limits: limits.without_remote(local), **{LOCAL: local, REMOTE: 0})
            return True
        if report.most_local is not None and self._is_news(report.most_local[0]):
            most, reason = report.most_local
            why = f"no more than {most} local workers can be started: {reason}"
            self._renew(why, lambda limits: limits.with_most_local(most))
            logger.info("auto: %s", why)
            return True
        return False

    def _is_news(self, most: int) -> bool:
        """Return True if ``most`` local workers are fewer than the limit, and the limit is not fixed."""
        return self._limits.least_local != self._limits.local > most

    def _carry_out(self, decision: Decision, law: Supervisor) -> None:
        """Carry out a decision of ``law``. Do nothing if the user has fixed a setting since, which replaces the law."""
        with self._changing:
            if law is not self._law:
                return
            self.settings = decision.new
            self._request()
        logger.info("auto: %s", decision.text)  # outside the lock: a log handler may take long

    def give_up(self, error: Exception) -> None:
        """Go back to the last setting that was kept, and stop tuning, because tuning has raised ``error``."""
        with self._changing:
            self._has_failed = True
            old, new = self.settings, self._last_good()
            back = f"Back from {named(old)} to {named(new)}, the last that worked"
            stay = "The present setting stays" if old == new else back
            where = "dpex" if self.config.policy is None else "the policy"
            what = f"Tuning has stopped because of an error in {where}: {error!r}."
            text = f"{what} {stay}, and nothing is tuned any more."
            self._notes.append(_noted(self._elapsed_s(), old, new, "failed", text))
            self.settings = new
            self._request()

    def _last_good(self) -> Settings:
        kept = [d.new for d in self.decisions if d.outcome is not None and d.outcome.kept]
        return self._limits.clip((kept or [self._start])[-1])

    def _request(self) -> None:
        for engine in self._engines:
            if not engine.closed:
                engine.request(self.settings)


def _run(
    reference: weakref.ReferenceType[Tuner], stop: threading.Event, room: Room | None, former: threading.Thread | None
) -> None:
    if former is not None:
        former.join()
    pause_s = SHORTEST_WINDOW_S
    try:
        while not stop.wait(pause_s):
            tuner = reference()
            if tuner is None:
                return
            try:
                pause_s = tuner.turn()
            except Exception as error:
                if not stop.is_set():
                    tuner.give_up(error)
                    logger.exception("auto: %s", tuner.decisions[-1].text)
                return
            del tuner
    finally:
        if room is not None:
            room.rest()


def _noted(at: float, old: Settings, new: Settings, reason: Reason, text: str) -> Decision:
    """Return a decision of the tuner itself, without the law."""
    return Decision(
        at=at, old=old, new=new, reason=reason, text=text, evidence={}, predicted_rate=0.0, predicted_wait=0.0
    )

"""Tunes a running loader: takes windows of measurements, asks the controller, carries out what it decides.

One daemon thread ("dpex-tuner") per loader looks at the loader's engines while there are any. It never waits for the
consumer and never makes it wait: what it reads it reads without the engine's lock, and what it wishes the consumer's
thread carries out within its next turn. `dpex.autotune.runtime.windows` tells when a window of measurements begins and
ends.

The tuner belongs to its loader and to each of the loader's iterators, and knows neither. The thread holds the tuner
only while it looks; it ends with the last iterator, with the tuner, and with the interpreter.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.controller import Controller
from dpex.autotune.runtime.recorder import recorder
from dpex.autotune.runtime.windows import BATCHES, GLANCE_S, SHORTEST_S, Mark, Windows
from dpex.autotune.trace.format import Origin, Recorded
from dpex.autotune.types import Decision, Sample, Settings
from dpex.core.prefetch import Sizes
from dpex.measure.consumer_time import Look, since
from dpex.measure.samples import HostSample, LaneSample
from dpex.system.clock import Clock, monotonic
from dpex.system.cpus import local_ranks, usable_cpus
from dpex.system.gpu.watch import GpuView, view
from dpex.system.host import HostMeter
from dpex.system.run_queue import Ran

logger = logging.getLogger("dpex")

COLD_WORKERS = 4
JOIN_S = 2.0
ROOM_EVERY_S = 2.0

Room = Callable[[int, int], "tuple[int, int] | None"]
"""From remote workers requested and those of them that run: how many more this loader may ask for, and how many of the
requested find no place. None: there can be none."""


def cold_start(cpus: float | None = None, ranks: int | None = None) -> Settings:
    """Where tuning begins when nothing is known: few enough to start quickly, enough to see what a worker costs."""
    cpus = usable_cpus() if cpus is None else cpus
    ranks = local_ranks(os.environ) if ranks is None else ranks
    local = max(1, min(COLD_WORKERS, math.floor(cpus / ranks)))
    return Settings(local=local, depth=2 * local)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the loader rules out, whatever the configuration allows.

    streams: why workers keep their number, where each reads a stream of its own, else "". may_inline: batches may be
    made in this process.
    memory_budget: bytes in flight at most. prefetch_factor: batches in flight per worker at most. pins: what the user
    fixed with ``resize``, by name ("local", "remote", "prefetch").
    most_local: local workers that the system allows, once it refused one.
    """

    streams: str = ""
    may_inline: bool = True
    memory_budget: int | None = None
    prefetch_factor: int | None = None
    pins: Mapping[str, int] | None = None
    most_local: int | None = None


class Tunable(Protocol):
    """What of an engine the tuner uses."""

    def look(self) -> Look:
        """What there is to see."""

    def wish(self, sizes: Sizes) -> None:
        """Have other sizes within the consumer's next turn."""

    @property
    def closed(self) -> bool:
        """Whether it has ended."""


class Tuner:
    """See the module. ``room`` is called in the tuner's thread and may take its time."""

    def __init__(
        self,
        config: AutotuneConfig,
        start: Settings,
        limits: Limits,
        *,
        room: Room | None = None,
        clock: Clock = monotonic,
        host: HostMeter | None = None,
        gpu_view: Callable[[], GpuView | None] = view,
    ) -> None:
        self._config = config
        self._limits = limits
        self._room = room
        self._clock = clock
        self._host = host
        self._gpu_view = gpu_view
        self._gpus: GpuView | None = None
        self._engines: list[Tunable] = []
        self._windows = Windows()
        self._began_at: float | None = None
        self._past: list[Decision] = []
        self._start = start
        self._has_failed = False
        self._refused = False
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._changing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._recorder = recorder(config)
        self.settings = start
        self._renew("")
        if limits.streams:
            self._past.append(_on_streams(self.settings, limits.streams))
            logger.info("auto: %s", limits.streams)

    # -- what is wanted ----------------------------------------------------------------------------------------------

    def _renew(self, why: str) -> None:
        """A controller for the limits as they are now, from the present setting, brought inside them."""
        config = self._allowed()
        self.settings = _brought_inside(self.settings, config)
        self._controller = self._on_record(Controller(config, self.settings), config, why)
        self.settings = self._controller.begin()

    def _allowed(self) -> AutotuneConfig:
        remote = self._room is not None and not self._refused
        return _within(self._config, self._limits, self.settings, remote=remote)

    def _on_record(self, controller: Controller, config: AutotuneConfig, why: str) -> Controller | Recorded:
        if self._recorder is None:
            return controller
        limits = asdict(replace(self._limits, pins=dict(self._limits.pins or {})))
        limits["streams"] = bool(self._limits.streams)
        return Recorded(controller, self._recorder, Origin(config=config, start=self.settings, limits=limits, why=why))

    @property
    def sizes(self) -> Sizes:
        """For an engine: the present setting, and the limits that it keeps by itself."""
        now, limits = self.settings, self._limits
        prefetch = (limits.pins or {}).get("prefetch")
        if prefetch is None and limits.prefetch_factor is not None:
            prefetch = limits.prefetch_factor * max(1, now.workers)
        return Sizes(local=now.local, remote=now.remote, prefetch=prefetch, depth=now.depth)

    @property
    def decisions(self) -> list[Decision]:
        """All so far, oldest first."""
        return [*self._past, *self._controller.decisions]

    @property
    def is_frozen(self) -> bool:
        """Whether there is nothing to decide any more: the user fixed everything, or tuning has failed."""
        return self._has_failed or {"local", "remote", "prefetch"} <= set(self._limits.pins or {})

    def pin(self, pins: Mapping[str, int]) -> None:
        """From now on these are the user's; the rest is tuned on."""
        fixed = ", ".join(f"{name}={count}" for name, count in pins.items())
        with self._changing:
            now = self.settings
            self._limits = replace(self._limits, pins=dict(pins))
            self.settings = replace(now, local=pins.get("local", now.local), remote=pins.get("remote", now.remote))
            self._past += self._controller.decisions
            self._renew(f"{fixed} is fixed by resize()")
            self._windows.clear()
        logger.info("auto: %s is fixed by resize()%s", fixed, "; nothing is tuned any more" if self.is_frozen else "")

    def leave_process(self, why: str) -> bool:
        """Batches cannot be made in the training process any more; returns whether there is anywhere else."""
        with self._changing:
            self._limits = replace(self._limits, may_inline=False)
            self._past += self._controller.decisions
            self._renew(why)
            self._windows.clear()
        return self.settings.workers > 0

    # -- engines -----------------------------------------------------------------------------------------------------

    def watch(self, engine: Tunable) -> None:
        """Tune this engine too; the thread starts with the first."""
        self._leave_other_process()
        self._engines.append(engine)
        if self._thread is None or not self._thread.is_alive():
            self._stop = threading.Event()
            self._windows.shorten()
            self._gpus = self._gpu_view()
            arguments = (weakref.ref(self), self._stop)
            self._thread = threading.Thread(target=_run, args=arguments, name="dpex-tuner", daemon=True)
            self._thread.start()

    def _leave_other_process(self) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._engines, self._thread, self._gpus = [], None, None
            self._windows, self._changing = Windows(), threading.Lock()

    def leave(self, engine: Tunable) -> None:
        """It has ended; with the last of them the thread ends. Idempotent."""
        if self._pid != os.getpid():
            return
        self._engines = [other for other in self._engines if other is not engine]
        self._windows.forget(id(engine))
        if not self._engines:
            self._end()

    def _end(self) -> None:
        thread, self._thread = self._thread, None
        self._stop.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_S)
        if self._gpus is not None:
            self._gpus.close()

    # -- windows -----------------------------------------------------------------------------------------------------

    def turn(self) -> float:
        """One look; returns the seconds until the next."""
        now = self._clock()
        if self.is_frozen:
            if isinstance(self._controller, Recorded):
                self._controller.announce(0.0 if self._began_at is None else now - self._began_at)
            return self._config.interval_s
        if self._host is None:
            self._host = HostMeter(self._clock)
            self._host.sample((), 0.0)
        if self._began_at is None:
            self._began_at = now
        cpu_s = time.process_time()
        looks = [(id(engine), engine.look()) for engine in self._engines if not engine.closed]
        found = self._windows.turn(looks, cpu_s)
        if isinstance(found, float):
            return found
        self._step(found[1].look, self._sample(*found))
        return min(GLANCE_S, self._windows.length_s)

    def _sample(self, before: Mark, after: Mark) -> Sample:
        base, look = before.look, after.look
        then, now = base.times, look.times
        wait_s, own_s = max(0.0, now.wait_s - then.wait_s), max(0.0, now.own_s - then.own_s)
        work_s = max(0.0, now.work_s - then.work_s)
        batches = max(0, now.batches - then.batches)
        part = min(1.0, (wait_s + own_s + work_s) / max(1e-6, look.at - base.at))  # the rest was between passes
        ran = after.queued.since(before.queued)
        return Sample(
            at=look.at - (self._began_at or 0.0),
            seconds=wait_s + own_s + work_s,
            settings=replace(self.settings, local=look.sizes.local, remote=look.sizes.remote),
            epoch=look.epoch,
            batches=batches,
            wait_s=wait_s,
            own_s=own_s,
            work_s=work_s,
            head_s=max(0.0, now.head_s - then.head_s),
            step_spread=_spread(batches, work_s, now.work_squared - then.work_squared),
            ready=look.ready,
            in_flight=look.in_flight,
            batch_bytes=look.batch_bytes,
            made_here=with_queue(since(base.made_here, look.made_here), ran.here),
            local=with_queue(since(base.local, look.local), ran.workers),
            remote=self._with_room(since(base.remote, look.remote)),
            host=self._host_sample(look, (after.cpu_s - before.cpu_s) * part, ran.trainer),
            gpu_busy=self._gpus.busy_ratio() if self._gpus is not None else None,
            gpu_stall_s=_gpu_stall_s(base, look),
        )

    def _host_sample(self, look: Look, trainer_cpu_s: float, trainer: Ran | None) -> HostSample:
        """The machine; of its free memory as much as leaves the trainer what it may need."""
        assert self._host is not None
        host = self._host.sample(look.pids, trainer_cpu_s, look.local.running)
        free = host.memory_free
        if free is not None:
            workers = look.local.running + look.remote.running
            batches = look.ready + min(look.in_flight, workers)
            held = batches * look.batch_bytes + look.local.requested * host.worker_bytes
            free = int(self._config.memory_share * (free + held) - held)
        budget = self._limits.memory_budget
        queued_s = None if trainer is None else trainer.queued_s
        return replace(host, memory_free=free, batch_budget=budget, trainer_queued_s=queued_s)

    def _with_room(self, remote: LaneSample) -> LaneSample:
        found = None if self._room is None or self._refused else self._room(remote.requested, remote.running)
        return remote if found is None else replace(remote, room=found[0], unplaced=found[1])

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _step(self, look: Look, sample: Sample) -> None:
        if look.refused is not None and not self._refused:
            self._refuse(look)
            return
        if look.most_local is not None and self._is_news(*look.most_local):
            self._learn_most_local(*look.most_local)
            return
        running = sample.local.running + sample.remote.running
        coming = sample.local.requested + sample.remote.requested - sample.remote.unplaced
        controller = self._controller
        decision = controller.step(sample)
        if decision is not None:
            self._carry_out(decision, controller)
            self._windows.shorten()
        elif running == coming or running >= sample.settings.workers:
            self._windows.lengthen(self._config.interval_s)

    def _refuse(self, look: Look) -> None:
        """There can be no remote workers for this loader: its dataset cannot travel, or the cluster is gone."""
        with self._changing:
            self._refused = True
            self.settings = replace(self.settings, local=look.sizes.local, remote=0)
            self._past += self._controller.decisions
            self._renew(f"there can be no remote workers: {look.refused}")
            self._wish()

    def _is_news(self, most: int, _why: str) -> bool:
        known = self._limits.most_local
        return (known is None or most < known) and "local" not in (self._limits.pins or {})

    def _learn_most_local(self, most: int, why: str) -> None:
        """The system refused to start a worker: what runs is the most there can be."""
        with self._changing:
            self._limits = replace(self._limits, most_local=most)
            self._past += self._controller.decisions
            self._renew(f"no more than {most} local workers can be started: {why}")
            self._windows.clear()
            self._wish()
        logger.info("auto: no more than %d local workers can be started: %s", most, why)

    def _carry_out(self, decision: Decision, controller: Controller | Recorded) -> None:
        """Unless the user fixed a size meanwhile, and another controller decides."""
        with self._changing:
            if controller is not self._controller:
                return
            logger.info("auto: %s", decision.text)
            self.settings = decision.new
            self._wish()

    def give_up(self, error: Exception) -> None:
        """Something in tuning has failed: go back to the last setting that was seen to work, and stay there."""
        with self._changing:
            self._has_failed = True
            old, new = self.settings, self._last_good()
            now = self._clock() - (self._began_at if self._began_at is not None else self._clock())
            self._past = [*self.decisions, _given_up(now, old, new, error)]
            self._controller = Controller(self._allowed(), new)
            self.settings = new
            self._wish()

    def _last_good(self) -> Settings:
        kept = [d.new for d in self.decisions if d.outcome is not None and d.outcome.kept]
        return _brought_inside((kept or [self._start])[-1], self._allowed())

    def _wish(self) -> None:
        sizes = self.sizes
        for engine in self._engines:
            if not engine.closed:
                engine.wish(sizes)


def with_queue(lane: LaneSample, ran: Ran | None) -> LaneSample:
    """The lane with the time its batches were on run queues, by what those who make them had to wait for a CPU."""
    return lane if ran is None or not lane.tickets else replace(lane, queued_s=lane.cpu_s * ran.delay)


def _spread(steps: int, sum_s: float, squares: float) -> float | None:
    """Standard deviation over mean, of that many; None if they are too few."""
    if steps < BATCHES or sum_s <= 0:
        return None
    return math.sqrt(max(0.0, squares * steps / sum_s**2 - 1.0))


def _run(reference: weakref.ReferenceType[Tuner], stop: threading.Event) -> None:
    pause_s = SHORTEST_S
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


def _on_streams(now: Settings, why: str) -> Decision:
    return Decision(
        at=0.0, old=now, new=now, reason="start", text=why, evidence={}, predicted_rate=0.0, predicted_stall=0.0
    )


def _given_up(at: float, old: Settings, new: Settings, error: Exception) -> Decision:
    stay = "The present setting stays" if old == new else f"Back from {old} to {new}, the last known to work"
    text = f"Tuning has stopped, as something in dpex failed: {error!r}. {stay}, and nothing is tuned any more."
    return Decision(
        at=at, old=old, new=new, reason="failed", text=text, evidence={}, predicted_rate=0.0, predicted_stall=0.0
    )


def _gpu_stall_s(base: Look, look: Look) -> float | None:
    return None if look.gpu_stall_s is None else max(0.0, look.gpu_stall_s - (base.gpu_stall_s or 0.0))


def _within(config: AutotuneConfig, limits: Limits, now: Settings, *, remote: bool) -> AutotuneConfig:
    """The configuration, narrowed to what this loader can do."""
    pins = dict(limits.pins or {})
    if limits.streams:
        pins |= {"local": now.local, "remote": now.remote}
    changes: dict[str, Any] = {}
    if not limits.may_inline and not config.min_local and not config.min_remote:
        changes["min_remote" if config.max_local == 0 else "min_local"] = 1
    if not remote:
        changes |= {"min_remote": 0, "max_remote": 0}
    if limits.most_local is not None:
        most = limits.most_local if config.max_local is None else min(config.max_local, limits.most_local)
        changes |= {"max_local": most, "min_local": min(config.min_local, most)}
    for lane in ("local", "remote"):
        if lane in pins:
            changes |= {f"min_{lane}": pins[lane], f"max_{lane}": pins[lane]}
    if "prefetch" in pins:
        changes["max_depth"] = pins["prefetch"]
    return replace(config, **changes)


def _brought_inside(settings: Settings, config: AutotuneConfig) -> Settings:
    """The nearest setting that the configuration allows."""

    def clip(value: int, low: int, high: int | None) -> int:
        return max(low, value if high is None else min(value, high))

    return Settings(
        local=clip(settings.local, config.min_local, config.max_local),
        remote=clip(settings.remote, config.min_remote, config.max_remote),
        depth=clip(settings.depth, 1, config.max_depth),
    )

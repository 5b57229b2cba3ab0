"""The last ten minutes of this process's loaders, a frame a second, as JSON for the page and ``dpex top``.

One daemon thread ("dpex-metrics-sampler") while the endpoint is up: it reads ledgers, which no batch waits for. A
request only puts together what is there already; the same question within a second gets the same bytes. One lock
guards all of it, and is held for milliseconds by those two alone.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import dpex
from dpex.autotune.types import Decision, Settings
from dpex.core.names import REMOTE
from dpex.measure.sums import Sums
from dpex.system.clock import Clock, monotonic
from dpex.telemetry.http.frames import COLUMNS, Frame, frame, latest, machines, summary
from dpex.telemetry.loader_metrics import LoaderMetrics

logger = logging.getLogger("dpex")

VERSION = 3
"""Of what `HistorySampler.state` returns; grows when a field changes its meaning or goes."""
EVERY_S = 1.0
"""A frame a second: as often as a person can follow."""
KEEP = 600
"""Frames that are kept: ten minutes."""
NOW_S = 5.0
"""What counts as now: shares of a single second jump about."""
MOST_DECISIONS = 100
"""The latest that the page is told."""
MOST_ANSWERS = 16
"""Answers that are kept for others who ask the same within the second."""
STOP_S = 2.0
"""The thread is done within milliseconds, unless the machine hardly runs it."""


class History:
    """One loader's frames and decisions, those with the time at which they were first seen."""

    def __init__(self, keep: int = KEEP) -> None:
        self._frames: deque[tuple[Frame, str]] = deque(maxlen=keep)
        self._before: tuple[Sums, float] | None = None
        self._seen_at: list[float] = []
        self._decisions: Sequence[Decision] = ()
        self._ledger: LoaderMetrics | None = None
        self._machines: list[Mapping[str, Any]] = []

    def add(self, number: int, ledger: LoaderMetrics, at: float, now: float) -> None:
        """The frame that ends now: at that Unix time, and that monotonic one."""
        sums = ledger.sums()
        before, then = self._before or (Sums(), now)
        if self._ledger is not ledger:  # the loader of that name before it is no more
            self._ledger, self._seen_at, before = ledger, [], Sums()
        one = frame(number, at, now - then, before, sums)
        self._frames.append((one, json.dumps(tuple(one.values()), separators=(",", ":"), allow_nan=False)))
        self._machines = machines(now - then, before, sums)
        self._before = (sums, now)
        self._decisions = () if ledger.tuner is None else tuple(ledger.tuner.decisions)
        self._seen_at += [round(at, 3)] * (len(self._decisions) - len(self._seen_at))

    def state(self, since: int) -> str:
        """As JSON, with the frames after that number."""
        assert self._ledger is not None
        assert self._before is not None
        frames = [one for one, _ in self._frames]
        head = json.dumps(self._head(self._ledger, self._before[0], frames), separators=(",", ":"), allow_nan=False)
        texts = ",".join(text for one, text in self._frames if one["number"] > since)
        return f'{head[:-1]},"frames":[{texts}]}}'

    def _head(self, ledger: LoaderMetrics, sums: Sums, frames: Sequence[Frame]) -> Mapping[str, Any]:
        now = summary(latest(frames, NOW_S))
        return {
            "name": ledger.name,
            "info": dict(zip(("dataset", "batch_size", "seeding"), ledger.info, strict=False)),
            "state": "empty" if not sums.batches else "running" if now["wait_ratio"] is not None else "idle",
            "tuned": ledger.tuner is not None,
            "batches": sums.batches,
            "samples": sums.samples,
            "now": now,
            "machines": self._machines,
            "left_alone": sums.pools[REMOTE].nodes_left_alone if REMOTE in sums.pools else 0,
            "decisions": self._told(),
        }

    def _told(self) -> list[Mapping[str, Any]]:
        both = list(enumerate(zip(self._seen_at, self._decisions, strict=False), 1))
        return [told(number, at, decision) for number, (at, decision) in both[-MOST_DECISIONS:]]


def told(number: int, at: float, decision: Decision) -> Mapping[str, Any]:
    """A decision for JSON, whose numbers are finite."""
    outcome = decision.outcome
    return {
        "number": number,
        "at": at,
        "reason": decision.reason,
        "text": decision.text,
        "from": _settings(decision.old),
        "to": _settings(decision.new),
        "predicted": {
            "wait_ratio": _finite(decision.predicted_wait),
            "batches_per_second": _finite(decision.predicted_rate),
        },
        "outcome": None
        if outcome is None
        else {
            "wait_ratio": _finite(outcome.wait),
            "batches_per_second": _finite(outcome.rate),
            "kept": outcome.kept,
        },
    }


def _settings(settings: Settings) -> Mapping[str, Any]:
    return {"text": str(settings), "local": settings.local, "remote": settings.remote, "prefetch": settings.prefetch}


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


class HistorySampler:
    """See the module. ``process``: what the page says of this process, by name. ``mark``: what else is to be done each
    second, see `dpex.telemetry.http.diagnoses`."""

    def __init__(
        self,
        ledgers: Callable[[], Iterable[LoaderMetrics]],
        process: Mapping[str, str],
        mark: Callable[[], None] = lambda: None,
        *,
        clock: Clock = monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._ledgers = ledgers
        self._mark = mark
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._number = 0
        self._histories: dict[str, History] = {}
        self._answers: dict[int, bytes] = {}
        self._process = {**process, "pid": str(os.getpid()), "since": f"{wall():.3f}"}
        self._stop = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to take frames."""
        self.thread = threading.Thread(target=self._run, name="dpex-metrics-sampler", daemon=True)
        self.thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """Within `STOP_S`; idempotent."""
        self._stop.set()
        thread = self.thread
        if wait and thread is not None and thread is not threading.current_thread():
            thread.join(STOP_S)

    def _run(self) -> None:
        due = self._clock()
        while True:
            try:
                self.turn()
            except Exception:
                logger.exception("the live page has no more news; this is an error in dpex")
                return
            due = max(due + EVERY_S, self._clock())
            if self._stop.wait(due - self._clock()):
                return

    def turn(self) -> None:
        """Take one frame of each loader."""
        ledgers = {ledger.name: ledger for ledger in self._ledgers()}
        with self._lock:
            self._number += 1
            self._histories = {name: self._histories.get(name) or History() for name in ledgers}
            for name, ledger in ledgers.items():
                self._histories[name].add(self._number, ledger, self._wall(), self._clock())
            self._answers.clear()
        self._mark()

    def state(self, since: int = 0) -> bytes:
        """What ``/api/state`` answers, with the frames after that number."""
        with self._lock:
            if since not in self._answers:
                if len(self._answers) >= MOST_ANSWERS:
                    self._answers.clear()
                self._answers[since] = self._state(since).encode()
            return self._answers[since]

    def _state(self, since: int) -> str:
        head = {
            "version": VERSION,
            "dpex": dpex.__version__,
            "process": self._process,
            "at": round(self._wall(), 3),
            "number": self._number,
            "every_s": EVERY_S,
            "keep": KEEP,
            "columns": COLUMNS,
        }
        loaders = ",".join(history.state(since) for history in self._histories.values())
        return f'{json.dumps(head, separators=(",", ":"))[:-1]},"loaders":[{loaders}]}}'

"""The last ten minutes of this process's loaders, one frame per second, as JSON for the page and ``dpex top``.

A daemon thread ("dpex-metrics-sampler") reads the ledgers while the endpoint is up; no batch waits for it. Frames are
encoded once, and joined for a request. One lock guards them. The sampler and the server's threads hold it for less than
a millisecond.
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
from dpex.measure.sums import Sums
from dpex.schedule.names import REMOTE
from dpex.system.clock import Clock, monotonic
from dpex.telemetry.http.frames import COLUMNS, Frame, frame, latest, machines, summary
from dpex.telemetry.loader_metrics import LoaderMetrics

logger = logging.getLogger("dpex")

VERSION = 3
"""Version of the JSON of `HistorySampler.state`; it grows when a field changes its meaning or is removed."""
EVERY_S = 1.0
"""Seconds per frame: about as fast as a person can follow."""
KEEP = 600
"""Frames that are kept: ten minutes."""
NOW_S = 5.0
"""Seconds that the figures of the present cover: those of a single second vary too much."""
MOST_DECISIONS = 100
"""The latest decisions that are sent."""
STOP_S = 2.0
"""Seconds that `HistorySampler.stop` waits; the thread usually ends within milliseconds."""


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


class History:
    """The frames of a loader, and its decisions with the time at which each was first seen."""

    def __init__(self, keep: int = KEEP) -> None:
        self._frames: deque[tuple[Frame, str]] = deque(maxlen=keep)
        self._before: tuple[Sums, float] | None = None
        self._seen_at: list[float] = []
        self._decisions: Sequence[Decision] = ()
        self._ledger: LoaderMetrics | None = None
        self._machines: list[Mapping[str, Any]] = []

    def add(self, number: int, ledger: LoaderMetrics, at: float, now: float) -> None:
        """Append the frame that ends at Unix time ``at``, which is ``now`` by the monotonic clock."""
        sums = ledger.sums()
        before, then = self._before or (Sums(), now)
        if self._ledger is not ledger:  # a new loader has the name of one that ended
            self._ledger, self._seen_at, before = ledger, [], Sums()
        one = frame(number, at, now - then, before, sums)
        self._frames.append((one, _compact(tuple(one.values()))))
        self._machines = machines(now - then, before, sums)
        self._before = (sums, now)
        self._decisions = () if ledger.tuner is None else tuple(ledger.tuner.decisions)
        self._seen_at += [round(at, 3)] * (len(self._decisions) - len(self._seen_at))

    def state(self, since: int) -> str:
        """Return the loader as JSON, with the frames after number ``since``."""
        assert self._ledger is not None
        assert self._before is not None
        head = _compact(self._head(self._ledger, self._before[0], [one for one, _ in self._frames]))
        texts = ",".join(text for one, text in self._frames if one["number"] > since)
        return f'{head[:-1]},"frames":[{texts}]}}'

    def _head(self, ledger: LoaderMetrics, sums: Sums, frames: Sequence[Frame]) -> Mapping[str, Any]:
        now = summary(latest(frames, NOW_S))
        decisions = list(enumerate(zip(self._seen_at, self._decisions, strict=False), 1))[-MOST_DECISIONS:]
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
            "decisions": [encoded(number, at, decision) for number, (at, decision) in decisions],
        }


def encoded(number: int, at: float, decision: Decision) -> Mapping[str, Any]:
    """Return a decision for JSON, which has finite numbers only."""
    outcome = decision.outcome
    return {
        "number": number,
        "at": at,
        "reason": decision.reason,
        "text": decision.text,
        "from": _settings(decision.old),
        "to": _settings(decision.new),
        "predicted": _rates(decision.predicted_wait, decision.predicted_rate),
        "outcome": None if outcome is None else _rates(outcome.wait, outcome.rate) | {"kept": outcome.kept},
    }


def _settings(settings: Settings) -> Mapping[str, Any]:
    return {"text": str(settings), "local": settings.local, "remote": settings.remote, "prefetch": settings.prefetch}


def _rates(wait: float, rate: float) -> dict[str, Any]:
    both = {"wait_ratio": wait, "batches_per_second": rate}
    return {name: round(value, 4) if math.isfinite(value) else None for name, value in both.items()}


class HistorySampler:
    """Takes the frames and makes the JSON.

    Args:
        process: Labels of this process on the page.
        mark: Called after each frame; see `dpex.telemetry.http.diagnoses`.
    """

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
        self._process = {**process, "pid": str(os.getpid()), "since": f"{wall():.3f}"}
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="dpex-metrics-sampler", daemon=True)

    def start(self) -> None:
        """Begin to take frames."""
        self.thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """End within `STOP_S`. Idempotent."""
        self._stop.set()
        if wait and self.thread is not threading.current_thread():
            self.thread.join(STOP_S)

    def _run(self) -> None:
        due = self._clock()
        while True:
            try:
                self.turn()
            except Exception:
                logger.exception("metrics: the live page is not updated any more; this is an error in dpex")
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
        self._mark()

    def state(self, since: int = 0) -> bytes:
        """Return the answer to ``/api/state``, with the frames after number ``since``."""
        with self._lock:
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
        return f'{_compact(head)[:-1]},"loaders":[{loaders}]}}'.encode()

"""The last ten minutes of this process's loaders and their diagnoses: JSON for the page, text for ``dpex top``.

A daemon thread ("dpex-metrics-sampler") reads the ledgers once a second while the endpoint is up; no batch waits for
it. Frames are encoded once, and joined for a request. One lock guards them. The sampler and the server's threads hold
it for less than a millisecond.

A diagnosis takes 3 ms of CPU, in which the training loop may wait for the interpreter. So it is made only when a client
asks for it. It covers the whole run or a stretch. A stretch is the difference between the present counts and a mark,
which is a copy of earlier counts. Time between passes is in no stretch.
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
from dataclasses import dataclass, replace
from typing import Any, Literal

from dpex import version
from dpex.autotune.law.wording import described
from dpex.autotune.types import Decision
from dpex.diagnose import hot_calls, report
from dpex.diagnose.diagnosis import Diagnosis, DiagnosisSource
from dpex.diagnose.verdict import ENOUGH_BATCHES
from dpex.measure.readable import percent
from dpex.measure.reading import Reading
from dpex.measure.settings import INLINE, REMOTE, WORKER_POOLS, Settings
from dpex.system.clock import Clock, monotonic
from dpex.telemetry.http.frames import COLUMNS, frame, machines, of_pools, summary
from dpex.telemetry.loader_metrics import LoaderMetrics

logger: logging.Logger = logging.getLogger("dpex")

VERSION = 3
"""Version of the JSON of `HistorySampler.state`; it grows when a field changes its meaning or is removed."""
EVERY_S = 1.0
"""Seconds per frame: about as fast as a person can follow."""
KEEP = 600
"""Frames that are kept: ten minutes."""
NOW_S = 5.0
"""Seconds over which the present rates and shares are measured, because single seconds vary too much."""
NOW_READINGS = 1 + round(NOW_S / EVERY_S)
MOST_DECISIONS = 100
"""Maximum number of decisions in the JSON. It has the latest."""
PRINTED_DECISIONS = 4
"""Maximum number of decisions in a report in text. It has the latest."""
MARK_EVERY = 5
"""Frames between marks. A stretch may be longer than necessary by this many frames."""
RECENT_S, NEW_S = 30.0, 10.0
"""Minimum seconds of a stretch; the second number applies if the workers changed just before the stretch."""
MUCH = 0.20
"""Share of waiting that counts as bad, as in XProf (openxla/xprof, input_pipeline_analysis)."""
NO_LOADER = "No loader has been iterated yet."
_WORDS = (("run_id", "run"), ("rank", "rank"), ("node", "machine"), ("pid", "process"))
"""Labels of a process, and their names in text."""
STOP_S = 2.0
"""Seconds that `HistorySampler.stop` waits; the thread usually ends within milliseconds."""


Stretch = Literal["run", "recent"]
STRETCHES: tuple[Stretch, ...] = ("run", "recent")
Level = Literal["early", "good", "fair", "bad"]


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def level(found: Diagnosis) -> Level:
    """Return the level of a diagnosis, which sets its colour on the page."""
    if found.verdict.cause in ("too-early", "consumer"):
        return "early" if found.verdict.cause == "too-early" else "good"
    return "bad" if found.facts.wait_ratio >= MUCH else "fair"


@dataclass(frozen=True, kw_only=True)
class TimedDiagnosis:
    """A diagnosis and its time.

    Attributes:
        is_whole: True if the diagnosis is about the whole run.
        at: Unix time at which the diagnosis was made.
    """

    name: str
    stretch: Stretch
    diagnosis: Diagnosis
    is_whole: bool
    at: float

    def as_data(self) -> Mapping[str, Any]:
        """Return the diagnosis for JSON; ``shown`` holds the texts of the live page."""
        found, verdict = self.diagnosis, self.diagnosis.verdict
        return {
            "name": self.name,
            "stretch": self.stretch,
            "is_whole": self.is_whole,
            "at": round(self.at, 3),
            "level": level(found),
            "shown": {
                "title": verdict.title,
                "sentence": verdict.sentence,
                "confidence": report.confidence(verdict),
                "first": found.advice,
                "hot": hot_calls.sentence(found.facts),
                "end": found.end_of_stall,
                "parts": [part._asdict() for part in report.parts(found.facts, verdict)],
                "sections": [vars(one) for one in report.sections(found)],
            },
            "diagnosis": found.to_dict(),
        }


class LoaderHistory:
    """The frames and marks of a loader, and its decisions with the time at which each was first seen."""

    def __init__(self) -> None:
        self.case: DiagnosisSource | None = None
        self._marks: deque[Reading] = deque(maxlen=KEEP // MARK_EVERY)
        self._frames: deque[tuple[int, str]] = deque(maxlen=KEEP)
        self._readings: deque[tuple[float, Reading]] = deque(maxlen=NOW_READINGS)
        self._seen_at: dict[tuple[float, str], float] = {}
        self._decisions: Sequence[Decision] = ()
        self._ledger: LoaderMetrics | None = None

    def add_frame(self, number: int, ledger: LoaderMetrics, at: float, now: float) -> None:
        """Append the frame that ends at Unix time ``at``, which is ``now`` by the monotonic clock."""
        if self._ledger is not ledger:  # a new loader has the name of an ended loader
            since = self._readings[-1][0] if self._readings else now
            self._ledger, self._seen_at = ledger, {}
            self._readings.clear()
            self._readings.append((since, Reading()))
        self._readings.append((now, ledger.reading()))
        one = frame(number, at, *self._window(-2))
        self._frames.append((number, _compact(tuple(one.values()))))
        self._decisions = () if ledger.tuner is None else ledger.tuner.decisions
        for decision in self._decisions:
            self._seen_at.setdefault((decision.at, decision.text), round(at, 3))
        self.update_case()

    def _window(self, first: int) -> tuple[float, Reading]:
        """Return the seconds and the counts from the reading at index ``first`` to the latest reading."""
        (then, before), (now, reading) = self._readings[first], self._readings[-1]
        return now - then, reading.since(before)

    def update_case(self) -> None:
        """Update the source of diagnoses from the ledger, because a pass may have begun since the last frame."""
        assert self._ledger is not None
        case = self._ledger.case
        if self.case is not None and (case is None or case.book is not self.case.book):
            self._marks.clear()
        self.case = case

    def add_mark(self) -> None:
        """Take a mark if time was spent in a pass since the last mark."""
        if self.case is None:
            return
        account = self.case.book.read()
        if self._marks and account.wall_s < self._marks[-1].wall_s:  # `diagnose(reset=True)`
            self._marks.clear()
        if not self._marks or account.wall_s > self._marks[-1].wall_s:
            pools = {name: replace(pool, services_s=()) for name, pool in account.pools.items()}
            waits = account.batch_waits.counted()
            self._marks.append(replace(account, pools=pools, batch_waits=waits))  # `since` needs no single times

    def recent(self, account: Reading) -> Reading:
        """Return the part of ``account`` after the latest mark that leaves enough to judge; without one, all of it."""
        marks = list(self._marks)
        for index in range(len(marks) - 1, -1, -1):
            found = account.since(marks[index])
            others = index > 0 and _workers(marks[index - 1]) != _workers(account)
            if found.batches >= ENOUGH_BATCHES and found.wall_s >= (NEW_S if others else RECENT_S):
                return found
        return account

    def state(self, since: int) -> str:
        """Return the loader as JSON, with the frames after number ``since``."""
        head = _compact(self._head_now())
        texts = ",".join(text for number, text in self._frames if number > since)
        return f'{head[:-1]},"frames":[{texts}]}}'

    def printed(self) -> list[str]:
        """Return the state of the loader in lines: rates, workers and queue now, and the latest decisions."""
        head = self._head_now()
        now, reading, changes = head["now"], self._readings[-1][1], head["decisions"][-PRINTED_DECISIONS:]
        pools = [(name, pool.running, pool.wanted) for name, pool in reading.pools.items() if name in WORKER_POOLS]
        workers = [f"{run} {name}{f' ({want} wanted)' * (want != run)}" for name, run, want in pools if run or want]
        none = "the training process makes the batches" if head["in_process"] else "no worker runs"
        queue = f"{reading.ready} batches ready, prefetch {reading.prefetch}"
        rate = now["batches_per_second"]
        speed = (
            "no batch is asked for" if rate is None else f"{rate:.1f} batches/s, wait {percent(now['wait_ratio'] or 0)}"
        )
        lines = [f"Now: {speed}; {', '.join(workers) or none}; {queue}."]
        for one, decision in zip(changes, self._decisions[len(self._decisions) - len(changes) :], strict=True):
            lines.append(f"  {time.strftime('%H:%M:%S', time.localtime(one['at']))}  {described(decision)}")
        return lines

    def _head_now(self) -> Mapping[str, Any]:
        assert self._ledger is not None
        ledger, reading = self._ledger, self._readings[-1][1]
        now = summary(*self._window(0))
        decisions = list(enumerate(self._decisions, 1))[-MOST_DECISIONS:]
        return {
            "name": ledger.name,
            "info": dict(zip(("dataset", "batch_size", "seeding"), ledger.info, strict=False)),
            "state": "empty" if not reading.batches else "running" if now["wait_ratio"] is not None else "idle",
            "tuned": ledger.tuner is not None,
            "in_process": reading.pools.keys() == {INLINE},
            "batches": reading.batches,
            "samples": reading.samples,
            "now": now,
            "machines": machines(*self._window(-2), reading),
            "excluded": reading.pools[REMOTE].nodes_excluded if REMOTE in reading.pools else 0,
            "cache": _cache(reading),
            "decisions": [encoded(number, self._seen_at[one.at, one.text], one) for number, one in decisions],
        }


def _cache(reading: Reading) -> Mapping[str, Any] | None:
    """Return the use and the size of a cache of samples; None if no sample came through a cache."""
    hits, misses = of_pools(reading, "cache_hits"), of_pools(reading, "cache_misses")
    if not hits + misses:
        return None
    return {
        "hits": hits,
        "misses": misses,
        "saved_s": round(of_pools(reading, "cache_saved_s"), 3),
        "memory_bytes": reading.cache_memory_bytes,
        "disk_bytes": reading.cache_disk_bytes,
    }


def encoded(number: int, at: float, decision: Decision) -> Mapping[str, Any]:
    """Return a decision for JSON, with None for infinite numbers. ``predicted`` is None without a prediction."""
    outcome, expected = decision.outcome, _rates(decision.predicted_wait, decision.predicted_rate)
    return {
        "number": number,
        "at": at,
        "reason": decision.reason,
        "text": decision.text,
        "from": _settings(decision.old),
        "to": _settings(decision.new),
        "predicted": expected if decision.predicted_rate else None,
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
    """

    def __init__(
        self,
        ledgers: Callable[[], Iterable[LoaderMetrics]],
        process: Mapping[str, str],
        *,
        clock: Clock = monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._ledgers = ledgers
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._number = 0
        self._histories: dict[str, LoaderHistory] = {}
        self._process = {**process, "pid": str(os.getpid()), "since": f"{wall():.3f}"}
        self._stop = threading.Event()
        self.thread: threading.Thread = threading.Thread(target=self._run, name="dpex-metrics-sampler", daemon=True)

    def start(self) -> None:
        """Begin to take frames."""
        self.thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """Stop taking frames; with ``wait``, wait up to `STOP_S` for the thread to end. Idempotent."""
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
            self._histories = {name: self._histories.get(name) or LoaderHistory() for name in ledgers}
            for name, ledger in ledgers.items():
                self._histories[name].add_frame(self._number, ledger, self._wall(), self._clock())
            histories = list(self._histories.values()) if self._number % MARK_EVERY == 0 else []
        for history in histories:
            history.add_mark()

    def state(self, since: int = 0) -> bytes:
        """Return the answer to ``/api/state``, with the frames after number ``since``."""
        with self._lock:
            head = {
                "version": VERSION,
                "dpex": version.VERSION,
                "process": self._process,
                "at": round(self._wall(), 3),
                "number": self._number,
                "every_s": EVERY_S,
                "keep": KEEP,
                "columns": COLUMNS,
            }
            loaders = ",".join(history.state(since) for history in self._histories.values())
        return f'{_compact(head)[:-1]},"loaders":[{loaders}]}}'.encode()

    def diagnoses(self, name: str | None, stretch: Stretch) -> list[TimedDiagnosis] | None:
        """Return the diagnosis of the loader of that name, or of all loaders; None if there is no such loader."""
        with self._lock:
            for history in self._histories.values():
                history.update_case()
            known = {one: history for one, history in self._histories.items() if history.case is not None}
        if name is not None and name not in known:
            return None
        return [self._diagnosed(one, known[one], stretch) for one in known if name in (None, one)]

    def text(self, found: Iterable[TimedDiagnosis], *, is_whole: bool, columns: int = report.COLUMNS) -> str:
        """Return the process and the reports in text, each with the state of its loader.

        Args:
            found: The diagnoses.
            is_whole: Also name loaders that cannot be diagnosed yet.
            columns: The width of the reports.
        """
        with self._lock:
            states = {name: history.printed() for name, history in self._histories.items()}
            new = [name for name, history in self._histories.items() if is_whole and history.case is None]
        named = [f"{word} {self._process[label]}" for label, word in _WORDS if self._process.get(label)]
        reports = [[report.text(one.diagnosis, columns), *states.get(one.name, ())] for one in found]
        reports += [[f"{name}: no batch has been delivered yet.", *states[name]] for name in new]
        return "\n".join([", ".join(named), *(line for one in reports or [[NO_LOADER]] for line in ("", *one))]) + "\n"

    def _diagnosed(self, name: str, history: LoaderHistory, stretch: Stretch) -> TimedDiagnosis:
        case = history.case
        assert case is not None
        account = case.book.read()
        seen = history.recent(account) if stretch == "recent" else account
        found = replace(case, subject=replace(case.subject, name=name)).diagnose(seen)
        return TimedDiagnosis(name=name, stretch=stretch, diagnosis=found, is_whole=seen is account, at=self._wall())


def _workers(account: Reading) -> dict[str, int]:
    """Return the number of running workers of each pool."""
    return {name: pool.running for name, pool in account.pools.items()}

"""Diagnoses of this process's loaders for the endpoint, over the whole run or its latest stretch.

A diagnosis takes 50 to 100 ms of CPU, for which it shares the interpreter with the training loop. So it is made only
when a client asks for it. It is kept for `KEPT_S`, which limits its cost to 1 % of a core, and while the loader is
between passes.

A stretch is the difference between the counts and a mark, an earlier state of them. The sampler's thread takes marks
every `MARK_EVERY_S` while batches are delivered. Time between passes is in no stretch.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Literal
from urllib.parse import urlencode

from dpex.diagnose import html, report
from dpex.diagnose.diagnosis import Diagnosis
from dpex.diagnose.source import DiagnosisSource
from dpex.diagnose.verdict import ENOUGH_BATCHES
from dpex.measure.sums import Sums
from dpex.system.clock import Clock, monotonic
from dpex.telemetry.loader_metrics import LoaderMetrics

VERSION = 1
"""Version of the JSON of `as_json`; a diagnosis has its own inside."""
MARK_EVERY_S = 5.0
"""Seconds between marks, by which a stretch may be longer than necessary."""
MOST_MARKS = 120
"""Marks that are kept: ten minutes."""
RECENT_S, NEW_S = 30.0, 10.0
"""Shortest stretch in seconds; the second if the workers changed just before it."""
KEPT_S = 10.0
"""Seconds for which all clients get the same diagnosis."""
MUCH = 0.20
"""Share of waiting that counts as bad, as in XProf (openxla/xprof, input_pipeline_analysis)."""

Stretch = Literal["run", "recent"]
STRETCHES: tuple[Stretch, ...] = ("run", "recent")
Level = Literal["early", "good", "fair", "bad"]


def level(found: Diagnosis) -> Level:
    """Return the colour of a diagnosis on the page."""
    verdict = found.verdict
    if verdict.cause in ("too-early", "consumer"):
        return "early" if verdict.cause == "too-early" else "good"
    return "bad" if found.facts.wait_ratio >= MUCH else "fair"


class CounterHistory:
    """The marks of one loader."""

    def __init__(self, case: DiagnosisSource) -> None:
        self.case = case
        self._marks: deque[Sums] = deque(maxlen=MOST_MARKS)

    def mark(self) -> None:
        """Take a mark if time was spent in a pass since the last one."""
        account = self.case.book.read()
        if self._marks and account.wall_s < self._marks[-1].wall_s:  # `diagnose(reset=True)`
            self._marks.clear()
        if not self._marks or account.wall_s > self._marks[-1].wall_s:
            pools = {name: replace(pool, services_s=()) for name, pool in account.pools.items()}
            self._marks.append(replace(account, pools=pools))  # without the times of batches, which nothing subtracts

    def recent(self, account: Sums) -> Sums:
        """Return the shortest stretch up to ``account`` that allows a conclusion, or ``account`` itself."""
        marks = list(self._marks)
        for index in range(len(marks) - 1, -1, -1):
            found = account.since(marks[index])
            others = index > 0 and _workers(marks[index - 1]) != _workers(account)
            if found.batches >= ENOUGH_BATCHES and found.wall_s >= (NEW_S if others else RECENT_S):
                return found
        return account


@dataclass(frozen=True, kw_only=True)
class TimedDiagnosis:
    """A diagnosis and its time.

    Attributes:
        is_whole: It is about the whole run.
        at: Unix time at which it was made.
        made_at: The same by the monotonic clock.
        run_s: Seconds in passes until then.
    """

    name: str
    stretch: Stretch
    diagnosis: Diagnosis
    is_whole: bool
    at: float
    made_at: float
    run_s: float

    def as_data(self) -> Mapping[str, Any]:
        """Return it for JSON; ``shown`` holds the texts of the live page."""
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
                "end": found.end_of_stall,
                "parts": [part._asdict() for part in report.parts(found.facts, verdict)],
                "sections": [vars(one) for one in report.sections(found)],
            },
            "diagnosis": found.to_dict(),
        }

    def as_html(self) -> str:
        """Return the report with links to the other stretch and to the live page."""
        other, words = ("recent", "the latest stretch") if self.stretch == "run" else ("run", "the whole run")
        about = "the whole run" if self.is_whole else f"its latest {self.diagnosis.facts.wall_s:.0f} s"
        link = escape("/diagnosis?" + urlencode({"loader": self.name, "stretch": other}))
        at = time.strftime("%H:%M:%S", time.localtime(self.at))
        links = f'<a href="{link}">{words}</a> <a href="/">the live page</a>'
        nav = f"<nav><span>{escape(self.name)}: {about}, at {at}</span> {links}</nav>"
        return nav + html.article(self.diagnosis)


class Diagnoses:
    """The diagnoses of the loaders that ``ledgers`` returns. The sampler calls `mark`, the server's threads `of`."""

    def __init__(
        self,
        ledgers: Callable[[], Iterable[LoaderMetrics]],
        *,
        clock: Clock = monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._ledgers = ledgers
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._diagnosing = threading.Lock()
        self._pasts: dict[str, CounterHistory] = {}
        self._kept: dict[tuple[str, Stretch], TimedDiagnosis] = {}
        self._marked_at = float("-inf")

    def mark(self) -> None:
        """Take marks if they are due; to be called about once a second."""
        if self._clock() - self._marked_at >= MARK_EVERY_S:
            self._marked_at = self._clock()
            for past in self._known().values():
                past.mark()

    def _known(self) -> Mapping[str, CounterHistory]:
        """The marks of the present loaders by name."""
        with self._lock:
            found = {}
            for ledger in self._ledgers():
                case, past = ledger.case, self._pasts.get(ledger.name)
                if case is not None:
                    if past is None or past.case.book is not case.book:
                        past = CounterHistory(case)
                    past.case, found[ledger.name] = case, past
            self._pasts = found
            return dict(found)

    def of(self, name: str | None, stretch: Stretch) -> list[TimedDiagnosis] | None:
        """Return the diagnosis of the loader of that name, or of all loaders; None if there is no such loader."""
        with self._diagnosing:
            known = self._known()
            self._kept = {key: kept for key, kept in self._kept.items() if key[0] in known}
            if name is not None and name not in known:
                return None
            return [self._one(one, known[one], stretch) for one in known if name in (None, one)]

    def _one(self, name: str, past: CounterHistory, stretch: Stretch) -> TimedDiagnosis:
        kept = self._kept.get((name, stretch))
        if kept is not None and self._clock() - kept.made_at < KEPT_S:
            return kept
        account = past.case.book.read()
        if kept is None or kept.run_s != account.wall_s:
            kept = self._kept[name, stretch] = self._made(name, past, stretch, account)
        return kept

    def _made(self, name: str, past: CounterHistory, stretch: Stretch, account: Sums) -> TimedDiagnosis:
        seen = past.recent(account) if stretch == "recent" else account
        case = replace(past.case, subject=replace(past.case.subject, name=name))
        return TimedDiagnosis(
            name=name,
            stretch=stretch,
            diagnosis=case.diagnose(seen),
            is_whole=seen is account,
            at=self._wall(),
            made_at=self._clock(),
            run_s=account.wall_s,
        )


def as_json(found: Sequence[TimedDiagnosis]) -> bytes:
    """Return the answer to ``/diagnosis.json``."""
    return json.dumps({"version": VERSION, "loaders": [one.as_data() for one in found]}, allow_nan=False).encode()


def as_html(found: Sequence[TimedDiagnosis]) -> bytes:
    """Return the answer to ``/diagnosis``."""
    empty = "<p>No loader of this process has been iterated yet. <a href='/'>The live page</a></p>"
    title = found[0].diagnosis.verdict.title if len(found) == 1 else "diagnosis"
    return html.document(title, "\n".join(one.as_html() for one in found) or empty).encode("utf-8", "backslashreplace")


def _workers(account: Sums) -> dict[str, int]:
    """Return the number of running workers of each pool."""
    return {name: pool.running for name, pool in account.pools.items()}

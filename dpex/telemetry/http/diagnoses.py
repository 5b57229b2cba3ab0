"""What ``/diagnosis`` answers: why each loader of this process waits, over its whole run or its latest stretch.

A diagnosis replays measurements for 50 to 100 ms of CPU, during which training gets the interpreter by turns. So it is
made only when somebody asks, in the thread that serves, and kept: while the loader is between passes, at least for
`KEPT_S`, and so long that all of them together take `MOST_SHARE` of a core at most.

A stretch is what was counted since a mark. Marks are taken by the sampler's thread, every `MARK_EVERY_S` while batches
come; time that a loader spends between passes is in none.
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
from dpex.diagnose.verdict import ENOUGH_BATCHES, Verdict
from dpex.measure.sums import Sums
from dpex.system.clock import Clock, monotonic
from dpex.telemetry.loader_metrics import LoaderMetrics

VERSION = 1
"""Of what `Diagnoses.json` returns; that of a diagnosis itself is in it."""
MARK_EVERY_S = 5.0
"""A stretch begins at a mark: that of half a minute is no more than so much too long."""
MOST_MARKS = 120
"""Ten minutes of them."""
RECENT_S, NEW_S = 30.0, 10.0
"""A stretch is at least so long, the second where other workers were at it before."""
KEPT_S = 5.0
"""A diagnosis serves everybody who asks within that time."""
MOST_SHARE = 0.01
"""Of a core, for all diagnoses together."""
MUCH = 0.20
"""XProf calls an input pipeline highly bound from there on (openxla/xprof, input_pipeline_analysis)."""

Stretch = Literal["run", "recent"]
STRETCHES: tuple[Stretch, ...] = ("run", "recent")
Level = Literal["early", "good", "fair", "bad"]


def level(verdict: Verdict) -> Level:
    """How bad it is, for the eye."""
    if verdict.cause == "too-early":
        return "early"
    if verdict.cause == "consumer":
        return "good"
    return "bad" if verdict.wait_ratio >= MUCH else "fair"


class CounterHistory:
    """One loader's marks."""

    def __init__(self, case: DiagnosisSource) -> None:
        self.case = case
        self._marks: deque[Sums] = deque(maxlen=MOST_MARKS)

    def mark(self) -> None:
        """Now, if anything came since the mark before."""
        account = self.case.book.read()
        if self._marks and account.wall_s < self._marks[-1].wall_s:  # `diagnose(reset=True)`
            self._marks.clear()
        if not self._marks or account.wall_s > self._marks[-1].wall_s:
            self._marks.append(_without_choices(account))

    def recent(self, account: Sums) -> Sums:
        """What of these counts is new since the latest mark that leaves enough to conclude from; else all."""
        marks = list(self._marks)
        for index in range(len(marks) - 1, -1, -1):
            found = account.since(marks[index])
            others = index > 0 and marks[index - 1].workers != account.workers
            if found.batches >= ENOUGH_BATCHES and found.wall_s >= (NEW_S if others else RECENT_S):
                return found
        return account


def _without_choices(account: Sums) -> Sums:
    """Without the times of single batches, which are never subtracted."""
    return replace(account, pools={name: replace(pool, kept_s=()) for name, pool in account.pools.items()})


@dataclass(frozen=True, kw_only=True)
class TimedDiagnosis:
    """A diagnosis, its Unix time, how long the run's passes took till then, its CPU time; is_whole: of all of it."""

    name: str
    stretch: Stretch
    diagnosis: Diagnosis
    is_whole: bool
    at: float
    made_at: float
    run_s: float
    cost_s: float

    def as_data(self) -> Mapping[str, Any]:
        """For JSON; ``shown`` is what people are shown, worded."""
        found = self.diagnosis
        facts, verdict, sections = found.facts, found.verdict, report.sections(found)
        return {
            "name": self.name,
            "stretch": self.stretch,
            "is_whole": self.is_whole,
            "at": round(self.at, 3),
            "level": level(verdict),
            "shown": {
                "title": verdict.title,
                "sentence": verdict.sentence,
                "confidence": report.confidence(verdict),
                "first": found.advice,
                "end": found.end_of_stall,
                "parts": [part._asdict() for part in report.parts(facts, verdict)],
                "sections": [vars(section) for section in sections if section.title != report.WHERE_TIME_GOES],
            },
            "diagnosis": found.to_dict(),
        }

    def as_html(self) -> str:
        """The report, and the way to the others."""
        other: Stretch = "recent" if self.stretch == "run" else "run"
        about = "the whole run" if self.is_whole else f"its latest {self.diagnosis.facts.wall_s:.0f} s"
        link = escape("/diagnosis?" + urlencode({"loader": self.name, "stretch": other}))
        words = "the latest stretch" if other == "recent" else "the whole run"
        at = time.strftime("%H:%M:%S", time.localtime(self.at))
        links = f'<a href="{link}">{words}</a> <a href="/">the live page</a>'
        found = self.diagnosis
        nav = f"<nav><span>{escape(self.name)}: {about}, at {at}</span> {links}</nav>"
        return nav + html.article(found)


class Diagnoses:
    """See the module. `mark` is the sampler's, the rest the server's."""

    def __init__(
        self,
        ledgers: Callable[[], Iterable[LoaderMetrics]],
        *,
        clock: Clock = monotonic,
        wall: Callable[[], float] = time.time,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._ledgers = ledgers
        self._clock = clock
        self._wall = wall
        self._cpu = cpu
        self._lock = threading.Lock()
        self._pasts: dict[str, CounterHistory] = {}
        self._told: dict[tuple[str, Stretch], TimedDiagnosis] = {}
        self._marked_at = float("-inf")

    def mark(self) -> None:
        """To be called every second or so."""
        if self._clock() - self._marked_at < MARK_EVERY_S:
            return
        self._marked_at = self._clock()
        for past in self._known().values():
            past.mark()

    def _known(self) -> Mapping[str, CounterHistory]:
        """Of the loaders that are there."""
        with self._lock:
            found = {}
            for ledger in self._ledgers():
                case, past = ledger.case, self._pasts.get(ledger.name)
                if case is not None:
                    fits = past is not None and past.case.book is case.book
                    found[ledger.name] = past if past is not None and fits else CounterHistory(case)
                    found[ledger.name].case = case
            self._pasts = found
            return dict(found)

    def tell(self, name: str | None, stretch: Stretch) -> list[TimedDiagnosis] | None:
        """Of the loader of that name, or of all; None: there is none of that name."""
        known = self._known()
        self._told = {key: told for key, told in self._told.items() if key[0] in known}
        if name is not None and name not in known:
            return None
        return [self._one(one, known[one], stretch) for one in known if name in (None, one)]

    def _one(self, name: str, past: CounterHistory, stretch: Stretch) -> TimedDiagnosis:
        kept = self._told.get((name, stretch))
        if kept is not None and self._clock() - kept.made_at < self._keep_s():
            return kept
        account = past.case.book.read()
        if kept is None or kept.run_s != account.wall_s:
            kept = self._told[name, stretch] = self._made(name, past, stretch, account)
        return kept

    def _keep_s(self) -> float:
        return max(KEPT_S, sum(told.cost_s for told in self._told.values()) / MOST_SHARE)

    def _made(self, name: str, past: CounterHistory, stretch: Stretch, account: Sums) -> TimedDiagnosis:
        began = self._cpu()
        seen = past.recent(account) if stretch == "recent" else account
        case = replace(past.case, context=replace(past.case.context, name=name))
        return TimedDiagnosis(
            name=name,
            stretch=stretch,
            diagnosis=case.diagnose(seen),
            is_whole=seen is account,
            at=self._wall(),
            made_at=self._clock(),
            run_s=account.wall_s,
            cost_s=self._cpu() - began,
        )


def as_json(told: Sequence[TimedDiagnosis]) -> bytes:
    """What ``/diagnosis.json`` answers."""
    return json.dumps({"version": VERSION, "loaders": [one.as_data() for one in told]}, allow_nan=False).encode()


def as_html(told: Sequence[TimedDiagnosis]) -> bytes:
    """What ``/diagnosis`` answers."""
    nobody = "<p>No loader of this process has been iterated yet. <a href='/'>The live page</a></p>"
    title = told[0].diagnosis.verdict.title if len(told) == 1 else "diagnosis"
    return html.document(title, "\n".join(one.as_html() for one in told) or nobody).encode("utf-8", "backslashreplace")

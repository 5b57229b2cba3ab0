"""What `DpexDataLoader.diagnose` returns: facts, verdict, predictions and past predictions, and the ways to show them.

Pure but for `Diagnosis.write_html`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpex.diagnose import html, report
from dpex.diagnose.attribution import losses
from dpex.diagnose.facts import Facts
from dpex.diagnose.verdict import Verdict, judge
from dpex.diagnose.what_if import Prediction, Scored, WhatIf, scores, what_if


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Why training waits for data, if it does, how that is known, and what would change it. ``str()`` is the report.

    facts: what was measured. verdict: the cause, in one sentence, with evidence and a confidence from 0 to 1. what_if:
    predictions for other settings and cheaper work, None if there is too little to predict from. scores: past
    predictions of the tuner's beside what they brought.
    """

    facts: Facts
    verdict: Verdict
    what_if: WhatIf | None
    scores: tuple[Scored, ...]

    @property
    def recommendation(self) -> Prediction | None:
        """The one change that brings most for its effort, None if nothing is worth it or nothing can be said."""
        if self.what_if is None or self.verdict.cause == "too-early":
            return None
        return self.what_if.recommended

    def __str__(self) -> str:
        return report.text(self.facts, self.verdict, self.what_if, self.scores, self.recommendation)

    def to_dict(self) -> dict[str, Any]:
        """For programs: dicts, lists, strings, finite numbers, booleans and None; ``version`` is the layout's."""
        return report.plain(self.facts, self.verdict, self.what_if, self.scores, self.recommendation)

    def html(self, last: Sequence[str] = ()) -> str:
        """A page of its own: nothing is loaded from elsewhere. last: lines for its end."""
        return html.html(self.facts, self.verdict, self.what_if, self.scores, self.recommendation, last)

    def write_html(self, path: str | Path) -> Path:
        """Write that page; returns where it is.

        Raises:
            OSError: it cannot be written there.
        """
        path = Path(path).expanduser()
        path.write_text(self.html(), encoding="utf-8", errors="backslashreplace")
        return path


def diagnose(facts: Facts) -> Diagnosis:
    """Conclude what can be concluded from these measurements."""
    found = losses(facts)
    predicted = what_if(facts, found)
    verdict = judge(facts, None if predicted is None else predicted.deeper)
    return Diagnosis(facts=facts, verdict=verdict, what_if=predicted, scores=scores(facts.decisions))

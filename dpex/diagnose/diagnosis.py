"""The value that `DpexDataLoader.diagnose` returns, and the ways to show it. Pure but for `write_html`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpex.autotune.types import Settings
from dpex.diagnose import html, report
from dpex.diagnose.attribution import losses
from dpex.diagnose.facts import Facts
from dpex.diagnose.verdict import Verdict, judge
from dpex.diagnose.what_if import Prediction, WhatIf, predicted, what_if


@dataclass(frozen=True, kw_only=True, repr=False)
class Diagnosis:
    """Why training waits for data, if it does, how that is known, and what would change it.

    ``str()`` and ``repr()`` are the report on one screen, and `full` is the report with all tables.

    Attributes:
        facts: The measurements.
        verdict: The cause in one sentence, with evidence and a confidence from 0 to 1.
        what_if: Predictions for other settings and cheaper work; None if there is too little to predict from.

    Examples:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from dpex import DpexDataLoader
        >>> with DpexDataLoader(TensorDataset(torch.arange(6)), num_workers=1) as loader:
        ...     for batch in loader:
        ...         pass
        ...     diagnosis = loader.diagnose()
        >>> diagnosis.verdict.cause, diagnosis.recommendation
        ('too-early', None)
        >>> diagnosis.to_dict()["version"]
        3
    """

    facts: Facts
    verdict: Verdict
    what_if: WhatIf | None

    @property
    def recommendation(self) -> Prediction | None:
        """The one change that brings most for its effort; None if nothing is worth it or nothing can be said."""
        if self.what_if is None or self.verdict.cause in ("too-early", "consumer"):
            return None
        return self.what_if.recommended

    @property
    def advice(self) -> str:
        """The first advice, in sentences, with the rate and the wait that it should bring."""
        return report.advice(self)

    @property
    def end_of_stall(self) -> str:
        """Sentences on how to end the stall; "" where nothing stalls, or too little is known."""
        return "" if self.what_if is None or self.verdict.cause == "too-early" else self.what_if.end

    @property
    def full(self) -> str:
        """The report with all tables."""
        return report.full(self)

    def predict(self, settings: Settings) -> Prediction | None:
        """Predict what other numbers of workers, or another prefetch, would bring; None: too little was measured."""
        return predicted(self.facts, losses(self.facts), settings)

    def __str__(self) -> str:
        return report.text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html.fragment(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the report for programs: dicts, lists, strings, finite numbers, booleans and None.

        ``version`` is that of the layout; it grows when something is renamed or removed.
        """
        return report.plain(self)

    def html(self, last: Sequence[str] = ()) -> str:
        """Return the report as a page that loads nothing from elsewhere.

        Args:
            last: Lines for the end of the page.
        """
        return html.html(self, last)

    def write_html(self, path: str | Path) -> Path:
        """Write the page that `html` returns.

        Args:
            path: Where to write it; ``~`` is the home directory.

        Returns:
            The path of the page.

        Raises:
            OSError: It cannot be written there.
        """
        path = Path(path).expanduser()
        path.write_text(self.html(), encoding="utf-8", errors="backslashreplace")
        return path


def diagnose(facts: Facts) -> Diagnosis:
    """Conclude what can be concluded from these measurements."""
    return Diagnosis(facts=facts, verdict=judge(facts), what_if=what_if(facts, losses(facts)))

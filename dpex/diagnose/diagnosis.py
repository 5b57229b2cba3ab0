"""Derive from a loader's counts the diagnosis that `DpexDataLoader.diagnose` returns, and show it in several formats.

The functions need only the counts, so the loader may have ended. Any thread may call them.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpex.diagnose import report, what_if, work
from dpex.diagnose.end_of_stall import end_of_stall
from dpex.diagnose.facts import Facts, Subject
from dpex.diagnose.findings import Findings, recommended
from dpex.diagnose.verdict import judge
from dpex.diagnose.what_if import ARGUMENTS, TUNERS, Prediction, Run
from dpex.engine.snapshots import LoaderCounters
from dpex.measure.causes import losses
from dpex.measure.readable import percent
from dpex.measure.reading import Reading
from dpex.measure.settings import Settings
from dpex.system.cpus import parts_of_cpus, usable_cpus
from dpex.system.meter import private_bytes

if TYPE_CHECKING:
    from dpex.autotune.runtime.tuner import Tuner


@dataclass(frozen=True, kw_only=True, repr=False)
class Diagnosis(Findings):
    """The reason why training waits for data, with its evidence, and the effect of possible changes.

    ``str()`` and ``repr()`` are the report on one screen, and `full` is the report with all tables.

    Attributes:
        facts: The measurements.
        verdict: The cause in one sentence, with evidence and a confidence from 0 to 1.
        predictions: Changes that increase the batches per second, except the tuner's own. Changes of an argument, and
            stopping other programs, come first; then all other changes. Each group is in order of the rate.
        beyond: The most effective change of code after the recommended change of an argument, or None.
        held_back: The reason why the tuner has not taken a faster setting, or "".
        end_of_stall: Sentences on how to end the stall; "" without a stall or enough measurements.

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
        6
    """

    @property
    def advice(self) -> str:
        """The first advice, in sentences, with the rate and the wait that it should bring."""
        return report.advice(self)

    @property
    def full(self) -> str:
        """The report with all tables."""
        return report.full(self)

    def predict(self, settings: Settings) -> Prediction | None:
        """Predict the effect of other numbers of workers or another prefetch; None if too little was measured."""
        found = losses(self.facts)
        model = work.model_of(self.facts, found)
        run = None if model is None else Run(facts=self.facts, found=found, model=model)
        return None if run is None else run.predicted("workers", "", settings)

    def __str__(self) -> str:
        return report.text(self)

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Return the report for programs: dicts, lists, strings, finite numbers, booleans and None.

        Each value has the name of its attribute or property. ``version`` is the version of the layout. It grows when a
        name is changed or removed.
        """
        return report.plain(self)

    def write_html(self, path: str | Path, last: Sequence[str] = ()) -> Path:
        """Write the report with all tables as an HTML page with lines of a fixed width and no external resources.

        Args:
            path: Where to write it; ``~`` is the home directory.
            last: Lines for the end of the page.

        Returns:
            The path of the page.

        Raises:
            OSError: The page cannot be written to ``path``.
        """
        path = Path(path).expanduser()
        path.write_text(_page(self, last), encoding="utf-8", errors="backslashreplace")
        return path


_PAGE_COLUMNS = 80
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>dpex: TITLE</title>
<style>:root {{ color-scheme: light dark; }} pre {{ font: 14px/1.4 ui-monospace, monospace; overflow-x: auto; }}</style>
</head>
<body><pre>{code}</pre></body>
</html>
"""


def _page(found: Diagnosis, last: Sequence[str]) -> str:
    from rich.console import Console  # imported here, because `import dpex` does not need rich
    from rich.text import Text

    console = Console(record=True, width=_PAGE_COLUMNS, file=io.StringIO(), force_jupyter=False)
    text = Text("\n".join([report.full(found, _PAGE_COLUMNS), *(("", *last) if last else ())]))
    starts = [f"{found.verdict.title.upper()}:", "First:", "To end the stall:", "Warning:"]
    titles = [f"{one.title}\n" for one in report.sections(found)]
    text.highlight_regex(f"(?m)^({'|'.join(map(re.escape, starts + titles))})", "bold")
    console.print(text, soft_wrap=True)
    return console.export_html(code_format=_PAGE.replace("TITLE", found.verdict.title), inline_styles=True)


def diagnose(facts: Facts) -> Diagnosis:
    """Return the verdict and the predictions that these measurements support."""
    found = losses(facts)
    verdict, model = judge(facts, found), work.model_of(facts, found)
    if model is None or verdict.cause == "too-early":
        return Diagnosis(facts=facts, verdict=verdict)
    better = what_if.better(facts, found, model)
    own = [one for one in better if facts.is_tuned and one.kind in TUNERS]
    others = tuple(one for one in better if one not in own)
    first, beyond = recommended(others, facts.rate), None
    if first is not None and first.kind in ARGUMENTS:
        beyond = recommended(what_if.better(facts, found, model, after=first), first.rate)
    return Diagnosis(
        facts=facts,
        verdict=verdict,
        predictions=others,
        beyond=beyond,
        held_back=_held_back(facts) if own else "",
        end_of_stall="" if verdict.cause == "consumer" else end_of_stall(facts, found, model),
    )


# -- from a loader's counts --------------------------------------------------------------------------------------------


def facts_of(account: Reading, subject: Subject) -> Facts:
    """Return the counts of a loader, and the facts of it that need no measurement, as one value."""
    cpus = max(0.5, usable_cpus() / parts_of_cpus(os.environ, account.sharing_ranks))
    return account.narrowed(Facts, **vars(subject), prefetch=account.prefetch or 1, cpus=cpus)


@dataclass(frozen=True, kw_only=True)
class DiagnosisSource:
    """A loader's counts, its description, and its tuner if it has one."""

    book: LoaderCounters
    subject: Subject
    tuner: Tuner | None = None

    def restart(self) -> None:
        """Count from now on."""
        self.book.restart()
        if self.tuner is not None:
            self.tuner.kernels = Reading()

    def diagnose(self, account: Reading | None = None) -> Diagnosis:
        """Diagnose ``account``, by default all counts in ``book``. Takes 10 ms of CPU, and up to 6 ms per worker."""
        found = account or self.book.read()
        subject = replace(self.subject, private_bytes=private_bytes(found.pids))
        if self.tuner is not None:
            if account is None:  # kernels are counted since the last restart, and not by period
                found = found.plus(self.tuner.kernels)
            subject = replace(
                subject,
                is_tuned=True,
                config=self.tuner.config,
                decisions=tuple(self.tuner.decisions),
            )
        return diagnose(facts_of(found, subject))


def _held_back(facts: Facts) -> str:
    """Return why the tuner has not taken a setting that the model says is faster."""
    last = facts.decisions[-1] if facts.decisions else None
    if last is not None and last.outcome is None and last.predicted_rate:
        return (
            f'num_workers="auto" is trying {last.new}, which should bring {last.predicted_rate:.3g} batches/s and a '
            f"wait of {percent(last.predicted_wait)}"
        )
    return 'num_workers="auto" has not settled yet'

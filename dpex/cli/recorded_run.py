"""A recorded run: read its trace (see `dpex.autotune.trace`), and show its windows to laws made anew.

From the first decision that differs on, that is no more than an indication: the windows stay as they were recorded,
under the recorded settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.law import law_for
from dpex.autotune.trace import FORMAT, VERSION, Header, TraceOrigin
from dpex.autotune.types import Decision, Outcome, Sample
from dpex.errors import OptionError, TraceError
from dpex.schedule.json_values import build


@dataclass(frozen=True, kw_only=True)
class TraceStep:
    """A sample, and the number of the decision that followed from it, if one did."""

    sample: Sample
    decision: int | None = None


@dataclass(frozen=True, kw_only=True)
class TraceSection:
    """The life of one law."""

    origin: TraceOrigin
    steps: tuple[TraceStep, ...]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A whole trace. decisions: all, by number, with their outcomes. is_torn: an incomplete last line was left out."""

    header: Header
    sections: tuple[TraceSection, ...]
    decisions: tuple[Decision, ...]
    is_torn: bool = False

    @property
    def samples(self) -> list[Sample]:
        """The samples of all sections."""
        return [step.sample for section in self.sections for step in section.steps]


def read(lines: Iterable[bytes], name: str) -> Trace:
    """Read a trace. ``lines`` with their ends, as a file gives them; ``name`` is for messages.

    Raises:
        TraceError: no trace, one of a version that this reader does not know, or a line that is broken.
    """
    return _Reader(name).read(lines)


class _Reader:
    def __init__(self, name: str) -> None:
        self._name = name
        self._header: Header | None = None
        self._origins: list[TraceOrigin] = []
        self._steps: list[list[TraceStep]] = []
        self._decisions: list[Decision] = []
        self._is_torn = False

    def read(self, lines: Iterable[bytes]) -> Trace:
        for number, record in self._records(lines):
            where = f"{self._name}, line {number}"
            if self._header is None:
                self._check_format(record, where)
            try:
                self._take(record)
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(
                    f"{where}: broken ({error}); it was not written by dpex in this form. Without this line and all "
                    "after it the rest can be replayed"
                ) from error
        if self._header is None:
            raise TraceError(f"{self._name}: empty; a trace begins with the first window, some batches into the run")
        sections = (TraceSection(origin=o, steps=tuple(s)) for o, s in zip(self._origins, self._steps, strict=True))
        return Trace(
            header=self._header,
            sections=tuple(sections),
            decisions=tuple(self._decisions),
            is_torn=self._is_torn,
        )

    def _records(self, lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Number and content of each line; a last one without an end that is no JSON was torn when the run died."""
        for number, text in enumerate(lines, 1):
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                if not text.endswith(b"\n") and number > 1:
                    self._is_torn = True
                    return
                raise TraceError(
                    f"{self._name}, line {number}: no JSON ({error}). "
                    + (
                        "A trace is written by AutotuneConfig(trace=...) or DPEX_TRACE; is this the file?"
                        if number == 1
                        else f"The lines before it can be replayed: head -n {number - 1} {self._name} > whole.jsonl"
                    )
                ) from error
            if not isinstance(record, dict):
                raise TraceError(f"{self._name}, line {number}: {str(record)[:40]!r} where an object should be")
            yield number, record

    @staticmethod
    def _check_format(record: Mapping[str, Any], where: str) -> None:
        if record.get("format") != FORMAT:
            raise TraceError(
                f"{where}: no header of a {FORMAT}, so this is another kind of file; a trace is written by "
                "AutotuneConfig(trace=...) or DPEX_TRACE"
            )
        version = str(record.get("version"))
        major = version.split(".")[0]
        if not major.isdecimal():
            raise TraceError(f"{where}: version {version!r}, where there should be one such as '1.0'")
        if int(major) != VERSION[0]:
            raise TraceError(
                f"{where}: a trace of version {version}, written by dpex {record.get('dpex')}, and this one reads "
                f"{VERSION[0]}.x: replay it with the dpex that wrote it, or a newer one"
            )

    def _take(self, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        if kind == "header":
            self._header = build(Header, record)
            self._begin(record)
        elif kind == "renewed":
            self._begin(record)
        elif kind == "sample":
            self._steps[-1].append(TraceStep(sample=build(Sample, record)))
        elif kind == "decision":
            self._decide(record)
        elif kind == "outcome":
            number = record["number"]
            decided = self._decisions[self._known(number)]
            self._decisions[number] = replace(decided, outcome=build(Outcome, record))

    def _begin(self, record: Mapping[str, Any]) -> None:
        self._origins.append(build(TraceOrigin, record["origin"]))
        self._steps.append([])

    def _decide(self, record: Mapping[str, Any]) -> None:
        number, steps = record["number"], self._steps[-1]
        if number != len(self._decisions) or not steps:
            raise ValueError(f"decision {number} where {len(self._decisions)} should be, and after a sample")
        self._decisions.append(build(Decision, record))
        steps[-1] = replace(steps[-1], decision=number)

    def _known(self, number: Any) -> int:
        if not isinstance(number, int) or not 0 <= number < len(self._decisions):
            raise ValueError(f"an outcome of decision {number}, and there are {len(self._decisions)}")
        return number


# -- decided again -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReplayedWindow:
    """A sample, its number (from 1 on), the decision that was recorded on it, and the decision made on it now."""

    number: int
    sample: Sample
    recorded: Decision | None
    replayed: Decision | None

    @property
    def is_same(self) -> bool:
        """Return True if both are the same change for the same reason, or none; words and predictions may differ."""
        return _essence(self.recorded) == _essence(self.replayed)


def _essence(decision: Decision | None) -> object:
    return None if decision is None else (decision.old, decision.new, decision.reason)


def replay(trace: Trace, changes: Mapping[str, Any] | None = None) -> list[ReplayedWindow]:
    """Show all samples to laws made anew, under the recorded configuration with these ``changes``.

    Raises:
        OptionError: the changes do not go with the recorded configuration.
    """
    windows: list[ReplayedWindow] = []
    for section in trace.sections:
        for step, replayed in zip(section.steps, _decide(section, changes or {}), strict=True):
            recorded = None if step.decision is None else trace.decisions[step.decision]
            number = len(windows) + 1
            windows.append(ReplayedWindow(number=number, sample=step.sample, recorded=recorded, replayed=replayed))
    return windows


def _decide(section: TraceSection, changes: Mapping[str, Any]) -> list[Decision | None]:
    """Return the decision of a new law on each sample, with the outcome that the law found later."""
    origin = section.origin
    law = law_for(replace(origin.config, **changes), origin.start)
    decided = [law.step(step.sample) for step in section.steps]
    judged = iter(law.decisions)
    return [None if decision is None else next(judged) for decision in decided]


def load(path: str) -> Trace:
    """Read a trace file.

    Raises:
        TraceError: it cannot be opened or read.
    """
    try:
        with Path(path).open("rb") as lines:
            return read(lines, path)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}; give a file written by AutotuneConfig(trace=...)") from error


def parse_changes(texts: Iterable[str]) -> dict[str, Any]:
    """``["max_local=4"]`` → ``{"max_local": 4}``; ranges are checked when a configuration is made.

    Raises:
        OptionError: no knob of that name, or nothing that could be a value.
    """
    knobs = [field.name for field in fields(AutotuneConfig) if field.name != "trace"]
    changes: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name not in knobs or not equals:
            raise OptionError(f"--set {text}: give KNOB=VALUE, with one of {', '.join(knobs)}")
        try:
            changes[name] = None if value == "None" else json.loads(value)
        except ValueError:
            raise OptionError(f"--set {text}: give a number, or None") from None
    return changes

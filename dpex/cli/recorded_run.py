"""A recorded run: read its trace (see `dpex.autotune.trace`), and show its windows to laws made anew.

From the first decision that differs on, that is no more than an indication: the windows stay as they were recorded,
under the recorded settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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
    steps: list[TraceStep]


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
        TraceError: It is no trace, or one of a version that this reader does not know, or a line is broken.
    """
    texts = list(lines)
    is_torn = len(texts) > 1 and not texts[-1].endswith(b"\n") and isinstance(_parsed(texts[-1]), ValueError)
    header: Header | None = None
    sections: list[TraceSection] = []
    decisions: list[Decision] = []
    for number, text in enumerate(texts[: len(texts) - is_torn], 1):
        where = f"{name}, line {number}"
        record = _parsed(text)
        if isinstance(record, ValueError):
            whole = f"The lines before it can be replayed: head -n {number - 1} {name} > whole.jsonl"
            hint = "A trace is written by AutotuneConfig(trace=...) or DPEX_TRACE; is this the file?"
            raise TraceError(f"{where}: no JSON ({record}). {hint if number == 1 else whole}") from record
        if not isinstance(record, dict):
            raise TraceError(f"{where}: {str(record)[:40]!r} where an object should be")
        if header is None:
            _check_format(record, where)
        try:
            if record["kind"] == "header":
                header = build(Header, record)
            _take(record, sections, decisions)
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(
                f"{where}: broken ({error}); it was not written by dpex in this form. Without this line and all "
                "after it the rest can be replayed"
            ) from error
    if header is None:
        raise TraceError(f"{name}: empty; a trace begins with the first window, some batches into the run")
    return Trace(header=header, sections=tuple(sections), decisions=tuple(decisions), is_torn=is_torn)


def _parsed(text: bytes) -> Any:
    """Return the line's content, or the error where it is no JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        return error
    except RecursionError as error:
        return ValueError(str(error))


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


def _take(record: Mapping[str, Any], sections: list[TraceSection], decisions: list[Decision]) -> None:
    """Add what a line holds.

    Raises:
        KeyError, TypeError, ValueError: It is not what a recorder writes at this place.
    """
    kind, number = record["kind"], record.get("number")
    if kind in ("header", "renewed"):
        sections.append(TraceSection(origin=build(TraceOrigin, record["origin"]), steps=[]))
        return
    steps = sections[-1].steps
    if kind == "sample":
        steps.append(TraceStep(sample=build(Sample, record)))
    elif kind == "decision":
        if number != len(decisions) or not steps:
            raise ValueError(f"decision {number} where {len(decisions)} should be, and after a sample")
        decisions.append(build(Decision, record))
        steps[-1] = replace(steps[-1], decision=number)
    elif kind == "outcome":
        if not isinstance(number, int) or not 0 <= number < len(decisions):
            raise ValueError(f"an outcome of decision {number}, and there are {len(decisions)}")
        decisions[number] = replace(decisions[number], outcome=build(Outcome, record))


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

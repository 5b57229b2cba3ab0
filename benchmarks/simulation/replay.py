"""A recorded run (see `dpex.autotune.runtime.trace`) as text, its decisions explained, and decided again.

`python -m benchmarks.simulation.replay TRACE` shows the recorded windows to laws made anew. From the first decision
that differs on, that is no more than an indication: the windows stay as they were recorded, under the recorded
settings. A run under another policy is decided again by the law.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.law.wording import described
from dpex.autotune.limits import Limits
from dpex.autotune.runtime.trace import FORMAT, VERSION
from dpex.autotune.supervisor import Supervisor
from dpex.autotune.types import Decision, Outcome
from dpex.measure.reading import Reading
from dpex.measure.settings import Settings
from dpex.system.user_warnings import replace_unencodable

_T = TypeVar("_T")
_WIDTH = 116
"""Columns of the text."""
_DESCRIPTION = """
Explain a recorded run as text: the decisions with their reasons and outcomes, and whether this version of dpex makes
the same decisions on its windows.
"""
_EPILOG = """\
exit status:
  0  this version of dpex makes the same decisions
  1  this version of dpex makes other decisions
  2  the trace cannot be used

examples:
  DPEX_TRACE=run-{rank}.jsonl python train.py
  python -m benchmarks.simulation.replay run-0.jsonl
"""


class TraceError(ValueError):
    """A recorded run cannot be read; the message names the file, the line and the remedy."""


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Print the report; returns the exit status that the help lists."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulation.replay",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("trace", metavar="TRACE", help="a file written by AutotuneConfig(trace=...) or DPEX_TRACE")
    try:
        trace = load(parser.parse_args(arguments).trace)
    except TraceError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    windows = replay(trace)
    replace_unencodable(sys.stdout)
    for line in report(trace, windows):
        write(line)
    return int(not all(window.is_same for window in windows))


# -- the trace ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Header:
    """The first line. started_s: when a window's ``at`` was 0, in seconds since 1970. machine: it and the process."""

    dpex: str
    started_s: float
    machine: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""


@dataclass(frozen=True, kw_only=True)
class TraceOrigin:
    """The origin of a policy: its configuration, start and limits, and why it replaced another, or ""."""

    config: AutotuneConfig
    start: Settings
    limits: Limits = field(default_factory=Limits)
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class TraceStep:
    """A window, and the number of the decision that followed from it, if one did."""

    window: Reading
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
    def windows(self) -> list[Reading]:
        return [step.window for section in self.sections for step in section.steps]


def load(path: str) -> Trace:
    """Read a trace file.

    Raises:
        TraceError: It cannot be opened or read.
    """
    try:
        with Path(path).open("rb") as lines:
            return read(lines, path)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}; give a file written by AutotuneConfig(trace=...)") from error


def read(lines: Iterable[bytes], name: str) -> Trace:
    """Read a trace. ``lines`` with their ends, as a file gives them; ``name`` is for messages.

    Raises:
        TraceError: It is no trace, or one of a version that this reader does not know, or a line is broken.
    """
    texts = list(lines)
    is_torn = len(texts) > 1 and not texts[-1].endswith(b"\n") and _parsed(texts[-1]) is None
    header: Header | None = None
    sections: list[TraceSection] = []
    decisions: list[Decision] = []
    for number, text in enumerate(texts[: len(texts) - is_torn], 1):
        where, record = f"{name}, line {number}", _parsed(text)
        if header is None:
            _check_format(record, where)
        try:
            if record is None:
                raise ValueError("no JSON object")
            if record["kind"] == "header":
                header = build(Header, record)
            _take(record, sections, decisions)
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(
                f"{where}: broken ({error}). The lines before it can be replayed: head -n {number - 1} {name} > "
                "whole.jsonl"
            ) from error
    if header is None:
        raise TraceError(f"{name}: empty; a trace begins with the first window, some batches into the run")
    return Trace(header=header, sections=tuple(sections), decisions=tuple(decisions), is_torn=is_torn)


def _parsed(text: bytes) -> dict[str, Any] | None:
    """Return the line's object; None: it holds none."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _check_format(record: Mapping[str, Any] | None, where: str) -> None:
    if record is None or record.get("format") != FORMAT:
        raise TraceError(
            f"{where}: no header of a {FORMAT}, so this is another kind of file; a trace is written by "
            "AutotuneConfig(trace=...) or DPEX_TRACE"
        )
    version = str(record.get("version"))
    if version.split(".")[0] != str(VERSION[0]):
        raise TraceError(
            f"{where}: a trace of version {version!r}, written by dpex {record.get('dpex')}, and this one reads "
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
    if kind == "window":
        steps.append(TraceStep(window=build(Reading, record)))
    elif kind == "decision":
        if number != len(decisions) or not steps:
            raise ValueError(f"decision {number} where {len(decisions)} should be, and after a window")
        decisions.append(build(Decision, record))
        steps[-1] = replace(steps[-1], decision=number)
    elif kind == "outcome":
        if not isinstance(number, int) or not 0 <= number < len(decisions):
            raise ValueError(f"an outcome of decision {number}, and there are {len(decisions)}")
        decisions[number] = replace(decisions[number], outcome=build(Outcome, record))


# -- dataclasses from JSON ---------------------------------------------------------------------------------------------

_NAMES = {"Limits": Limits, "Policy": Any, "Settings": Settings, "Tuned": Any, "os": os}
"""Names in annotations that their modules import for type checkers only."""


@cache
def _fields_of(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    read = [f for f in fields(kind) if kind is not AutotuneConfig or f.name != "policy"]
    hints = get_type_hints(kind, localns=_NAMES)
    return tuple((f.name, hints[f.name], f.default is MISSING and f.default_factory is MISSING) for f in read)


def build(kind: type[_T], record: Any) -> _T:
    """Return a dataclass from the object that `dpex.measure.record.as_json` made of it.

    Unknown fields are passed over, and missing ones take their defaults.

    Raises:
        TypeError, ValueError: A field is missing that has no default, or is no number or object as it should be.
    """
    if not isinstance(record, Mapping):
        raise TypeError(f"{kind.__name__}: {record!r} where an object should be")
    values: dict[str, Any] = {}
    for name, hint, required in _fields_of(kind):  # type: ignore[arg-type]  # a class, not Hashable?
        if name in record:
            values[name] = _value(hint, record[name])
        elif required:
            raise ValueError(f"{kind.__name__} without {name!r}")
    return kind(**values)


def _value(hint: Any, value: Any) -> Any:
    """Return the value of a field of type ``hint``. Numbers that JSON lacks are the strings inf, -inf and nan."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is float:  # whole numbers stay as they are: the scoreboard's kept results are found by how they are written
        return value if isinstance(value, (int, float)) else float(value)
    if is_dataclass(hint):
        return build(hint, value)  # type: ignore[arg-type]
    if origin in (Union, types.UnionType):
        return None if value is None else _value(next(one for one in inner if one is not type(None)), value)
    if origin is tuple:
        return tuple(_value(inner[0], item) for item in value)
    if origin is Mapping:
        return {name: _value(inner[1], item) for name, item in value.items()}
    return value


# -- decided again -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReplayedWindow:
    """A window, the decision that was recorded on it, and the decision made on it now."""

    window: Reading
    recorded: Decision | None
    replayed: Decision | None

    @property
    def is_same(self) -> bool:
        """Return True if both are the same change for the same reason, or none; words and predictions may differ."""
        return _short(self.recorded) == _short(self.replayed)


def replay(trace: Trace) -> list[ReplayedWindow]:
    """Show all windows to laws made anew, under the recorded configuration."""
    windows: list[ReplayedWindow] = []
    for section in trace.sections:
        for step, replayed in zip(section.steps, _decide(section), strict=True):
            recorded = None if step.decision is None else trace.decisions[step.decision]
            windows.append(ReplayedWindow(window=step.window, recorded=recorded, replayed=replayed))
    return windows


def _decide(section: TraceSection) -> list[Decision | None]:
    """Return the decision of a new law on each window, with the outcome that the law found later."""
    law = Supervisor(section.origin.config, section.origin.start, section.origin.limits)
    decided = [law.step(step.window) for step in section.steps]
    judged = iter(law.decisions)
    return [None if decision is None else next(judged) for decision in decided]


# -- the report --------------------------------------------------------------------------------------------------------


def report(trace: Trace, windows: Sequence[ReplayedWindow]) -> Iterator[str]:
    yield from _head(trace)
    decided = [(window, window.recorded) for window in windows if window.recorded is not None]
    yield ""
    yield f"Decisions: {len(decided) or 'none'}"
    for number, (window, decision) in enumerate(decided, 1):
        yield from _explain(number, window, decision)
    yield from _verdict(windows)


def _head(trace: Trace) -> Iterator[str]:
    """Yield lines with the time, software and settings of the recorded run."""
    started = datetime.fromtimestamp(trace.header.started_s, timezone.utc)
    yield f"Recorded {started:%Y-%m-%d %H:%M:%S} UTC by dpex {trace.header.dpex}"
    if trace.is_torn:
        yield "  note      the last line is incomplete (the run was killed, or the disk was full) and was left out"
    for number, section in enumerate(trace.sections):
        origin = section.origin
        at = f" from {section.steps[0].window.at:.1f} s on" if number and section.steps else ""
        why = f" ({origin.why})" if origin.why else ""
        yield f"  {'renewed ' if number else 'settings'}  {origin.start}{at}{why}"
        for label, values in (("given", _not_default(origin.config)), ("limits", _not_default(origin.limits))):
            yield from _wrapped(f"            {label}: ", ", ".join(values)) if values else ()


def _not_default(values: AutotuneConfig | Limits) -> list[str]:
    default = asdict(type(values)())
    return [f"{name}={value}" for name, value in asdict(values).items() if value != default[name] and name != "trace"]


def _explain(number: int, window: ReplayedWindow, decision: Decision) -> Iterator[str]:
    yield ""
    yield from _wrapped(f"[{number}] at {decision.at:.2f} s: ", described(decision))
    yield from _wrapped("    why       ", decision.text)
    yield f"    replayed  {'the same' if window.is_same else _short(window.replayed)}"


def _short(decision: Decision | None) -> str:
    return "nothing" if decision is None else f"{decision.old} → {decision.new} ({decision.reason})"


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(label + text, _WIDTH, subsequent_indent=" " * len(label), break_on_hyphens=False)


def _verdict(windows: Sequence[ReplayedWindow]) -> Iterator[str]:
    yield ""
    first = next((window for window in windows if not window.is_same), None)
    if first is None:
        yield "This version of dpex decides the same on these windows."
        return
    yield f"This version of dpex decides otherwise, first at {first.window.at:.2f} s:"
    yield f"    recorded  {_short(first.recorded)}"
    yield f"    replayed  {_short(first.replayed)}"
    if first.replayed is not None:
        yield from _wrapped("    why       ", first.replayed.text)
    yield ""
    yield "All later windows were recorded under the recorded settings, not under those that would be in force now."


if __name__ == "__main__":
    sys.exit(main())

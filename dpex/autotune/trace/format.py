"""A run on record: what a controller was shown, what it decided, what that brought. JSON, one object a line. PURE.

A trace begins with a ``header`` (format, version, who and where, the first controller's `TraceOrigin`). Then follow, in
the order in which they happened: ``sample`` (before the controller sees it), ``outcome`` (of an earlier decision, by
its number), ``decision`` (as taken), and ``renewed`` where a new controller took over (`TraceOrigin` again). Numbers
are exact; those that JSON lacks are the strings "inf", "-inf" and "nan".

A reader takes a version whose first number it knows. A newer second number adds: kinds of lines and fields that an
older reader passes over, and that a newer one finds missing in an old trace and fills with defaults.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.types import Decision, Outcome, Sample, Settings
from dpex.errors import TraceError
from dpex.measure.samples import PoolSample

FORMAT = "dpex-trace"
VERSION = (1, 1)
"""What is written. The first number: who reads another cannot read this. The second: additions."""
_NOT_JSON = ("inf", "-inf", "nan")
_EMPTY = PoolSample()
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class TraceOrigin:
    """What a controller was made from. config: narrowed to what the loader can do. start: the settings it began with.

    limits: what the loader or the user ruled out, by name. why: why a controller took over from another, else "".
    """

    config: AutotuneConfig
    start: Settings
    limits: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What no sample holds. dpex: its version. wall_s: seconds since 1970. machine: the machine and the process."""

    dpex: str
    wall_s: float
    machine: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Header:
    """The first line. started_s: when a sample's ``at`` was 0, in seconds since 1970."""

    version: str
    dpex: str
    started_s: float
    machine: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TraceStep:
    """A sample, and the number of the decision that followed from it, if one did."""

    sample: Sample
    decision: int | None = None


@dataclass(frozen=True, kw_only=True)
class TraceSection:
    """The life of one controller."""

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
        """Of all sections."""
        return [step.sample for section in self.sections for step in section.steps]


# -- writing -----------------------------------------------------------------------------------------------------------


class Controls(Protocol):
    """What of a controller is used here."""

    decisions: list[Decision]

    def begin(self) -> Settings:
        """The setting to begin with."""

    def step(self, sample: Sample) -> Decision | None:
        """Take a window in."""

    def useful_remote(self, most: int) -> int | None:
        """See `Law.useful_remote`."""


class Recorder:
    """Makes the records of a run and hands each to ``emit``; ``facts`` is called once, for the header."""

    def __init__(self, emit: Callable[[dict[str, Any]], object], facts: Callable[[], RunFacts]) -> None:
        self._emit = emit
        self._facts = facts
        self._has_header = False
        self._decisions = 0

    def origin(self, origin: TraceOrigin, at: float) -> None:
        """A controller begins, ``at`` seconds into the run."""
        if self._has_header:
            self._emit({"kind": "renewed", "origin": plain(origin)})
            return
        self._has_header = True
        facts = self._facts()
        version = ".".join(map(str, VERSION))
        header = Header(version=version, dpex=facts.dpex, started_s=facts.wall_s - at, machine=facts.machine)
        self._emit({"kind": "header", "format": FORMAT} | plain(header) | {"origin": plain(origin)})

    def sample(self, sample: Sample) -> None:
        """A controller is about to see it. Pools in which nothing is are left out."""
        said = {name: value for name, value in vars(sample).items() if value != _EMPTY}
        self._emit({"kind": "sample"} | plain(said))

    def decision(self, decision: Decision) -> int:
        """It was taken; returns its number."""
        number, self._decisions = self._decisions, self._decisions + 1
        record: dict[str, Any] = {"kind": "decision", "number": number} | plain(replace(decision, outcome=None))
        del record["outcome"]
        self._emit(record)
        return number

    def outcome(self, number: int, outcome: Outcome) -> None:
        """What the decision of that number brought."""
        self._emit({"kind": "outcome", "number": number} | plain(outcome))


class RecordingLaw:
    """A law on record. Lines are written in `step`, or by `announce` where no step may come."""

    def __init__(self, law: Controls, recorder: Recorder, origin: TraceOrigin) -> None:
        self.law = law
        self._recorder = recorder
        self._origin = origin
        self._is_announced = False
        self._numbers: dict[int, int] = {}

    @property
    def decisions(self) -> list[Decision]:
        """The law's."""
        return self.law.decisions

    def begin(self) -> Settings:
        """The law's."""
        return self.law.begin()

    def useful_remote(self, most: int) -> int | None:
        """The law's."""
        return self.law.useful_remote(most)

    def announce(self, at: float = 0.0) -> None:
        """Write down that this law begins; once."""
        if not self._is_announced:
            self._is_announced = True
            self._recorder.origin(self._origin, at)

    def step(self, sample: Sample) -> Decision | None:
        """The law's, and the lines about it."""
        self.announce(sample.at)
        self._recorder.sample(sample)
        decision = self.law.step(sample)
        decisions = self.law.decisions
        for index, number in list(self._numbers.items()):
            outcome = decisions[index].outcome
            if outcome is not None:
                self._recorder.outcome(number, outcome)
                del self._numbers[index]
        if decision is not None:
            self._numbers[len(decisions) - 1] = self._recorder.decision(decision)
        return decision


def plain(value: Any) -> Any:
    """The value in what JSON has; dataclasses become objects."""
    if value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return {name: plain(item) for name, item in vars(value).items()} if is_dataclass(value) else value


def line(record: Mapping[str, Any]) -> str:
    """A record as it stands in the file, its end included."""
    return json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"


# -- reading -----------------------------------------------------------------------------------------------------------


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


@cache
def _fields_of(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    hints = get_type_hints(kind)
    return tuple((f.name, hints[f.name], f.default is MISSING and f.default_factory is MISSING) for f in fields(kind))


def build(kind: type[_T], record: Any) -> _T:
    """A dataclass from its object; unknown fields are passed over, missing ones take their defaults.

    Raises:
        TypeError, ValueError: a field is missing that has no default, or is of another type.
    """
    if not isinstance(record, Mapping):
        raise TypeError(f"{kind.__name__}: {record!r} where an object should be")
    values: dict[str, Any] = {}
    for name, hint, required in _fields_of(kind):  # type: ignore[arg-type]  # a class, not Hashable?
        if name in record:
            values[name] = _value(hint, record[name], f"{kind.__name__}.{name}")
        elif required:
            raise ValueError(f"{kind.__name__} without {name!r}")
    return kind(**values)


def _value(hint: Any, value: Any, where: str) -> Any:
    if hint is float:
        return _number(value, where)
    if hint in (int, str, bool):
        if type(value) is not hint:
            raise TypeError(f"{where}: {value!r} is no {hint.__name__}")
        return value
    if is_dataclass(hint):
        return build(hint, value)  # type: ignore[arg-type]
    return _compound(hint, value, where)


def _number(value: Any, where: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    if value in _NOT_JSON:
        return float(value)
    raise TypeError(f"{where}: {value!r} is no number")


def _compound(hint: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        return _value(next(one for one in inner if one is not type(None)), value, where)
    if origin is Literal:
        return _value(str, value, where)  # a newer dpex may know more of them
    if origin is tuple and isinstance(value, list):
        return tuple(_value(inner[0], item, where) for item in value)
    if origin is Mapping and isinstance(value, Mapping):
        return {name: _value(inner[1], item, where) for name, item in value.items()}
    raise TypeError(f"{where}: {value!r} is no {hint}")

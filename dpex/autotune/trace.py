"""The record of a run: windows, decisions and their effects. JSON, one object a line. PURE.

A trace begins with a ``header``: format, version, process and machine, and the first law's `TraceOrigin`. Then follow,
in the order in which they happened, ``window`` (before the law sees it), ``outcome`` (of an earlier decision, by its
number) and ``decision`` (as taken). ``renewed`` has another `TraceOrigin`, after limits changed.

A reader takes a version whose first number it knows. A newer second number adds: kinds of lines and fields that an
older reader passes over, and that a newer one finds missing in an old trace and fills with defaults.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.limits import Limits
from dpex.autotune.types import Decision, Outcome
from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import Reading
from dpex.measure.settings import Settings

FORMAT = "dpex-trace"
VERSION = (3, 0)
"""Version of the format. A reader needs the same first number; the second counts additions."""
UNTOLD = (
    *("calls", "nodes", "services", "failed_nodes", "why_excluded"),
    *(
        "batch_waits",
        "causes",
        "errors",
        "latest_failed",
        "moved_bytes",
        "pids",
        "slow_samples",
        "steps",
        "thread",
        "waits",
    ),
)
"""Fields of a reading that no law reads."""
_EMPTY = {Reading: Reading(), PoolReading: PoolReading()}


def plain(
    value: Any, *, members: Callable[[Any], Mapping[str, Any]] = vars, infinite: Callable[[float], Any] = str
) -> Any:
    """Return a value in the types that JSON has. The name of a class, a function or a file is a string.

    Args:
        members: Returns the members of a dataclass, which becomes an object.
        infinite: Returns the value for inf, -inf and nan.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return infinite(float(value))
    if value is None or isinstance(value, (int, float, str)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        value = members(value)
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(name): plain(item, members=members, infinite=infinite) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item, members=members, infinite=infinite) for item in value]
    return getattr(value, "__qualname__", str(value))


def line(record: Mapping[str, Any]) -> str:
    """Return a record as a line of the file, its end included."""
    return json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"


def _told(reading: Reading | PoolReading) -> dict[str, Any]:
    """Return the fields that a law reads, as far as they differ from those of an empty reading."""
    empty = vars(_EMPTY[type(reading)])
    told = {name: value for name, value in vars(reading).items() if name not in UNTOLD and value != empty[name]}
    if "pools" in told:
        told["pools"] = {name: _told(pool) for name, pool in told["pools"].items()}
    return told


@dataclass(frozen=True, kw_only=True)
class TraceOrigin:
    """The origin of a law.

    Attributes:
        config: The configuration.
        start: The settings that it began with.
        limits: Those of the configuration, the loader and the user.
        why: Why the law took over from another, else "".
    """

    config: AutotuneConfig
    start: Settings
    limits: Limits = field(default_factory=Limits)
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Header:
    """The first line. started_s: when a window's ``at`` was 0, in seconds since 1970. machine: it and the process."""

    dpex: str
    started_s: float
    machine: Mapping[str, Any] = field(default_factory=dict)
    version: str = ".".join(map(str, VERSION))


class Recorder:
    """Makes the records of a run and hands each to ``emit``; ``header`` is called once, with the seconds since the
    run began."""

    def __init__(self, emit: Callable[[dict[str, Any]], object], header: Callable[[float], Header]) -> None:
        self._emit = emit
        self._header = header
        self._has_header = False
        self._decisions = 0

    def origin(self, origin: TraceOrigin, at: float) -> None:
        """A law begins, ``at`` seconds into the run."""
        if self._has_header:
            self._emit({"kind": "renewed", "origin": plain(origin)})
            return
        self._has_header = True
        self._emit({"kind": "header", "format": FORMAT} | plain(self._header(at)) | {"origin": plain(origin)})

    def window(self, window: Reading) -> None:
        """A law is about to see it."""
        self._emit({"kind": "window"} | plain(_told(window)))

    def decision(self, decision: Decision) -> int:
        """Record a decision, and return its number."""
        number, self._decisions = self._decisions, self._decisions + 1
        record: dict[str, Any] = {"kind": "decision", "number": number} | plain(replace(decision, outcome=None))
        del record["outcome"]
        self._emit(record)
        return number

    def outcome(self, number: int, outcome: Outcome) -> None:
        """Record the outcome of a decision."""
        self._emit({"kind": "outcome", "number": number} | plain(outcome))

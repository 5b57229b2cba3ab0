"""The record of a run as a file, one line of JSON for each window, decision and outcome.

A trace begins with a ``header``: format, version, process and machine, and the ``origin`` of the first policy, which is
its configuration, start and limits. These lines follow in order of time: ``window``, before the policy sees it;
``outcome`` of an earlier decision, by its number; ``decision``, as taken; and ``renewed``, with the ``origin`` of
another policy, after limits changed. The declaration of a field (`dpex.measure.record`) tells whether a window contains
it.

A reader accepts a version whose first number it knows. A higher second number adds kinds of lines and fields, which an
older reader skips. A newer reader gives missing fields their defaults.

Only the tuner's thread writes, and only in the process that made the `TraceFile`. Neither a buffer nor a descriptor is
kept between two lines, so that a killed run leaves a readable file and a fork shares nothing. An error while writing is
logged once, and ends the recording, but not the run.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from dpex import version
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.limits import Limits
from dpex.autotune.types import Decision, Outcome
from dpex.errors import OptionError
from dpex.measure.reading import Reading
from dpex.measure.record import as_json
from dpex.measure.settings import Settings
from dpex.system.cpus import local_ranks, rank, usable_cpus

logger: logging.Logger = logging.getLogger("dpex")

FORMAT = "dpex-trace"
VERSION = (3, 0)
"""Version of the format. A reader needs the same first number; the second counts additions."""
VARIABLE = "DPEX_TRACE"


class Recorder:
    """Makes the records of a run and passes each to ``emit``. ``header`` returns the first record, as `header` does."""

    def __init__(self, emit: Callable[[dict[str, Any]], object], header: Callable[[float], dict[str, Any]]) -> None:
        self._emit = emit
        self._header = header
        self._has_header = False
        self._decisions = 0

    def origin(self, config: AutotuneConfig, start: Settings, limits: Limits, why: str, at: float) -> None:
        """Record the origin of a policy, ``at`` seconds into the run. ``why``: The reason for a new policy, or ""."""
        origin = as_json({"config": config, "start": start, "limits": limits, "why": why})
        if self._has_header:
            self._emit({"kind": "renewed", "origin": origin})
        else:
            self._has_header = True
            self._emit({"kind": "header", **self._header(at), "origin": origin})

    def window(self, window: Reading) -> None:
        """Record a window before the policy sees it."""
        self._emit({"kind": "window", **window.traced()})

    def decision(self, decision: Decision) -> int:
        """Record a decision, and return its number."""
        number, self._decisions = self._decisions, self._decisions + 1
        record = {"kind": "decision", "number": number, **as_json(replace(decision, outcome=None))}
        del record["outcome"]
        self._emit(record)
        return number

    def outcome(self, number: int, outcome: Outcome) -> None:
        """Record the outcome of a decision."""
        self._emit({"kind": "outcome", "number": number, **as_json(outcome)})


def header(at: float) -> dict[str, Any]:
    """Return the fields of a header except ``origin``, which `Recorder` adds. The run began ``at`` seconds ago."""
    torch = sys.modules.get("torch")
    machine = {
        "name": os.uname().nodename,
        "system": f"{os.uname().sysname} {os.uname().release}",
        "python": sys.version.split()[0],
        "torch": str(torch.__version__) if torch is not None else None,
        "pid": os.getpid(),
        "rank": rank(os.environ),
        "local_ranks": local_ranks(os.environ),
        "cpus": os.cpu_count(),
        "usable_cpus": usable_cpus(),
    }
    wrote = {"dpex": version.VERSION, "started_s": time.time() - at, "machine": machine}
    return {"format": FORMAT, **wrote, "version": ".".join(map(str, VERSION))}


def recorder(config: AutotuneConfig) -> Recorder | None:
    """Return the recorder of a new run, or None if no trace is wanted."""
    path = wanted(config, os.environ)
    return None if path is None else Recorder(TraceFile(path).write, header)


def line(record: Mapping[str, Any]) -> str:
    """Return a record as a line of the file, its end included."""
    return json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"


# -- the file ----------------------------------------------------------------------------------------------------------


class TraceFile:
    """See the module. The file is made with its first line, under the first name that is not taken."""

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        self._wanted = path
        self._is_made = False
        self._is_broken = False
        self._pid = os.getpid()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line; never raises."""
        if self._is_broken or self._pid != os.getpid():
            return
        try:
            text = line(record).encode("ascii")
            if not self._is_made:
                self._make()
            self._append(text)
        except (OSError, TypeError, ValueError) as error:
            self._is_broken = True
            logger.warning("auto: %s cannot be written to (%s): recording ends; tuning goes on", self.path, error)

    def _make(self) -> None:
        for path in _names(self._wanted):
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            except FileExistsError:
                continue
            self.path, self._is_made = path, True
            break
        if self.path == self._wanted:
            logger.info("auto: recording to %s", self.path)
        else:
            logger.warning("auto: recording to %s, as the file %s exists", self.path, self._wanted.name)

    def _append(self, text: bytes) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.write(descriptor, text) != len(text):
                raise OSError("no space is left")
        finally:
            os.close(descriptor)


def _names(path: Path) -> Iterator[Path]:
    yield path
    for number in count(2):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")


def wanted(config: AutotuneConfig, environ: Mapping[str, str]) -> Path | None:
    """Return the absolute name of the file, with ``{pid}`` and ``{rank}`` filled in, or None if none is wanted."""
    name = config.trace or environ.get(VARIABLE)
    return Path(filled_in(name, environ)).expanduser().absolute() if name else None


def filled_in(name: str, environ: Mapping[str, str]) -> str:
    """Return a file's name with ``{pid}`` replaced by this process's id and ``{rank}`` by its rank."""
    return name.replace("{pid}", str(os.getpid())).replace("{rank}", str(rank(environ)))


def check(config: AutotuneConfig, environ: Mapping[str, str]) -> None:
    """Refuse a name that cannot be written to, before training begins.

    Raises:
        OptionError: The name belongs to a folder or device, or its folder is missing or read-only.
    """
    try:
        path = wanted(config, environ)
        problem = None if path is None else _problem_of(path)
    except (OSError, RuntimeError, ValueError) as error:
        problem = str(error)
    if problem is not None:
        said = f"AutotuneConfig(trace={config.trace!r})" if config.trace else f"{VARIABLE}={environ[VARIABLE]!r}"
        raise OptionError(f"{said}: {problem}; give a file in a folder that exists and can be written to")


def _problem_of(path: Path) -> str | None:
    """Return the reason why ``path`` cannot be written, or None.

    Raises:
        OSError: The system cannot read ``path``.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return f"{path} is no file"
    except FileNotFoundError:
        if not path.parent.is_dir():
            return f"there is no folder {path.parent}"
    return None if os.access(path.parent, os.W_OK | os.X_OK) else f"no file can be made in {path.parent}"

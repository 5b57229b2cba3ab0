"""The record of a run as a file, one line of JSON for each record; its name, and facts about this process.

The tuner's thread alone writes, and only in the process that made the `TraceFile`. Nothing is held between two lines,
neither a buffer nor a descriptor, so that a killed run leaves a readable file and a fork shares nothing. What goes
wrong while writing is said once, and ends recording, not the run.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.trace import Header, Recorder, line
from dpex.errors import OptionError
from dpex.system.cpus import local_ranks, rank, usable_cpus
from dpex.version import VERSION

logger: logging.Logger = logging.getLogger("dpex")

VARIABLE = "DPEX_TRACE"


def problem_of(path: Path) -> str | None:
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
            logger.warning(
                "auto: %s cannot be written to (%s): recording ends; tuning goes on",
                self.path,
                error,
            )

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
    """The file asked for, absolute, with ``{pid}`` and ``{rank}`` filled in; None: nothing is to be recorded."""
    name = config.trace or environ.get(VARIABLE)
    if not name:
        return None
    return Path(filled_in(name, environ)).expanduser().absolute()


def filled_in(name: str, environ: Mapping[str, str]) -> str:
    """Return a file's name with this process for ``{pid}`` and its rank for ``{rank}``."""
    return name.replace("{pid}", str(os.getpid())).replace("{rank}", str(rank(environ)))


def check(config: AutotuneConfig, environ: Mapping[str, str]) -> None:
    """Refuse what cannot be written to, before training begins.

    Raises:
        OptionError: the name is that of a folder or device, or its folder is not there or not to be written to.
    """
    try:
        path = wanted(config, environ)
        problem = None if path is None else problem_of(path)
    except (OSError, RuntimeError, ValueError) as error:
        problem = str(error)
    if problem is not None:
        said = f"AutotuneConfig(trace={config.trace!r})" if config.trace else f"{VARIABLE}={environ[VARIABLE]!r}"
        raise OptionError(f"{said}: {problem}; give a file in a folder that exists and can be written to")


def header(at: float) -> Header:
    """Return the header of a run that began ``at`` seconds ago in this process."""
    torch = sys.modules.get("torch")
    machine: dict[str, Any] = {
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
    return Header(dpex=VERSION, started_s=time.time() - at, machine=machine)


def recorder(config: AutotuneConfig) -> Recorder | None:
    """Return the recorder of a new run, None if it is not to be recorded."""
    path = wanted(config, os.environ)
    return None if path is None else Recorder(TraceFile(path).write, header)

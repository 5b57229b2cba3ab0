"""A file of records, one line of JSON each, that a running program appends to.

It is written only in the process that made the `TraceFile`. Nothing is held between two lines, neither a buffer nor a
descriptor, so that a killed run leaves a readable file and a fork shares nothing. What goes wrong while writing is said
once, and ends recording, not the run.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from dpex.autotune.trace import line

logger = logging.getLogger("dpex")


def problem_of(path: Path) -> str | None:
    """Why no file can be written there, None if one can.

    Raises:
        OSError: The system does not tell.
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
        self.path = path
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
                "auto: %s cannot be written to (%s): what follows is not recorded; tuning goes on", self.path, error
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

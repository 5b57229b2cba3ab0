"""Warnings that point at the user's own line, and output to streams that cannot encode all characters."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import TextIO

_OURS = (f"{Path(__file__).parents[1]}{os.sep}", f"site-packages{os.sep}torch{os.sep}")


def warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn at the innermost frame that is neither dpex's nor torch's."""
    warnings.warn(text, category, stacklevel=_user_frame()[1])


def user_line() -> tuple[str, int]:
    """Return the file and the line of the innermost frame that is neither dpex's nor torch's."""
    frame = _user_frame()[0]
    return frame.f_code.co_filename, frame.f_lineno


def _user_frame() -> tuple[FrameType, int]:
    """Return the innermost frame that is neither dpex's nor torch's, and the ``stacklevel`` of a warning at it."""
    level = 2
    frame = sys._getframe(level)
    while frame.f_back is not None and any(place in frame.f_code.co_filename for place in _OURS):
        frame = frame.f_back
        level += 1
    return frame, level


def is_first(about: str) -> bool:
    """Return True when it is called with ``about`` for the first time in this process."""
    size = len(_said)
    _said.add(about)
    return len(_said) > size


_said: set[str] = set()
"""Arguments of all calls of `is_first` so far."""


def replace_unencodable(stream: TextIO) -> None:
    """Make the stream write "?" for characters that it cannot encode, instead of raising an error. The output of a job
    may be ASCII only."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")

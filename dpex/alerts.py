"""Warnings that point at the user's own line, whichever way through dpex and torch they came."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

_OURS = (f"{Path(__file__).parent}{os.sep}", f"site-packages{os.sep}torch{os.sep}")


def warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn at the innermost frame that is neither dpex's nor torch's."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and any(place in frame.f_code.co_filename for place in _OURS):
        frame = frame.f_back
        level += 1
    warnings.warn(text, category, stacklevel=level)

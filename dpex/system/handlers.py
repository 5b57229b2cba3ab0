"""Distinguish an exception that a signal handler raised from an error of the code that the signal interrupted."""

from __future__ import annotations

import signal
import traceback


def is_of_handler(error: BaseException) -> bool:
    """Return True if an installed signal handler, such as one that enforces a time limit, has raised ``error``."""
    codes = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))

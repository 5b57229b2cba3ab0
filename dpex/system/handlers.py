"""Tells exceptions that handlers of signals raise from errors of the code in which the signal came."""

from __future__ import annotations

import signal
import traceback


def is_of_handler(error: BaseException) -> bool:
    """Return True if a function or method that handles signals now has raised ``error``, such as a time limit."""
    codes = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))

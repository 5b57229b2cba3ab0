"""Tells exceptions that handlers of signals raise from errors of the code in which the signal came."""

from __future__ import annotations

import functools
import signal
import traceback
from types import CodeType
from typing import Any


def is_of_handler(error: BaseException) -> bool:
    """Return True if a function that handles signals now has raised ``error``, such as a time limit by SIGALRM."""
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = handler if hasattr(handler, "__code__") else getattr(type(handler), "__call__", None)  # noqa: B004
    return getattr(function, "__code__", None)

"""Why an actor died, as the user is told."""

from __future__ import annotations

import importlib
import textwrap
from itertools import dropwhile
from typing import Any

LONGEST_TEXT = 400
"""Letters of Ray's message that are shown. It tells first what happened, and then at length what may be behind it."""


def reason_of(error: BaseException) -> str:
    """Return what Ray says about a death, in one line, with the type of the error at its end.

    Of an error that was raised in the actor, that is the error itself without its traceback. What Ray puts before
    every death is left out: the sentence that its class has for all of them, and the actor's fields, one to a line
    that begins with a tab.
    """
    task_error: Any = importlib.import_module("ray.exceptions").RayTaskError
    while isinstance(error, task_error) and isinstance(error.cause, BaseException):
        error = error.cause
    lines = str(error).splitlines()
    if len(lines) > 1 and lines[0] == getattr(error, "BASE_ERROR_MSG", None):
        lines = list(dropwhile(lambda line: line.startswith("\t"), lines[1:])) or lines[:1]
    text = textwrap.shorten(" ".join(lines), LONGEST_TEXT, placeholder=" …")
    return f"{text} [{type(error).__name__}]".lstrip()

"""Lose no batch to an exception of a signal handler.

Ctrl-C in a notebook is such an exception, and so is a time limit by SIGALRM. CPython runs handlers in the main thread,
as a function begins, after a call, and at each turn of a loop; an exception of theirs comes out there. A program that
catches it and goes on must find every batch, each once.

The engine does not repair a change that such an exception interrupted. It resumes the pass like a later run, with new
workers (`Engine._renew`). Resuming needs only the delivered batches and the drawn indices. So two rules are enough.

First, no call separates the delivery of a batch from its place in the caller's list (`Schedule.deliver`). Second, an
index moves from the sampler into a container within one C call, `deque.extend` over `islice` (`dpex.engine.draws`). The
interpreter runs no handler in between.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from traceback import walk_tb
from typing import Any


def taken(iterator: Iterator[Any], count: int | None = None) -> Iterator[Any]:
    """Return an iterator over the next ``count`` items of ``iterator`` (None: over all), without a turn of the
    interpreter between two items.

    ``iterator`` itself is never passed to ``iter()``, as `islice`, `zip` and a ``for`` loop would do. The ``__iter__``
    of a user's iterator may begin anew: Lightning's batch sampler in ``predict`` does.
    """
    return islice(map(next, repeat(iterator)), count)


def with_lock(lock: Any, body: Callable[[bool], None], limit_s: float = 0.0) -> None:
    """Call ``body`` with whether ``lock`` could be had within ``limit_s`` seconds; release it in every case."""
    got: list[bool] = []
    try:
        got.extend(map(lock.acquire, (limit_s > 0,), (limit_s or -1,)))
        body(got[0])
    finally:
        if got and got[0]:
            lock.release()


def is_from_handler(error: BaseException) -> bool:
    """Return True if a signal handler raised this error, so that the interrupted code may be sound."""
    if not isinstance(error, Exception):
        return True
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    return any(frame.f_code in handlers for frame, _ in walk_tb(error.__traceback__))


def reraise_if_from_handler(error: Exception) -> None:
    """Raise ``error`` again if a handler raised it: only errors of the code itself may be kept or dropped."""
    if is_from_handler(error):
        raise error


def _code_of(handler: Any) -> Any:
    """The code that runs, of a function, a method, a `functools.partial` or an object that can be called."""
    function = getattr(handler, "func", handler)
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", None) or getattr(vars(type(function)).get("__call__"), "__code__", None)

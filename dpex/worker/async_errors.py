"""Errors of samples that an event loop loads, in plain words with their remedy. PURE."""

from __future__ import annotations

import errno
from typing import Any

from dpex.errors import AsyncError
from dpex.measure.sampling import as_text
from dpex.schedule.names import is_asynchronous, with_inner_datasets

_OTHER_LOOP = (
    "{kind} used a client, lock or task of another event loop (asyncio: ... {part}). Each process loads samples in a "
    "loop of its own: make such objects in the first __getitem__, not in __init__ or in the training process"
)
_NESTED = (
    "{kind} started an event loop inside the loop that loads its samples (asyncio: ... {part}). Await the coroutine "
    "instead, or run code that needs a loop of its own in a thread, as by await asyncio.to_thread(function)"
)
_MEANINGS = {
    "attached to a different loop": _OTHER_LOOP,
    "bound to a different event loop": _OTHER_LOOP,
    "Event loop is closed": _OTHER_LOOP,
    "should be used inside a task": _OTHER_LOOP,  # aiohttp's, of a session whose loop is open
    "cannot be called from a running event loop": _NESTED,
    "event loop is already running": _NESTED,
    "while another loop is running": _NESTED,
}
"""Parts of asyncio's messages, from Python 3.10 to 3.14."""
_FILES = (
    "too many open files while sample {index} of {kind} was loaded, one of up to {concurrency} at the same time in a "
    "process. Use one client per process, allow fewer samples by worker_config=WorkerConfig(concurrency=...), or raise "
    "the limit (ulimit -n)"
)


def explained(error: Exception, dataset: Any, index: Any, concurrency: int) -> Exception | None:
    """Return an error that says what the dataset does wrong, and what to do; None if ``error`` has no known meaning.

    Args:
        error: The error of a sample.
        dataset: The loader's dataset.
        index: The index of the sample.
        concurrency: Samples that the process may load at the same time.
    """
    text, outer = str(error), type(dataset).__name__
    names = [type(each).__name__ for each, _ in with_inner_datasets(dataset) if is_asynchronous(each)]
    kind = names[-1] if names else outer
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return OSError(error.errno, _FILES.format(index=as_text(index), kind=kind, concurrency=concurrency))
    if isinstance(error, RuntimeError):
        told = next(((part, meaning) for part, meaning in _MEANINGS.items() if part in text), None)
        return None if told is None else AsyncError(told[1].format(kind=kind, part=told[0]))
    if names and isinstance(error, (TypeError, AttributeError)) and "'coroutine'" in text:
        return AsyncError(
            f"{outer}.__getitem__ got a coroutine in place of a sample ({text}). {kind}.__getitem__ is async: that of "
            f"{outer}, which wraps it, must be, too, and await it"
        )
    return None

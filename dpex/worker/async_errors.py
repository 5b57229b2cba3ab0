"""Errors of asynchronous datasets: each names the mistake in the dataset, and the remedy."""

from __future__ import annotations

import errno
import inspect
from typing import Any

from dpex.errors import UsageError
from dpex.measure.sampling import as_text
from dpex.schedule.names import READING, async_datasets
from dpex.worker.decoded_stream import Decoding

_OTHER_LOOP = (
    "{kind} used a client, lock or task of another event loop (asyncio: ... {part}). Each process loads samples in a "
    "loop of its own: make such objects in the first call that awaits, not in __init__ or in the training process"
)
_NESTED = (
    "{kind} started an event loop inside the loop that loads its samples (asyncio: ... {part}). Await the coroutine "
    "instead, or run code that needs a loop of its own in a thread, as by await asyncio.to_thread(function)"
)
_MEANINGS = {
    "attached to a different loop": _OTHER_LOOP,
    "bound to a different event loop": _OTHER_LOOP,
    "Event loop is closed": _OTHER_LOOP,
    "should be used inside a task": _OTHER_LOOP,  # aiohttp's message, for a session whose loop is open
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
    """Return an error that names the mistake in the dataset and the remedy; None if ``error`` has no known meaning."""
    text, outer = str(error), type(dataset).__name__
    inner = async_datasets(dataset)
    kind = type(inner[-1]).__name__ if inner else outer
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return OSError(error.errno, _FILES.format(index=as_text(index), kind=kind, concurrency=concurrency))
    if isinstance(error, RuntimeError):
        told = next(((part, meaning) for part, meaning in _MEANINGS.items() if part in text), None)
        return None if told is None else UsageError(told[1].format(kind=kind, part=told[0]))
    if inner and isinstance(error, (TypeError, AttributeError)) and "'coroutine'" in text:
        return UsageError(
            f"{outer}.__getitem__ got a coroutine in place of a sample ({text}), because {kind}.__getitem__ is async. "
            f"Make {outer}.__getitem__ async, too, and await the inner sample in it"
        )
    if isinstance(error, (TypeError, AttributeError)) and "AsyncSample" in text:
        return UsageError(
            f"{outer} got a sample of {kind}, a dpex.AsyncDataset, before it was decoded ({text}). Make {outer} a "
            f"dpex.AsyncDataset, too: its fetch awaits {kind}.fetch, and its decode calls {kind}.decode"
        )
    return None


_DRAWS = (
    "random numbers were drawn (by the generator of {generators}) while samples were fetched by {places}. The samples "
    "of a batch are fetched at the same time, so these numbers depend on the order of answers. Make a "
    "dpex.AsyncDataset, which has two methods: `async def fetch(self, index)` waits, and `def decode(self, index, "
    "raw)` computes and draws"
)


def drawn(dataset: Any, generators: list[str]) -> UsageError:
    """Return the error for samples that drew from ``generators`` while they were fetched.

    The message names each method that may have drawn.
    """
    places = " or ".join(dict.fromkeys(map(_place, async_datasets(dataset) or [dataset])))
    return UsageError(_DRAWS.format(generators=", ".join(generators), places=places))


def _place(dataset: Any) -> str:
    """Return the method that fetches samples of a dataset, with its file and line if they are known."""
    methods = [getattr(type(dataset), name, None) for name in (*READING, "fetch")]
    if isinstance(dataset, Decoding):
        methods = [dataset.dataset.fn]
    method = next(filter(inspect.iscoroutinefunction, methods), type(dataset).__getitem__)
    code = getattr(method, "__code__", None)
    where = "" if code is None else f" ({code.co_filename}, line {code.co_firstlineno})"
    return f"{method.__qualname__}{where}"

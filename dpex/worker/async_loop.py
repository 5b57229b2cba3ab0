"""The event loop of a process, which loads the samples of asynchronous datasets.

Each process makes its own loop when it first needs one (`loop_of_process`), also after a fork. Clients that a dataset
opens in ``__getitem__`` belong to this loop, and live until the process ends or closes the loop.

If the calling thread runs another event loop (Jupyter, asyncio programs), it waits while a helper thread runs this one.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import inspect
import os
import threading
import weakref
from collections.abc import Coroutine, Generator
from dataclasses import dataclass
from typing import Any

import torch

from dpex.errors import UsageError
from dpex.schedule.names import with_inner_datasets
from dpex.system.user_warnings import warn
from dpex.worker import sample_guard
from dpex.worker.setup import modes_here

_CLOSE_S = 2.0
"""Maximum seconds for each ``aclose()`` of a dataset, and for the remaining tasks, when the loop closes."""


@dataclass(slots=True, eq=False)
class Step:
    """A sample, or a batch of an ``async def __getitems__``, while it is loaded."""

    place: int
    index: Any
    """The index of the sample; ``place`` is its position in the batch."""
    number: int
    """The number of its ticket."""
    samples: int = 1
    """The number of samples that are loaded at once."""
    given: Any = None
    """The item that ``__getitems__`` returned, such as a coroutine; None if the task calls the dataset itself."""
    seconds: float = 0.0
    """Seconds of fetching and decoding, without the waits for a slot and for other samples."""
    is_late: bool = False
    """True if the sample was cancelled because it took too long."""
    is_dropped: bool = False
    """True if the sample was cancelled because its batch failed or was cancelled."""


of_task: contextvars.ContextVar[Step | None] = contextvars.ContextVar("dpex-sample", default=None)
"""The sample to which a task belongs. Tasks that a sample starts inherit it."""


class _Stepping:
    """Awaits a coroutine of a sample, and reports the beginning and end of each step (the code between two awaits)."""

    __slots__ = ("_coroutine", "_loop", "_sample")

    def __init__(self, coroutine: Any, sample: Step, loop: SampleLoop) -> None:
        self._coroutine, self._sample, self._loop = coroutine, sample, loop

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine, loop = self._coroutine, self._loop
        step, value = coroutine.send, None
        while True:
            loop.begin_step(self._sample)
            try:
                waits_for = step(value)
            except StopIteration as end:
                return end.value
            finally:
                loop.end_step()
            try:
                value = yield waits_for
                step = coroutine.send
            except BaseException as error:
                step, value = coroutine.throw, error


async def _awaited(steps: Any) -> Any:
    return await steps


class SampleLoop:
    """The event loop of a process.

    Attributes:
        is_ending: True while unfinished tasks are being cancelled.
        is_computing: True while a batch is decoded or collated. Samples of other batches wait.
        is_watched: True if `begin_step` and `end_step` report steps.
    """

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        self.loop.set_task_factory(self._new_task)
        self.is_ending: bool = False
        self.is_computing: bool = False
        self.is_watched: bool = sample_guard.watch_of_process is not None
        self._shows_ticket: Any = None
        self._closers: dict[int, weakref.ref[Any]] = {}
        self._turn = threading.Lock()

    def _new_task(self, loop: Any, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        sample = of_task.get()
        if sample is not None and self.is_watched:
            coroutine = _awaited(self.in_steps(coroutine, sample))
        return asyncio.Task(coroutine, loop=loop, **options)

    @property
    def hands_out(self) -> bool:
        """True if an `AsyncDataset` is to return an `AsyncSample`, which this running loop fetches and decodes."""
        return not self.is_computing and asyncio._get_running_loop() is self.loop

    # -- steps ---------------------------------------------------------------------------------------------------------

    def show_tickets(self, show: Any) -> None:
        """Call ``show`` with the number of the ticket before each step, and with None after each step."""
        self._shows_ticket, self.is_watched = show, True

    def in_steps(self, coroutine: Any, sample: Step) -> Any:
        """Return an awaitable for a coroutine of a sample. If this loop is watched, the awaitable reports each step."""
        return _Stepping(coroutine, sample, self) if self.is_watched else coroutine

    def begin_step(self, sample: Step) -> None:
        """Note that a step of a sample begins, for the watch that ends a process whose loop is blocked."""
        if self._shows_ticket is not None:
            self._shows_ticket(sample.number)
        if sample_guard.watch_of_process is not None:
            sample_guard.watch_of_process.begin(sample.place, sample.index, sample.samples)

    def end_step(self) -> None:
        if sample_guard.watch_of_process is not None:
            sample_guard.watch_of_process.end()
        if self._shows_ticket is not None:
            self._shows_ticket(None)

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine and return its result. An exception in this thread, such as Ctrl-C, cancels the coroutine.

        Raises UsageError if a sample that this loop is loading calls this method: the loop would wait for itself.
        """
        running = asyncio._get_running_loop()
        if running is self.loop:
            coroutine.close()
            raise UsageError(
                "an asynchronous dataset was read synchronously inside a sample that the event loop is loading, so the "
                "loop would wait for itself: await the inner sample (of a dpex.AsyncDataset, await its fetch in the "
                "outer fetch), or give the inner loader workers of its own"
            )
        if running is not None:
            return self._in_thread(coroutine)
        with self._turn:
            return self._run(coroutine)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        task = self.loop.create_task(coroutine)
        try:
            return self.loop.run_until_complete(task)
        except BaseException:
            if not task.done():
                self.is_ending = True
                task.cancel()
                with contextlib.suppress(BaseException):
                    self.loop.run_until_complete(task)
                self.is_ending = False
            raise

    def _in_thread(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run the coroutine in a helper thread, with torch's modes and the context of this thread."""
        modes, threads, context = modes_here(), torch.get_num_threads(), contextvars.copy_context()
        results: list[Any] = []
        errors: list[BaseException] = []

        def body() -> None:
            torch.set_num_threads(threads)
            try:
                with modes.enter(), self._turn:
                    results.append(self._run(coroutine))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=context.run, args=(body,), name="dpex-samples", daemon=True)
        thread.start()
        try:
            thread.join()
        except BaseException:
            self.is_ending = True
            self.loop.call_soon_threadsafe(self._cancel_all)
            thread.join(_CLOSE_S)
            self.is_ending = False
            raise
        if errors:
            raise errors.pop()
        return results[0]

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()

    # -- its end -------------------------------------------------------------------------------------------------------

    def closes(self, dataset: Any) -> None:
        """Register the dataset and its inner datasets, whose ``aclose()`` the loop awaits before it ends. Only weak
        references are kept."""
        for each, _ in with_inner_datasets(dataset):
            if inspect.iscoroutinefunction(getattr(type(each), "aclose", None)):
                with contextlib.suppress(TypeError):  # a class with __slots__ may allow no weak reference
                    self._closers[id(each)] = weakref.ref(each)

    def close(self) -> None:
        """End the clients of datasets, the tasks that are left, and the loop."""
        if not self.loop.is_closed():
            self.run(self._end())
            self.loop.close()

    async def _end(self) -> None:
        closers, self._closers = list(self._closers.values()), {}
        for dataset in filter(None, (find() for find in closers)):
            try:
                await asyncio.wait_for(dataset.aclose(), _CLOSE_S)
            except Exception as error:
                warn(f"aclose() of {type(dataset).__name__} failed, so its clients may not be closed: {error!r}")
        self.is_ending = True
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_CLOSE_S)
        await self.loop.shutdown_asyncgens()


_here: tuple[int, SampleLoop] | None = None
_inherited: list[SampleLoop] = []
"""Loops of a parent process. They are never closed, because closing would remove the parent's descriptors from the
epoll that both processes share."""


def loop_of_process() -> SampleLoop:
    global _here
    pid = os.getpid()
    if _here is None or _here[0] != pid:
        if _here is None:
            atexit.register(close_loop_of_process)
        else:
            _inherited.append(_here[1])
        _here = pid, SampleLoop()
    return _here[1]


def close_loop_of_process() -> None:
    global _here
    if _here is not None and _here[0] == os.getpid():
        (_, one), _here = _here, None
        one.close()

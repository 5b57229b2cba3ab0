"""Loads the samples of asynchronous datasets: those of a batch, and of several batches, at the same time.

**Random numbers.** Each sample has random states of its own (`async_states`), and the collate function those of the
batch. Nothing is exchanged until a draw was seen: the generators are compared after each batch. Once a sample has
drawn, batches that were under way are loaded again, with exchanged states from then on.

**Order.** Results are awaited in the order of the samples. So the error of a batch is that of the first sample, in
order, that fails. Those before it are awaited; those behind it are cancelled and awaited.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dpex.errors import AsyncError, SampleTimeoutError
from dpex.measure.batch_times import BatchTimes, StepRow
from dpex.measure.sampling import as_text
from dpex.schedule.names import is_asynchronous, with_inner_datasets
from dpex.schedule.seeding import ticket_seed
from dpex.system.clock import monotonic
from dpex.worker.async_loop import Step, Stepping, loop_of_process, of_task
from dpex.worker.async_states import SampleStates, turns
from dpex.worker.batch_seeding import current, seed_of_sample, seed_ticket
from dpex.worker.own_generators import OwnGenerators
from dpex.worker.sample_guard import HangsError, SampleGuard, apart
from dpex.worker.states import KeptStates

_CANCELLED = (
    "loading sample {} was cancelled by the dataset itself, so its batch fails: have the dataset catch the "
    "CancelledError of the task or client that it awaits"
)


class Slots:
    """Bounds the samples that a process loads at the same time, to ``most``. The first to ask is the first to load.

    Attributes:
        open: Samples that are not loaded yet, those that wait included.
        on_room: Called when samples end and fewer than ``most`` are open.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.open: int = 0
        self._used = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self.on_room: Callable[[], object] = bool

    async def take(self, count: int) -> None:
        if not self._waiting and self._fits(count):
            self._used += count
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, count))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(count)
            raise

    def _fits(self, count: int) -> bool:
        return not self._used or self._used + count <= self.most

    def give(self, count: int) -> None:
        self._used -= count
        while self._waiting:
            turn, wanted = self._waiting[0]
            if not turn.done():
                if not self._fits(wanted):
                    return
                self._used += wanted
                turn.set_result(None)
            self._waiting.popleft()

    def loaded(self, count: int) -> None:
        self.open -= count
        if self.open < self.most:
            self.on_room()


class BatchLoad:
    """A batch that is being loaded. ``failed``: index and error of samples that were replaced.

    ``seconds``: of its samples, each from its slot to its end, summed. ``slowest``: of the slowest, and its place.
    """

    def __init__(self, seed: int, number: int) -> None:
        self.seed = seed
        self.number = number
        self.begin()

    def begin(self) -> None:
        self.seconds: float = 0.0
        self.slowest: tuple[float, int] = (0.0, -1)
        self.failed: list[tuple[str, str]] = []

    def took(self, sample: Step, seconds: float) -> None:
        self.seconds += seconds * sample.samples
        if seconds > self.slowest[0]:
            self.slowest = seconds, sample.place


class AsyncSamples:
    """Loads the batches of one map-style dataset, at most ``concurrency`` samples at the same time.

    Without a ``guard``, the error of a sample is that of its batch.

    Attributes:
        is_exact: Samples draw, so each has states of its own.
        cpu_since: CPU seconds of the process when it ended the batch before.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        auto_collation: bool,
        concurrency: int,
        own: OwnGenerators | None,
        guard: SampleGuard | None,
    ) -> None:
        self._dataset = dataset
        self._auto_collation = auto_collation
        self._bulk: Callable[[Any], Any] | None = getattr(dataset, "__getitems__", None)
        self.own = own
        self._guard = guard
        self._loop = loop_of_process()
        self._loop.closes(dataset)
        self._under_way = 0
        self._noticed = 0
        """Times that draws were noticed while states were not exchanged."""
        self.is_exact: bool = bool(own)
        self.slots: Slots = Slots(concurrency)
        self.cpu_since: float = 0.0

    def load_drawn(self, index: Any) -> tuple[Any, BatchLoad]:
        """Load a batch alone; return its samples and what they took.

        Its seed is that of the batch that the process makes. Under ``seeding="worker"`` batches have none: it is drawn
        from torch's generator, and the generators are otherwise as before.
        """
        seed = current.seed
        if seed is not None:
            batch = BatchLoad(seed, 0)
            data = self._loop.run(self.awaited(index, batch))
            self.collating(seed)
            return data, batch
        batch = BatchLoad(int(torch.empty((), dtype=torch.int64).random_().item()), 0)
        kept = KeptStates(self.own)
        try:
            return self._loop.run(self.awaited(index, batch)), batch
        finally:
            turns.leave()
            kept.put_back()

    async def awaited(self, index: Any, batch: BatchLoad) -> Any:
        """Return the samples of a batch. It is loaded again if it turns out that samples draw."""
        if not self._under_way:
            self.cpu_since = time.process_time()
            await asyncio.sleep(0)  # connections that were closed while no batch was loaded are noticed
            if not self.is_exact:
                turns.mark(batch.seed)
        self._under_way += 1
        try:
            while True:
                noticed = self._noticed
                batch.begin()
                try:
                    data = await self._samples(index, batch)
                except Exception:
                    if self._has_stayed(noticed):
                        raise
                else:
                    if self._has_stayed(noticed):
                        return data
        finally:
            self._under_way -= 1

    def _has_stayed(self, noticed: int) -> bool:
        """Return True unless samples have drawn from generators that all share since ``noticed``."""
        if not self.is_exact and turns.drew():
            self.is_exact = True
            self._noticed += 1
        return noticed == self._noticed

    def collating(self, seed: int) -> None:
        """Seed the generators for the collate function of a batch."""
        turns.leave()
        seed_ticket(seed)
        if self.own:
            self.own.seed(seed)

    def steps(self, times: BatchTimes) -> tuple[StepRow, ...]:
        """Return the steps of samples that blocked the loop, if any does, for a batch that ends with these times."""
        blocking = self._loop.blocking
        return () if blocking is None else blocking.rows(self._dataset, times, draws=self.is_exact)

    def collated(self, seed: int) -> None:
        """Note that the collate function has returned, which may have drawn."""
        if not self.is_exact:
            turns.mark(seed)

    # -- the samples of a batch ----------------------------------------------------------------------------------------

    async def _samples(self, index: Any, batch: BatchLoad) -> Any:
        left_out, wanted = apart(index)
        if self._guard is not None and self._guard.policy.tolerates:
            return await self._tolerant(left_out, wanted, batch)
        if not self._auto_collation:
            return (await self._together([self._one(wanted)], [wanted], batch))[0]
        if self._bulk is None:
            return await self._together([self._one(each) for each in wanted], wanted, batch)
        return await self._in_bulk(wanted, batch)

    def _one(self, index: Any) -> Callable[[], Any]:
        return lambda: self._dataset[index]

    async def _in_bulk(self, wanted: Any, batch: BatchLoad) -> Any:
        """Return what ``__getitems__`` gives. If that is to be awaited, all have the random states of the batch."""
        assert self._bulk is not None
        data = self._bulk(wanted)
        if inspect.isawaitable(data):
            states = self._states(batch.seed)
            count = max(1, len(wanted)) if hasattr(wanted, "__len__") else 1
            sample = Step(states, place=0, index=wanted, number=batch.number, samples=count, given=data)
            return await self._begun(lambda: data, sample, batch)
        if type(data) is list and any(map(_awaits, data)):
            named = wanted if isinstance(wanted, (list, tuple)) else range(len(data))
            return await self._together([partial(_same, each) for each in data], named, batch, given=data)
        return data

    def _states(self, seed: int) -> SampleStates | None:
        return SampleStates(seed, self.own) if self.is_exact else None

    def _begun(self, get: Callable[[], Any], sample: Step, batch: BatchLoad) -> asyncio.Task[Any]:
        self.slots.open += sample.samples
        task = self._loop.loop.create_task(self._load(get, sample, batch))
        task.add_done_callback(partial(self._ended, sample))
        return task

    def _ended(self, sample: Step, _: Any) -> None:
        """Note the end of a task, which may have been cancelled before it began."""
        if inspect.iscoroutine(sample.given):
            sample.given.close()
        self.slots.loaded(sample.samples)

    async def _together(
        self,
        gets: Sequence[Callable[[], Any]],
        wanted: Any,
        batch: BatchLoad,
        errors: dict[int, Exception] | None = None,
        given: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Return the samples of the indices ``wanted``, loaded at the same time by ``gets``, which begin to read each.

        ``errors`` receives the error of each sample that fails, by place; None: the first one is raised. ``given`` is
        what the dataset has returned for them already.
        """
        samples = [
            Step(
                self._states(ticket_seed(batch.seed, at)),
                place=at,
                index=wanted[at],
                number=batch.number,
                given=None if given is None else given[at],
            )
            for at in range(len(gets))
        ]
        tasks = [self._begun(get, sample, batch) for get, sample in zip(gets, samples, strict=True)]
        loaded: list[Any] = []
        try:
            for at, task in enumerate(tasks):
                try:
                    loaded.append(await task)
                except Exception as error:
                    if errors is None:
                        raise
                    errors[at] = error
                    loaded.append(None)
        except BaseException:
            for sample, task in zip(samples, tasks, strict=True):
                sample.is_dropped = True
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return loaded

    async def _load(self, get: Callable[[], Any], sample: Step, batch: BatchLoad) -> Any:
        count, limit = min(sample.samples, self.slots.most), None
        await self.slots.take(count)
        began = monotonic()
        try:
            of_task.set(sample)
            seed_of_sample.set(batch.seed)
            limit = self._limit(sample)
            return await Stepping(_read(get), sample, self._loop)
        except asyncio.CancelledError as error:
            if sample.is_late:
                raise self._too_late(sample) from error
            if sample.is_dropped or self._loop.is_ending:
                raise
            raise AsyncError(_CANCELLED.format(as_text(sample.index))) from error
        except Exception as error:
            told = explained(error, self._dataset, sample.index, self.slots.most)
            if told is None:
                raise
            raise told from error
        finally:
            if limit is not None:
                limit.cancel()
            batch.took(sample, monotonic() - began)
            self.slots.give(count)
            if sample.states is not None:
                turns.over(sample.states)

    # -- samples that fail or take too long ----------------------------------------------------------------------------

    def _limit(self, sample: Step) -> asyncio.TimerHandle | None:
        timeout_s = None if self._guard is None else self._guard.policy.timeout_s
        if timeout_s is None:
            return None
        task = asyncio.current_task()

        def cancel() -> None:
            sample.is_late = True
            task.cancel()  # type: ignore[union-attr]

        return self._loop.loop.call_later(timeout_s * sample.samples, cancel)

    def _too_late(self, sample: Step) -> SampleTimeoutError:
        assert self._guard is not None
        return SampleTimeoutError(
            f"loading sample {as_text(sample.index)} took longer than timeout_s={self._guard.policy.timeout_s:g} of "
            "the SamplePolicy, so it was cancelled: have the dataset give up earlier, or allow more"
        )

    async def _tolerant(self, left_out: Any, wanted: Any, batch: BatchLoad) -> Any:
        """Return the samples of a batch. Others take the place of those that fail, as without an event loop."""
        if self._auto_collation and self._bulk is not None and not left_out:
            try:
                return await self._in_bulk(wanted, batch)
            except Exception:  # then each is loaded alone, to find those that fail
                batch.begin()
        each = list(wanted) if self._auto_collation else [wanted]
        errors: dict[int, Exception] = {}
        gets = [partial(_hangs, left_out[at]) if at in left_out else self._alone(each[at]) for at in range(len(each))]
        data = await self._together(gets, each, batch, errors)
        guard = self._guard
        assert guard is not None
        batch.failed += [guard.described(each[at], error) for at, error in errors.items()]
        others = guard.filling(data, each, errors)
        for at, candidates in others.items():
            data[at] = await self._another(at, candidates, errors[at], batch)
        return data if self._auto_collation else data[0]

    async def _another(self, place: int, candidates: Any, error: Exception, batch: BatchLoad) -> Any:
        for drawn in candidates:
            failed: dict[int, Exception] = {}
            instead = BatchLoad(ticket_seed(batch.seed, place), batch.number)
            found = await self._together([self._alone(drawn)], [drawn], instead, failed)
            if not failed:
                return found[0]
            assert self._guard is not None
            batch.failed.append(self._guard.described(drawn, failed[0]))
        raise error

    def _alone(self, index: Any) -> Callable[[], Any]:
        """Return a function that begins to read one sample, of a dataset that may read only several."""
        bulk = self._bulk
        return self._one(index) if bulk is None else lambda: _first_of(bulk([index]))


def _hangs(why: str) -> Any:
    raise HangsError(why)


def _same(given: Any) -> Any:
    return given


async def _first_of(several: Any) -> Any:
    found = await several if inspect.isawaitable(several) else several
    return await _read(lambda: found[0])


def _awaits(sample: Any) -> bool:
    """Return True if a sample is to be awaited, or has parts that are (`StackDataset`)."""
    if type(sample) in (tuple, list):
        return any(map(inspect.isawaitable, sample))
    if type(sample) is dict:
        return any(map(inspect.isawaitable, sample.values()))
    return inspect.isawaitable(sample)


async def _read(get: Callable[[], Any]) -> Any:
    """Return a sample, with all awaited that is to be. Parts are awaited in order, so that draws are, too."""
    sample = get()
    if inspect.isawaitable(sample):
        return await sample
    kind = type(sample)
    if kind in (tuple, list):
        return (
            kind([await part if inspect.isawaitable(part) else part for part in sample]) if _awaits(sample) else sample
        )
    if kind is dict and _awaits(sample):
        return {name: await part if inspect.isawaitable(part) else part for name, part in sample.items()}
    return sample


# -- errors of samples, in plain words with their remedy --------------------------------------------------------------

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
    """Return an error that says what the dataset does wrong, and what to do; None if ``error`` has no known meaning."""
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

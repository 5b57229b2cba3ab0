"""Load the samples of asynchronous datasets: all samples of one or several batches at the same time.

**Two phases.** First, all samples of a batch are fetched at the same time, in steps of the event loop. Other batches
continue between these steps. Then the samples are decoded and collated in one step (`SampleLoop.is_computing`).

**Random numbers.** Under ``seeding="batch"`` the generators are seeded for each sample that is decoded, from the seed
of the batch and the sample's place. They are seeded again for the collate function. Draws during the fetch would depend
on the order of answers. So the states of the generators are compared after each batch is fetched. A draw fails this
batch and all later batches.

**Order.** Results are awaited in the order of the samples. So a batch raises the error of the first failing sample in
this order. All earlier samples have ended by then; later samples are cancelled and awaited.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dpex.errors import SampleTimeoutError, UsageError
from dpex.measure.sampling import as_text
from dpex.schedule.names import async_datasets, reads_either_way
from dpex.schedule.seeding import ticket_seed
from dpex.system.clock import monotonic
from dpex.worker.async_dataset import awaits, decoded, is_decoded, read
from dpex.worker.async_errors import drawn, explained
from dpex.worker.async_loop import Step, loop_of_process, of_task
from dpex.worker.batch_seeding import current, seed_of_sample, seed_ticket
from dpex.worker.draws import state_mark
from dpex.worker.kept_states import KeptStates
from dpex.worker.own_generators import OwnGenerators
from dpex.worker.sample_guard import HangsError, SampleGuard, apart
from dpex.worker.states import GLOBAL

_CANCELLED = (
    "loading sample {} was cancelled by the dataset itself, so its batch fails: have the dataset catch the "
    "CancelledError of the task or client that it awaits"
)

Errors = dict[int, Exception] | None
"""The errors of samples, by their places; None if the batch raises the first error instead."""


class Slots:
    """Limits the samples that a process loads at the same time to ``most``. Slots are given in the order of requests.

    Attributes:
        open: Samples that are not loaded yet, including samples that wait for a slot.
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

    ``seed``: None if the batch has none. ``seconds``: sum of its samples' fetching times, without waits for slots.
    ``decode_s``: sum of their decoding times. ``slowest``: seconds and position of the slowest sample.
    """

    def __init__(self, seed: int | None, number: int) -> None:
        self.seed = seed
        self.number = number
        self.begin()

    def begin(self) -> None:
        self.seconds: float = 0.0
        self.decode_s: float = 0.0
        self.slowest: tuple[float, int] = (0.0, -1)
        self.failed: list[tuple[str, str]] = []

    def fetched(self, sample: Step, seconds: float) -> None:
        self.seconds += seconds * sample.samples
        self._took(sample, seconds)

    def decoded(self, sample: Step, seconds: float) -> None:
        self.decode_s += seconds
        self._took(sample, seconds)

    def _took(self, sample: Step, seconds: float) -> None:
        sample.seconds += seconds
        if sample.seconds > self.slowest[0]:
            self.slowest = sample.seconds, sample.place


class AsyncSamples:
    """Loads the batches of one map-style dataset, at most ``concurrency`` samples at the same time.

    If there is no ``guard``, a batch raises the first error of its samples.

    Attributes:
        cpu_since: CPU seconds of the process at the end of the previous batch.
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
        self._own = own
        self._guard = guard
        self._loop = loop_of_process()
        self._loop.closes(dataset)
        self._under_way = 0
        split = [reads_either_way(each) for each in async_datasets(dataset)]
        self._generators = _compared(own, of_clients=not split or not all(split))
        self._marks: dict[str, Any] = {}
        self._kept: KeptStates | None = None
        """The states that are restored after the fetch of a batch that has no seed."""
        self._drawn: list[str] = []
        """Generators that were drawn from during a fetch. If there are any, every batch fails."""
        self.slots: Slots = Slots(concurrency)
        self.cpu_since: float = 0.0

    def load_drawn(self, index: Any) -> tuple[Any, BatchLoad]:
        """Load a batch alone, with the seed of the current batch. Return its samples and their times.

        Under ``seeding="worker"`` there is no seed: the samples are decoded in order, with the generators as they are.
        """
        batch = BatchLoad(current.seed, 0)
        try:
            data = self._loop.run(self.awaited(index, batch))
        finally:
            self.end_computing(batch.seed)
        self.seed(batch.seed)
        return data, batch

    async def awaited(self, index: Any, batch: BatchLoad) -> Any:
        """Return the decoded samples of a batch. The caller must then call `end_computing`, also after an error."""
        if not self._under_way:
            self.cpu_since = time.process_time()
            await asyncio.sleep(0)  # lets clients notice connections that were closed while no batch was loaded
            self._mark(batch.seed)
        self._under_way += 1
        try:
            return await self._samples(index, batch)
        finally:
            self._under_way -= 1

    # -- random numbers ------------------------------------------------------------------------------------------------

    def seed(self, seed: int | None) -> None:
        """Seed the generators: with a sample's seed before it is decoded, and with the batch's seed before it is
        collated. None changes nothing."""
        if seed is not None:
            seed_ticket(seed)
            if self._own:
                self._own.seed(seed)

    def _begin_computing(self, seed: int | None) -> None:
        """Begin to decode and to collate a batch.

        Raises UsageError if a sample of this or another unfinished batch drew random numbers while it was fetched.
        """
        now = self._now()
        self._drawn = self._drawn or [name for name, mark in self._marks.items() if mark != now[name]]
        if self._drawn:
            raise drawn(self._dataset, self._drawn)
        if self._kept is not None:
            self._kept.put_back()
        self._loop.is_computing = True
        current.seed = seed

    def end_computing(self, seed: int | None) -> None:
        """Let samples of other batches be fetched again if `_begin_computing` stopped them."""
        if self._loop.is_computing:
            self._loop.is_computing = False
            if self._under_way:
                self._mark(seed)

    def _mark(self, seed: int | None) -> None:
        """Note the states of the generators, before samples are fetched."""
        self._kept = KeptStates(self._own) if seed is None else None
        if seed is not None:
            seed_ticket(seed)  # also clears NumPy's cached second normal number, which the marks do not contain
        self._marks = self._now()

    def _now(self) -> dict[str, Any]:
        return {name: state_mark(one) for name, one in self._generators.items()}

    # -- the samples of a batch ----------------------------------------------------------------------------------------

    async def _samples(self, index: Any, batch: BatchLoad) -> Any:
        left_out, wanted = apart(index)
        errors: Errors = {} if self._guard is not None and self._guard.policy.tolerates else None
        found = None
        if self._auto_collation and self._bulk is not None and not left_out:
            found = await self._in_bulk(wanted, batch, errors)
        if found is None:
            each = list(wanted) if self._auto_collation else [wanted]
            found = await self._one_by_one(each, left_out, batch, errors)
        data, samples = found
        self._begin_computing(batch.seed)
        self._decode(data, samples, batch, errors)
        if errors:
            await self._fill(data, samples, batch, errors)
        return data if self._auto_collation else data[0]

    async def _in_bulk(self, wanted: Any, batch: BatchLoad, errors: Errors) -> tuple[Any, list[Step]] | None:
        """Return the awaited result of ``__getitems__``, and the samples that may have to be decoded.

        Return None if the call failed as a whole. Each sample is then loaded alone.
        """
        assert self._bulk is not None
        try:
            data = self._bulk(wanted)
            if inspect.isawaitable(data):
                count = max(1, len(wanted)) if hasattr(wanted, "__len__") else 1
                sample = Step(0, wanted, batch.number, samples=count, given=data)
                return await self._begun(lambda: data, sample, batch), []
            if type(data) is not list or not any(map(awaits, data)):
                return data, []
            named = wanted if isinstance(wanted, (list, tuple)) else range(len(data))
            samples = [Step(at, named[at], batch.number, given=each) for at, each in enumerate(data)]
            return await self._together([partial(_same, each) for each in data], samples, batch, errors), samples
        except Exception:
            if errors is None:
                raise
            batch.begin()
            return None

    async def _one_by_one(
        self, each: list[Any], left_out: Any, batch: BatchLoad, errors: Errors
    ) -> tuple[list[Any], list[Step]]:
        get = self._one if errors is None else self._alone
        gets = [partial(_hangs, left_out[at]) if at in left_out else get(index) for at, index in enumerate(each)]
        samples = [Step(at, index, batch.number) for at, index in enumerate(each)]
        return await self._together(gets, samples, batch, errors), samples

    def _one(self, index: Any) -> Callable[[], Any]:
        return lambda: self._dataset[index]

    def _alone(self, index: Any) -> Callable[[], Any]:
        """Return a function that begins to read one sample, by ``__getitems__`` if the dataset has it."""
        bulk = self._bulk
        return self._one(index) if bulk is None else lambda: _first_of(bulk([index]))

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
        self, gets: Sequence[Callable[[], Any]], samples: list[Step], batch: BatchLoad, errors: Errors
    ) -> list[Any]:
        """Fetch these samples at the same time, and return the results. Each of ``gets`` begins to read a sample."""
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
            return await self._loop.in_steps(read(get), sample)
        except asyncio.CancelledError as error:
            if sample.is_late:
                raise self._too_late(sample) from error
            if sample.is_dropped or self._loop.is_ending:
                raise
            raise UsageError(_CANCELLED.format(as_text(sample.index))) from error
        except Exception as error:
            self._explain(error, sample)
            raise
        finally:
            if limit is not None:
                limit.cancel()
            batch.fetched(sample, monotonic() - began)
            self.slots.give(count)

    def _explain(self, error: Exception, sample: Step) -> None:
        told = explained(error, self._dataset, sample.index, self.slots.most)
        if told is not None:
            raise told from error

    def _decode(self, data: list[Any], samples: list[Step], batch: BatchLoad, errors: Errors) -> None:
        """Decode the samples of ``data`` in place."""
        for at, sample in enumerate(samples):
            try:
                if not is_decoded(data[at]):
                    data[at] = self._decoded(data[at], sample, batch)
            except Exception as error:
                if errors is None:
                    raise
                errors[at] = error

    def _decoded(self, fetched: Any, sample: Step, batch: BatchLoad) -> Any:
        began = monotonic()
        if batch.seed is not None:
            self.seed(ticket_seed(batch.seed, sample.place))
        self._loop.begin_step(sample)
        try:
            return decoded(fetched)
        except Exception as error:
            self._explain(error, sample)
            raise
        finally:
            self._loop.end_step()
            batch.decoded(sample, monotonic() - began)

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

    async def _fill(self, data: list[Any], samples: list[Step], batch: BatchLoad, errors: dict[int, Exception]) -> None:
        """Put other samples in the places of failed samples, by the rules of `SampleGuard.filling`."""
        guard = self._guard
        assert guard is not None
        wanted = [sample.index for sample in samples]
        errors = dict(sorted(errors.items()))
        batch.failed += [guard.described(wanted[at], error) for at, error in errors.items()]
        for at, candidates in guard.filling(data, wanted, errors).items():
            data[at] = await self._another(at, candidates, errors[at], batch)

    async def _another(self, place: int, candidates: Any, error: Exception, batch: BatchLoad) -> Any:
        for index in candidates:
            self.end_computing(batch.seed)
            failed: dict[int, Exception] = {}
            samples = [Step(place, index, batch.number)]
            found = await self._together([self._alone(index)], samples, batch, failed)
            self._begin_computing(batch.seed)
            self._decode(found, samples, batch, failed)
            if not failed:
                return found[0]
            assert self._guard is not None
            batch.failed.append(self._guard.described(index, failed[0]))
        raise error


def _hangs(why: str) -> Any:
    raise HangsError(why)


def _same(given: Any) -> Any:
    return given


async def _first_of(several: Any) -> Any:
    found = await several if inspect.isawaitable(several) else several
    return await read(lambda: found[0])


def _compared(own: OwnGenerators | None, *, of_clients: bool) -> dict[str, Any]:
    """Return the generators from which no sample may draw while it is fetched.

    Without ``of_clients``, generators of Python's `random` are left out, because storage clients draw the delays of
    their retries from them.
    """
    found = GLOBAL if own is None else {**GLOBAL, **own.found}
    return {name: one for name, one in found.items() if of_clients or not isinstance(one, random.Random)}

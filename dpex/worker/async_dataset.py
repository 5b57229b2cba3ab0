"""`AsyncDataset`: samples are fetched at the same time by one method, and decoded one after another by a second one.

In dpex's event loop, ``dataset[index]`` returns an `AsyncSample`, by which dpex calls these two methods later. torch's
wrappers of datasets pass the object on, alone or as a part of a sample.
"""

from __future__ import annotations

import asyncio
import inspect
import operator
from collections.abc import Callable
from functools import partial
from types import CoroutineType
from typing import Any

from torch.utils.data import Dataset

from dpex.errors import UsageError

_TWO_METHODS = "`async def fetch(self, index)`, which waits, and `def decode(self, index, raw)`, which computes"


class AsyncDataset(Dataset[Any]):
    """A base class of datasets whose samples wait for a network or a disk.

    A worker fetches many samples at the same time: up to ``WorkerConfig.concurrency``, of several batches. Once all
    samples of a batch have been fetched, it decodes them in their order. So random numbers that `decode` draws depend
    neither on the worker nor on the order of answers.

    Outside of dpex's event loop ``dataset[0]`` gives the decoded sample. So PyTorch's DataLoader, `dpex.cached` and
    wrappers of your own read the dataset, too. PyTorch's DataLoader fetches the samples of a batch at the same time.

    Examples:
        >>> import asyncio
        >>> import torch
        >>> from dpex import AsyncDataset, DpexDataLoader
        >>> class Waiting(AsyncDataset):
        ...     def __len__(self):
        ...         return 4
        ...     async def fetch(self, index):
        ...         await asyncio.sleep(0.001)
        ...         return str(index)
        ...     def decode(self, index, raw):
        ...         return 10 * int(raw)
        >>> Waiting()[2]
        20
        >>> [batch.tolist() for batch in DpexDataLoader(Waiting(), batch_size=2)]
        [[0, 10], [20, 30]]
        >>> [batch.tolist() for batch in torch.utils.data.DataLoader(Waiting(), batch_size=2)]
        [[0, 10], [20, 30]]
    """

    reads_either_way = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("__getitem__", "__getitems__", "decode"):
            if inspect.iscoroutinefunction(vars(cls).get(name)):
                raise UsageError(f"{cls.__qualname__}.{name} is async: a dpex.AsyncDataset has {_TWO_METHODS}")

    async def fetch(self, index: Any) -> Any:
        """Return what `decode` needs to make a sample, such as the bytes of a file. Await in this method alone.

        It may be called for many samples at the same time, in any order. Draw no random numbers here: a draw from a
        generator of NumPy or torch fails this batch and all later ones of the worker with a `UsageError`. Python's
        `random` is allowed, because clients draw the pauses between retries from it, but the result must not depend on
        it.

        Args:
            index: The index of the sample, from the sampler.
        """
        raise NotImplementedError(f"{type(self).__name__}.fetch is missing: a dpex.AsyncDataset has {_TWO_METHODS}")

    def decode(self, index: Any, raw: Any) -> Any:
        """Return the sample: by default, ``raw`` as it is. This method may draw random numbers from any generator.

        The event loop stands still meanwhile, so read nothing here that could be awaited in `fetch`. Under
        ``seeding="batch"`` the generators are seeded for each sample, from the seed of the batch and the position of
        the sample in it.

        Args:
            index: The index of the sample, from the sampler.
            raw: The result of `fetch` for this index.
        """
        return raw

    def __getitem__(self, index: Any) -> Any:
        """Return the decoded sample or, in dpex's event loop, an `AsyncSample`."""
        loop = _loop()
        sample = AsyncSample(self, index)
        return sample if loop.hands_out else decoded(loop.run(read(lambda: sample)))

    def __getitems__(self, indices: Any) -> list[Any]:
        """Return the decoded samples of a batch or, in dpex's event loop, a list of `AsyncSample`."""
        loop = _loop()
        if loop.hands_out:
            return [self[index] for index in indices]
        return [decoded(sample) for sample in loop.run(_gathered(self, indices))]


class AsyncSample:
    """A sample of an `AsyncDataset` that is not decoded yet."""

    __slots__ = ("_dataset", "_index", "_raw")

    def __init__(self, dataset: AsyncDataset, index: Any) -> None:
        self._dataset = dataset
        self._index = index

    async def fetched(self) -> Any:
        """Fetch the sample. Return this object, or the fetched value if the dataset does not override `decode`."""
        self._raw = await self._dataset.fetch(self._index)
        return self._raw if type(self._dataset).decode is AsyncDataset.decode else self

    def decode(self) -> Any:
        return self._dataset.decode(self._index, self._raw)


# -- samples that have parts, as with torch's StackDataset -------------------------------------------------------------


def awaits(sample: Any) -> bool:
    """Return True if a sample is to be awaited, or has parts that are."""
    return any(map(_is_awaited, _parts(sample)))


def _is_awaited(part: Any) -> bool:
    return type(part) is AsyncSample or inspect.isawaitable(part)


def _parts(sample: Any) -> Any:
    """Return the parts of a sample, or the sample itself if it has none."""
    if type(sample) in (tuple, list):
        return sample
    return sample.values() if type(sample) is dict else (sample,)


async def read(get: Callable[[], Any]) -> Any:
    """Call ``get`` and await the sample that it returns, or its parts. `decoded` decodes the result."""
    sample = get()
    if type(sample) is CoroutineType:  # tested first: a search for parts takes as long as a tiny sample
        return await sample
    return _rebuilt(sample, [await _part(part) for part in _parts(sample)]) if awaits(sample) else sample


async def _part(part: Any) -> Any:
    if type(part) is AsyncSample:
        return await part.fetched()
    return await part if inspect.isawaitable(part) else part


def is_decoded(sample: Any) -> bool:
    """Return True if neither a sample nor a part of it is to be decoded."""
    return AsyncSample not in map(type, _parts(sample))


def decoded(sample: Any) -> Any:
    """Decode a sample that `read` has returned. Its parts are decoded in order."""
    if is_decoded(sample):
        return sample
    return _rebuilt(sample, [part.decode() if type(part) is AsyncSample else part for part in _parts(sample)])


def _rebuilt(sample: Any, parts: list[Any]) -> Any:
    """Return a tuple, list or dict like ``sample`` with ``parts``; the only part if ``sample`` is none of these."""
    if type(sample) in (tuple, list):
        return type(sample)(parts)
    return dict(zip(sample, parts, strict=True)) if type(sample) is dict else parts[0]


async def _gathered(dataset: Any, indices: Any) -> list[Any]:
    return list(await asyncio.gather(*[read(partial(operator.getitem, dataset, index)) for index in indices]))


def _loop() -> Any:
    from dpex.worker.async_loop import loop_of_process

    return loop_of_process()

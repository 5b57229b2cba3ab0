"""`AsyncDataset`: a mixin with which a class whose samples are read asynchronously can be read synchronously, too."""

from __future__ import annotations

import asyncio
import functools
import inspect
from typing import Any


class AsyncDataset:
    """A mixin for datasets with an ``async def __getitem__``, so that they also work where none is expected.

    dpex does not need it. With it, ``dataset[0]`` outside of an event loop of dpex gives the sample, and torch's
    DataLoader loads the samples of a batch at the same time. Inside, ``await super().__getitem__(index)`` works as in
    any class.

    Examples:
        >>> import asyncio
        >>> import torch
        >>> from dpex import AsyncDataset, DpexDataLoader
        >>> class Waiting(AsyncDataset):
        ...     def __len__(self):
        ...         return 4
        ...     async def __getitem__(self, index):
        ...         await asyncio.sleep(0.001)
        ...         return 10 * index
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
        for name in ("__getitem__", "__getitems__"):
            method = vars(cls).get(name)
            if inspect.iscoroutinefunction(method):
                setattr(cls, name, _for_both(method))

    def __getitems__(self, indices: Any) -> Any:
        """Return the samples of a batch, or in dpex's event loop what is to be awaited for each."""
        items: Any = self
        if _is_in_loop():
            return [items[index] for index in indices]
        return _loop().run(_gathered(items, indices))


def _for_both(method: Any) -> Any:
    @functools.wraps(method)
    def read(self: Any, index: Any) -> Any:
        coroutine = method(self, index)
        return coroutine if _is_in_loop() else _loop().run(coroutine)

    read.is_asynchronous = True  # type: ignore[attr-defined]
    return read


async def _gathered(dataset: Any, indices: Any) -> list[Any]:
    return list(await asyncio.gather(*[dataset[index] for index in indices]))


def _loop() -> Any:
    from dpex.worker.async_loop import loop_of_process

    return loop_of_process()


def _is_in_loop() -> bool:
    return asyncio._get_running_loop() is _loop().loop

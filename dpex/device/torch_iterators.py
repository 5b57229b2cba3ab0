"""Has torch's own iterators bring their batches to a device, each batch when it is asked for."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import cache
from itertools import count
from typing import Any

from dpex._torch import BaseDataLoaderIter, SingleProcessDataLoaderIter
from dpex.device.arguments import Transform
from dpex.device.feed import Feed


class _FedFetcher:
    """Fetches batches from the dataset of an in-process iterator, and copies them to the device."""

    def __init__(self, fetcher: Any, feed: Feed, first: int) -> None:
        self._fetcher = fetcher
        self._feed = feed
        self._numbers = count(first)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)  # the dataset, and the iterator of a stream

    def fetch(self, index: Any) -> Any:
        """Return the batch, on the device."""
        number = next(self._numbers)
        return self._feed.bring(self._fetcher.fetch(index), number)


class _Refusing:
    """Refuses a batch before its index is drawn, so that the next call delivers it."""

    _feed: Feed

    def _next_data(self) -> Any:
        self._feed.check_open()
        return super()._next_data()  # type: ignore[misc]


class _Fed(_Refusing):
    """Brings the batches of an iterator whose workers are torch's to the device."""

    _feed_numbers: Iterator[int]

    def _next_data(self) -> Any:
        batch = super()._next_data()
        return self._feed.bring(batch, next(self._feed_numbers))

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)  # type: ignore[misc]
        self._feed.begin_epoch()
        self._feed_numbers = count()


@cache
def _fed_kind(base: type[Any], kind: Any) -> type[Any]:
    return type(kind.__name__, (base, kind), {"__module__": kind.__module__})


def have_fed(iterator: BaseDataLoaderIter, feed: Feed, transform: Transform | None) -> BaseDataLoaderIter:
    """Have one of torch's iterators bring its batches to the device, each when it is asked for."""
    inner: Any = iterator
    feed.have_transformed(transform, int(inner._base_seed))
    feed.begin_epoch()
    is_in_process = isinstance(iterator, SingleProcessDataLoaderIter)
    kind: Any = type(iterator)
    inner.__class__ = _fed_kind(_Refusing if is_in_process else _Fed, kind)
    inner._feed = feed
    if is_in_process:
        inner._pin_memory = False  # the feed has batches pinned before they are copied
        inner._dataset_fetcher = _FedFetcher(inner._dataset_fetcher, feed, inner._num_yielded)
        meter = getattr(iterator, "meter", None)  # of an iterator that is measured
        if meter is not None:
            meter.feed = feed
    else:
        inner._feed_numbers = count()
    weakref.finalize(iterator, feed.settle).atexit = False
    return iterator

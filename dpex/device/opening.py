"""Makes the feed of an iterator, and has the iterators that torch drives use one."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import cache
from itertools import count
from typing import Any

import torch

from dpex._torch import BaseDataLoaderIter, SingleProcessDataLoaderIter
from dpex.device.arguments import Transform
from dpex.device.feed import Feed
from dpex.device.placing import QueueDevice, opened
from dpex.device.staging import Staging
from dpex.device.transform import SeededTransform


def open_feed(target: torch.device | None, budget_bytes: int, transform: Transform | None) -> Feed | None:
    """A feed to that device; None where nothing is to be done: batches stay on the host, as they are.

    Raises:
        OptionError: This process cannot use the device.
    """
    if target is None or (target.type == "cpu" and transform is None):
        return None
    device = opened(target)
    pin = Staging(device) if isinstance(device, QueueDevice) else None
    return Feed(device, budget_bytes=budget_bytes, pin=pin)


def have_transformed(feed: Feed, transform: Transform | None, base_seed: int) -> None:
    """Have a feed call ``transform`` with each batch, with seeds made from the base seed of the iterator."""
    if transform is not None:
        feed.transform = SeededTransform(transform, feed.device, base_seed)


class _FedFetcher:
    """Gets a batch from the dataset of an in-process iterator, and on to the device."""

    def __init__(self, fetcher: Any, feed: Feed, first: int) -> None:
        self._fetcher = fetcher
        self._feed = feed
        self._numbers = count(first)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)  # the dataset, and the iterator of a stream

    def fetch(self, index: Any) -> Any:
        """The batch, on the device."""
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
    have_transformed(feed, transform, int(inner._base_seed))
    feed.begin_epoch()
    is_in_process = isinstance(iterator, SingleProcessDataLoaderIter)
    kind: Any = type(iterator)
    inner.__class__ = _fed_kind(_Refusing if is_in_process else _Fed, kind)
    inner._feed = feed
    if is_in_process:
        inner._pin_memory = False  # the feed has batches pinned, before they are on the device
        inner._dataset_fetcher = _FedFetcher(inner._dataset_fetcher, feed, inner._num_yielded)
        meter = getattr(iterator, "_meter", None)  # of an iterator that is counted
        if meter is not None:
            meter.feed = feed
    else:
        inner._feed_numbers = count()
    weakref.finalize(iterator, feed.settle).atexit = False
    return iterator

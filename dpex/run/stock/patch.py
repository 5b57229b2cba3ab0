"""Has torch's own iterators counted below ``dpex diagnose``, and says at the end what was found.

Iterators, loaders, datasets and batches stay what they are. Methods of torch's two iterator classes are replaced by
ones that look for a meter on the iterator and else do nothing; the collate function that an iterator hands to its
workers carries the rows in which they write down their times. Used by whichever thread iterates; nothing that goes
wrong here ends a run.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from dpex._torch import BaseDataLoaderIter, DatasetKind, MultiProcessingDataLoaderIter, SingleProcessDataLoaderIter
from dpex.run.options import DiagnoseOptions
from dpex.run.stock import report
from dpex.run.stock.counters import CountedIterator, HereMeter, WorkersMeter, WorkerTimes
from dpex.system.clock import monotonic
from dpex.system.gpu.events import cuda_stall

_METER, _PAGE = "_dpex_meter", "_dpex_page"
_MARK = "_dpex_is_counted"
_making = threading.local()
_base: Any = BaseDataLoaderIter
_single: Any = SingleProcessDataLoaderIter
_multi: Any = MultiProcessingDataLoaderIter
_kinds: Any = DatasetKind


class CountedCollate:
    """A collate function on its way to torch's workers, with their rows; `patch` takes it apart there."""

    def __init__(self, collate_fn: Callable[[Any], Any], times: WorkerTimes) -> None:
        self.collate_fn = collate_fn
        self.times = times

    def __call__(self, data: Any) -> Any:
        """As the function itself."""
        return self.collate_fn(data)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        patch()  # it arrives in a spawned worker before the worker makes its fetcher


def iterator(loader: Any, torchs: Callable[[Any], Any], options: DiagnoseOptions) -> Any:
    """What ``loader._get_iterator()`` returns below ``dpex diagnose``; ``torchs`` is torch's own method."""
    if get_worker_info() is not None:
        return torchs(loader)
    patch()
    workers = int(loader.num_workers)
    meter: Any = None
    if workers:
        meter = WorkersMeter(workers, workers * (loader.prefetch_factor or 2), cuda_stall())
        _making.meter = meter
    began = monotonic()
    try:
        made = torchs(loader)
    finally:
        _making.meter = None
    if not workers:
        meter = _attend_here(made)
    if meter is not None:
        meter.started(monotonic() - began)
        _open(made, meter, loader, options)
    return made


def _attend_here(made: Any) -> HereMeter | None:
    fetcher: Any = getattr(made, "_dataset_fetcher", None)
    if not isinstance(made, _single) or not hasattr(fetcher, "collate_fn"):
        return None
    meter = HereMeter(auto_collation=made._auto_collation, gpu=cuda_stall())
    fetcher.collate_fn = meter.timed(fetcher.collate_fn)
    return meter


def _open(made: Any, meter: Any, loader: Any, options: DiagnoseOptions) -> None:
    meter.pids = tuple(worker.pid for worker in getattr(made, "_workers", ()))
    page = report.book_of(loader, options, made._rank).open(meter)
    vars(made).update({_METER: meter, _PAGE: page})
    weakref.finalize(made, page.end)


def _meter(iterator: Any) -> Any:
    return vars(iterator).get(_METER)


# -- torch's methods ---------------------------------------------------------------------------------------------------


def patch() -> None:
    """Have torch's iterator classes look for meters, and workers for `CountedCollate`; once in a process."""
    if hasattr(_base, _MARK):
        return
    setattr(_base, _MARK, True)
    _replace(_base, "__init__", _initialised)
    _replace(_base, "_next_index", _drawn)
    _replace(_single, "_next_data", _next_here)
    _replace(_multi, "_next_data", _next_from_workers)
    _replace(_multi, "_get_data", _got)
    _replace(_multi, "_reset", _reset)
    _replace(_multi, "_shutdown_workers", _shut_down)
    torchs = _kinds.create_fetcher
    _kinds.create_fetcher = staticmethod(functools.wraps(torchs)(functools.partial(_fetcher, torchs)))


def _replace(kind: Any, name: str, ours: Callable[..., Any]) -> None:
    torchs = getattr(kind, name)

    @functools.wraps(torchs)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(torchs, self, *args, **kwargs)

    setattr(kind, name, method)


def _initialised(torchs: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    torchs(self, *args, **kwargs)
    meter = getattr(_making, "meter", None)
    if meter is not None and isinstance(self, _multi):
        self._collate_fn = CountedCollate(self._collate_fn, meter.times)


def _fetcher(torchs: Any, kind: Any, dataset: Any, auto_collation: Any, collate_fn: Any, drop_last: Any) -> Any:
    if not isinstance(collate_fn, CountedCollate):
        return torchs(kind, dataset, auto_collation, collate_fn, drop_last)
    fetcher = torchs(kind, dataset, auto_collation, collate_fn.collate_fn, drop_last)
    info = get_worker_info()
    if info is not None:
        CountedIterator(collate_fn.times, info.id, fetcher)
    return fetcher


def _drawn(torchs: Any, self: Any) -> Any:
    index = torchs(self)
    meter = _meter(self)
    if isinstance(meter, HereMeter):
        meter.drawn()
    return index


def _next_here(torchs: Any, self: Any) -> Any:
    def left(meter: Any, data: Any) -> None:
        meter.leave()
        meter.got(data)

    return _entered(torchs, self, left)


def _next_from_workers(torchs: Any, self: Any) -> Any:
    return _entered(torchs, self, lambda meter, data: meter.leave(data))


def _entered(torchs: Any, self: Any, left: Callable[[Any, Any], None]) -> Any:
    """torch's call, of which its meter is told when it begins and when it is ``left``."""
    meter = _meter(self)
    if meter is None:
        return torchs(self)
    meter.enter()
    try:
        data = torchs(self)
    except BaseException as error:
        meter.leave(error=error)
        raise
    left(meter, data)
    return data


def _got(torchs: Any, self: Any) -> Any:
    meter = _meter(self)
    if meter is None:
        return torchs(self)
    meter.block(self._task_info)
    data = torchs(self)
    meter.unblock()
    return data


def _reset(torchs: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    meter = _meter(self)
    began = monotonic()
    done = torchs(self, *args, **kwargs)
    if meter is not None:
        meter.started(monotonic() - began)
    return done


def _shut_down(torchs: Any, self: Any) -> Any:
    page = vars(self).get(_PAGE)
    if page is not None:
        page.end()  # while the workers are there to be asked how long they queued
    return torchs(self)


os.register_at_fork(after_in_child=report.forget)

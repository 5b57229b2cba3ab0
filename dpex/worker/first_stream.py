"""The value of ``get_worker_info()`` in the first stream of a dataset, until it is known if the dataset splits itself.

It is torch's, and notes reads of the stream's place among the others: ``id`` or ``num_workers``. They are noted
whichever way the object was found, by ``get_worker_info()`` under any name or in torch's module. ``seed`` and
``dataset`` say nothing of other streams. A ``worker_init_fn`` knows its ``id`` without reading it. So one that reads
``dataset`` counts as well, unless it reads ``seed``, too: then it seeds the dataset. `dpex.schedule.streams` describes
the consequences.

Any thread of the dataset may read it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dpex._torch import WorkerInfo

PLACE = frozenset({"id", "num_workers", "__dict__", "__getstate__", "__reduce__", "__reduce_ex__"})
"""Attributes that show the stream's place, and those that copy or show all attributes at once."""


class _WatchedInfo(WorkerInfo):
    """See the module; made by `FirstStream`."""

    __slots__ = ("_watch",)
    _watch: FirstStream

    def __getattribute__(self, name: str) -> Any:
        return _read(object.__getattribute__(self, "_watch"), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _read(object.__getattribute__(self, "_watch"), "__reduce_ex__")
        return object.__getattribute__(self, "_watch").info.__reduce_ex__(protocol)


class FirstStream:
    """The first stream, until it is known whether the dataset splits itself.

    Args:
        info: The worker info of a dataset that splits itself.
        tell: Called once, before the first batch is made, with True if the dataset splits itself.

    Attributes:
        info: The worker info with the present values.
        shown: The value of ``get_worker_info()``.
    """

    def __init__(self, info: Any, tell: Callable[[bool], None]) -> None:
        self.info = info
        self.shown: Any = object.__new__(_WatchedInfo)
        object.__setattr__(self.shown, "_watch", self)
        self.is_open = True
        self._read: set[str] = set()
        self._reading = threading.Lock()
        self._tell = tell

    def note(self, name: str) -> None:
        """Note that an attribute of the worker info is about to be read, until `settle`."""
        with self._reading:
            if self.is_open:
                self._read.add(name)

    def initialised(self) -> None:
        """Note that ``worker_init_fn`` was called."""
        if "dataset" in self._read and "seed" not in self._read:
            self.note("id")

    def iterated(self) -> None:
        """Note that ``iter()`` of the dataset was called."""
        if self._read & PLACE:
            self.settle()

    def settle(self) -> None:
        """Decide, once the first sample was drawn, or the stream has ended without one."""
        with self._reading:
            if not self.is_open:
                return
            self.is_open = False
            is_split = bool(self._read & PLACE)
            if not is_split:
                info = self.info
                self.info = WorkerInfo(id=info.id, num_workers=1, seed=info.seed, dataset=info.dataset)
        self._tell(is_split)


def _read(watch: FirstStream, name: str) -> Any:
    if watch.is_open:
        watch.note(name)
    return getattr(watch.info, name)

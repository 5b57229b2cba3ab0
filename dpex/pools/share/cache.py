"""The batches that trainings wait for, and the batches that are kept for slower trainings. PURE.

A batch has a *key*: the number of the pass, and its number in the pass. The first request for a key makes the batch.
Later requests get the same batch as long as it is kept. The bytes of kept batches are bounded: the oldest batch is
dropped first, except the latest `LEAST_KEPT` batches and batches that a training is copying. A request for a dropped
batch makes it again.

All trainings must mean the same samples by a key; otherwise they get an `OtherOrderError`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dpex.errors import InternalError

LEAST_KEPT = 4
"""Minimum batches kept, whatever their size. Two trainings with a prefetch of two may be this many batches apart."""

Key = tuple[int, int]
"""The pass and the number of a batch."""


class CacheAnswer(NamedTuple):
    """The answer to a training that asks for a batch: the batch's ``value``, if the batch is kept.

    ``must_make``: The batch is neither kept nor being made. ``is_first``: The training asked for the batch first.
    """

    value: Any = None
    must_make: bool = False
    is_first: bool = False


class OtherOrderError(InternalError):
    """Trainings that share batches have different samples in a batch. ``args``: The known and the other samples."""


@dataclass(slots=True)
class _Batch:
    index: Any
    first: int
    waiting: list[int] = field(default_factory=list)
    borrowers: set[int] = field(default_factory=set)
    value: Any = None


class BatchCache:
    """See the module. Trainings are named by number. budget_bytes: The maximum size of kept batches."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._batches: dict[Key, _Batch] = {}
        self._made: dict[Key, _Batch] = {}
        self._nbytes = 0

    def ask(self, training: int, key: Key, index: Any) -> CacheAnswer:
        """Note that a training wants a batch. Raises OtherOrderError if another training has other samples in it."""
        batch = self._batches.get(key)
        if batch is None:
            self._batches[key] = _Batch(index, training, [training])
            return CacheAnswer(must_make=True, is_first=True)
        if not _are_same(batch.index, index):
            raise OtherOrderError(batch.index, index)
        if batch.value is None:
            if training not in batch.waiting:
                batch.waiting.append(training)
            return CacheAnswer(is_first=batch.first == training)
        self._lend(batch, training)
        return CacheAnswer(batch.value, is_first=batch.first == training)

    def _lend(self, batch: _Batch, training: int) -> None:
        if batch.value.is_lent:
            batch.borrowers.add(training)

    def is_wanted(self, key: Key) -> bool:
        batch = self._batches.get(key)
        return batch is not None and batch.value is None

    def index(self, key: Key) -> Any:
        return self._batches[key].index

    def made(self, key: Key, index: Any, value: Any) -> list[tuple[int, bool]]:
        """Keep a batch of these samples. Its ``value`` has the attributes ``nbytes`` and ``is_lent``.

        Return the trainings that wait for it, each with True if the batch was made for that training. The batch is not
        kept if no training wants it any more, or if other trainings want other samples under its key.
        """
        batch = self._batches.get(key)
        if batch is None or batch.value is not None or not _are_same(batch.index, index):
            return []
        batch.value = value
        self._made[key] = batch
        self._nbytes += value.nbytes
        waiting, batch.waiting = batch.waiting, []
        for training in waiting:
            self._lend(batch, training)
        self._shrink()
        return [(training, training == batch.first) for training in waiting]

    def taken(self, training: int, keys: Iterable[Key]) -> None:
        """Note that a training has copied these batches."""
        for key in keys:
            batch = self._batches.get(key)
            if batch is not None:
                batch.borrowers.discard(training)
        self._shrink()

    def lost(self, keys: Iterable[Key]) -> dict[int, list[Key]]:
        """Forget batches whose worker has died. Return, for each training, the lost batches that it must ask for
        anew."""
        missed: dict[int, list[Key]] = {}
        for key in keys:
            batch = self._batches.get(key)
            if batch is None or batch.value is not None:
                continue
            del self._batches[key]
            for training in batch.waiting:
                missed.setdefault(training, []).append(key)
        return missed

    def leave(self, training: int) -> None:
        """Forget a training that has ended, so that no batch is made or held for it."""
        self._forget(training, [key for key, batch in self._batches.items() if batch.value is None])
        for batch in self._made.values():
            batch.borrowers.discard(training)
        self._shrink()

    def enter_pass(self, training: int, epoch: int) -> None:
        """Note that a training does not wait for batches of earlier passes any more."""
        self._forget(training, [key for key, b in self._batches.items() if b.value is None and key[0] < epoch])

    def _forget(self, training: int, keys: Iterable[Key]) -> None:
        for key in keys:
            batch = self._batches[key]
            if training in batch.waiting:
                batch.waiting.remove(training)
            if not batch.waiting:
                del self._batches[key]

    def _shrink(self) -> None:
        """Give up the oldest batches that no training is copying, until the rest is within the budget."""
        if self._nbytes <= self.budget_bytes:
            return
        for key in [key for key, batch in self._made.items() if not batch.borrowers]:
            if self._nbytes <= self.budget_bytes or len(self._made) <= LEAST_KEPT:
                return
            self._nbytes -= self._made.pop(key).value.nbytes
            del self._batches[key]


def _are_same(one: Any, other: Any) -> bool:
    """Return True if two indices of a batch name the same samples. Arrays are compared by their bytes."""
    if type(one) is type(other) and isinstance(one, (int, str, list, tuple, dict)):
        try:
            return bool(one == other)
        except Exception:
            return pickle.dumps(one) == pickle.dumps(other)
    return pickle.dumps(one) == pickle.dumps(other)

"""Which batch which training still wants, and which batches are kept for those that come later. PURE.

A batch has a *key*: the number of the pass, and its own in it. The first training that asks for one has it made;
whoever asks meanwhile waits for the same, and whoever asks later gets it as long as it is kept. What is kept is bounded
by bytes: the batch that was made first goes first, but none that a training is just taking over, and never the latest
`LEAST_KEPT`. A training that asks for what has gone has it made again.

Both must mean the same by a key: if they name other samples, `OtherOrderError` tells both.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from dpex.errors import InternalError

LEAST_KEPT = 4
"""Batches that are kept however large they are: as many as two trainings with a prefetch of two may be apart."""

Key = tuple[int, int]
"""The pass and the number of a batch."""


class Kept(Protocol):
    """A batch that was made."""

    @property
    def nbytes(self) -> int: ...
    @property
    def is_lent(self) -> bool: ...


class CacheAnswer(NamedTuple):
    """What becomes of a question.

    value: the batch, if it is here. must_make: nobody has it made yet. is_first: this training is the one for which it
    is made. behind: how many batches the training is behind the one furthest ahead, if this one has gone; else 0.
    """

    value: Any = None
    must_make: bool = False
    is_first: bool = False
    behind: int = 0


class OtherOrderError(InternalError):
    """Two trainings that share have different samples in the same batch; it holds the ``known`` ones and the
    ``other``."""

    def __init__(self, known: Any, other: Any) -> None:
        super().__init__(f"{known!r} and {other!r}")
        self.known = known
        self.other = other


@dataclass(slots=True)
class _Batch:
    index: Any
    first: int
    waiting: list[int] = field(default_factory=list)
    borrowers: set[int] = field(default_factory=set)
    value: Any = None


class BatchCache:
    """See the module. Trainings are told by number. budget_bytes: what is kept, at most."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._batches: dict[Key, _Batch] = {}
        self._made: dict[Key, _Batch] = {}
        self._nbytes = 0
        self._front: Key = (-1, -1)
        self._gone: Key = (-1, -1)

    def ask(self, training: int, key: Key, index: Any) -> CacheAnswer:
        """A training wants that batch, which is of these samples.

        Raises:
            OtherOrderError: Another training has other samples in that batch.
        """
        batch = self._batches.get(key)
        if batch is None:
            self._batches[key] = _Batch(index, training, [training])
            return CacheAnswer(must_make=True, is_first=True, behind=self._advance(key))
        if not _are_same(batch.index, index):
            raise OtherOrderError(batch.index, index)
        if batch.value is None:
            if training not in batch.waiting:
                batch.waiting.append(training)
            return CacheAnswer(is_first=batch.first == training)
        self._lend(batch, training)
        return CacheAnswer(batch.value, is_first=batch.first == training)

    def _advance(self, key: Key) -> int:
        """How far that is behind the front, if it has gone; 0 if it was never here."""
        self._front = max(self._front, key)
        if key > self._gone:
            return 0
        epoch, number = self._front
        return number - key[1] if epoch == key[0] else 1

    def _lend(self, batch: _Batch, training: int) -> None:
        if batch.value.is_lent:
            batch.borrowers.add(training)

    def is_wanted(self, key: Key) -> bool:
        """Whether somebody waits for that batch."""
        batch = self._batches.get(key)
        return batch is not None and batch.value is None

    def index(self, key: Key) -> Any:
        """The samples of a batch that somebody waits for."""
        return self._batches[key].index

    def made(self, key: Key, value: Kept) -> list[tuple[int, bool]]:
        """It was made; returns who waits for it, and whether it was made for them."""
        batch = self._batches.get(key)
        if batch is None or batch.value is not None:
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
        """A training has a copy of its own of these."""
        for key in keys:
            batch = self._batches.get(key)
            if batch is not None:
                batch.borrowers.discard(training)
        self._shrink()

    def lost(self, keys: Iterable[Key]) -> dict[int, list[Key]]:
        """Whoever was to make these has died; returns, by training, which it waited for. All ask anew."""
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
        """A training has ended: nobody waits for it, and nothing is kept for it."""
        self._forget(training, [key for key, batch in self._batches.items() if batch.value is None])
        for batch in self._made.values():
            batch.borrowers.discard(training)
        self._shrink()

    def enter_pass(self, training: int, epoch: int) -> None:
        """A training does not wait for batches of earlier passes any more."""
        self._forget(training, [key for key, b in self._batches.items() if b.value is None and key[0] < epoch])

    def _forget(self, training: int, keys: Iterable[Key]) -> None:
        for key in keys:
            batch = self._batches[key]
            if training in batch.waiting:
                batch.waiting.remove(training)
            if not batch.waiting:
                del self._batches[key]

    def _shrink(self) -> None:
        """Give up the oldest that nobody is taking over, until the rest is within the budget."""
        if self._nbytes <= self.budget_bytes:
            return
        for key in [key for key, batch in self._made.items() if not batch.borrowers]:
            if self._nbytes <= self.budget_bytes or len(self._made) <= LEAST_KEPT:
                return
            self._nbytes -= self._made.pop(key).value.nbytes
            del self._batches[key]
            self._gone = max(self._gone, key)


def _are_same(one: Any, other: Any) -> bool:
    """Whether two indices of a batch name the same samples; arrays and their like by their bytes."""
    if type(one) is type(other) and isinstance(one, (int, str, list, tuple, dict)):
        try:
            return bool(one == other)
        except Exception:
            return pickle.dumps(one) == pickle.dumps(other)
    return pickle.dumps(one) == pickle.dumps(other)

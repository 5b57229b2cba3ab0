"""Find attributes of a dataset that are set after it was given to `dpex.cached`, by whatever code.

Samples depend on attributes. The changes before the first sample was kept are noted in the cache, as hashes. A process
whose dataset has other changes must not read from it. Attributes that the dataset sets while it prepares a sample, such
as a file that is opened late, are its own and no changes. Items of lists, tensors and dicts are not looked at.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from operator import is_not
from typing import Any

from torch.utils.data import Dataset

from dpex.cache.fingerprint import digest
from dpex.cache.memory_store import Changes

_MOST_BYTES = 3000
"""Bytes of the changes as JSON, which must fit into the page of a store's header."""
_LEVELS = 4
"""Levels of datasets within datasets."""
_ABSENT = "absent"


class Wrapper(Dataset[Any]):
    """A dataset around a dataset, whose own attributes change no sample."""

    dataset: Any


class AttributeWatch:
    """The attributes of one dataset, and of datasets in its attributes, in one process.

    Args:
        dataset: The dataset as it is at first.
        changes: Changes that it has already.
    """

    def __init__(self, dataset: Any, changes: Changes | None = None) -> None:
        self._dataset = dataset
        self._objects = list(_datasets("", dataset))
        self._first = self._now()
        self._see(self._first)
        self._own: dict[str, Any] = {}
        self._at_first, self._changes = changes or {}, dict(changes or {})

    @property
    def changes(self) -> Changes:
        """The changes so far: hashes of values by the names of attributes, or of all if they are many."""
        is_short = len(json.dumps(self._changes)) <= _MOST_BYTES
        return dict(self._changes) if is_short else {"many": digest(sorted(self._changes.items()))}

    def _now(self) -> dict[str, Any]:
        return {prefix + name: value for prefix, held, _ in self._objects for name, value in held.items()}

    def names_changed(self) -> list[str]:
        """Return the attributes that were set or deleted since the last call, or since `absorb`."""
        values, at = self._values, 0
        for _, held, _ in self._objects:  # a quick look: this runs for each sample
            end = at + len(held)
            if any(map(is_not, held.values(), values[at:end])):
                return self._update()
            at = end
        return [] if at == len(values) else self._update()

    def _update(self) -> list[str]:
        seen = self._seen
        self._objects = list(_datasets("", self._dataset))
        now = self._now()
        self._see(now)
        names = [name for name in {**seen, **now} if now.get(name, _ABSENT) is not seen.get(name, _ABSENT)]
        names = [name for name in names if not isinstance(self._of_class(name), functools.cached_property)]
        for name in names:
            self._changes.pop(name, None)
            if (change := self._change(name)) is not None:
                self._changes[name] = change
        return names

    def _change(self, name: str) -> str | None:
        """Return the hash of a changed attribute; None if it is as at first, or as the dataset has set it itself."""
        of_class = self._of_class(name)
        value, first = (values.get(name, of_class) for values in (self._seen, self._first))
        if value is first or value is self._own.get(name, self):
            return self._at_first.get(name)
        found = digest(value)
        return self._at_first.get(name) if found == digest(first) else found

    def _of_class(self, name: str) -> Any:
        """Return the value that the dataset's class has for an attribute."""
        prefix, _, last = name.rpartition(".")
        kinds = [kind for each, _, kind in self._objects if each == (prefix and f"{prefix}.")]
        return getattr(kinds[0], last, _ABSENT) if kinds else _ABSENT

    def absorb(self) -> None:
        """Take the present attributes for those that the dataset has set itself."""
        now = self._now()
        for name, value in now.items():
            if value is not self._seen.get(name, _ABSENT):
                self._own[name] = value
        self._see(now)

    def _see(self, now: dict[str, Any]) -> None:
        self._seen, self._values = now, tuple(now.values())


def _datasets(prefix: str, dataset: Any) -> Iterator[tuple[str, dict[str, Any], type]]:
    """Yield the attributes of a dataset, and of those within, each with a prefix and the class."""
    held = getattr(dataset, "__dict__", None)
    if not isinstance(held, dict) or prefix.count(".") > _LEVELS:
        return
    if isinstance(dataset, Wrapper):
        yield from _datasets(prefix, dataset.dataset)
        return
    yield prefix, held, type(dataset)
    for name, value in held.items():
        if isinstance(value, Dataset):
            yield from _datasets(f"{prefix}{name}.", value)

"""`dpex.cached`: a dataset around a dataset that prepares each sample once for all processes of a machine.

A sample is looked for in shared memory, then on disk, and is prepared and kept if it is in neither. Nothing here draws
random numbers: the generators are left as the dataset within leaves them. A dataset that draws some is random, which is
an error, or ends the caching.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterable
from operator import index as whole_number
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import Dataset

from dpex.cache import disk_store
from dpex.cache.determinism import prepared_twice
from dpex.cache.encoding import Encoded, decoded, encoded
from dpex.cache.fingerprint import fingerprint
from dpex.cache.memory_store import MemoryStore, Stored, path_of
from dpex.cache.steps import Cut, changed_at, cut, is_cachable, random_place
from dpex.errors import CacheError, OptionError
from dpex.measure.batch_times import CACHE_USE
from dpex.options import byte_count
from dpex.profile.live_timer import places_of
from dpex.worker.draws import global_marks

logger = logging.getLogger("dpex")

CHECKED_FIRST = 2
"""Samples of each process that are prepared twice, to see if they are random."""
CHECKED_EVERY = 1000
"""Later, one sample of that number is prepared twice."""
_MOST_ITEMS = 64
"""Items of a list in which `caches_in` looks for caches."""
OnRandom = Literal["raise", "skip"]


def cached(
    dataset: Any,
    *,
    upto: str | None = None,
    memory: int | str | None = None,
    disk: str | Path | None = None,
    disk_budget: int | str | None = None,
    on_random: OnRandom = "raise",
    cache_version: str = "",
    paths: Iterable[str | Path] | str | Path = (),
) -> CachedDataset:
    """Return a dataset that prepares each sample of ``dataset`` once, and then reads it from a cache.

    A machine has one cache, which all workers, epochs, loaders and trainings of a user share. A node of a cluster has
    its own. Samples are kept in shared memory, and with ``disk`` in a file for later runs as well. What does not fit is
    prepared each time, and the log says how much that is. Only what is the same in each epoch can be cached: put random
    augmentation around the cached dataset, or name the last deterministic step by ``upto``.

    Args:
        dataset: A map-style dataset with a length.
        upto: The class of a step of the dataset's Compose (its attribute ``transform`` or ``transforms`` with a list of
            steps). The samples are cached as they are after this step, and the later steps run each time. "": before
            the first step. None: whole samples are cached.
        memory: The maximum number of bytes of samples in shared memory on each machine, as a number or as a text such
            as "8GB". A table takes 24 more for each sample of the dataset. All goes when the last process that uses the
            cache ends. None: half of what is free. 0: none.
        disk: A folder for a cache that outlives the run. It needs the package lmdb: ``pip install 'dpex[cache]'``.
        disk_budget: The maximum number of bytes there. None: half of what is free.
        on_random: What happens when a sample turns out to be random: it is prepared twice under different seeds for the
            first samples of each process and for one in a thousand later, and it must not draw from a global generator.
            "raise": CacheError, which names the step. "skip": a warning, and nothing is cached.
        cache_version: Change it to begin a new cache. A new one begins by itself when the pickled state of the dataset
            changes, or the source of the classes in it.
        paths: Files and folders that the samples are made from, or one of them: a new cache begins when their sizes or
            times of change differ.

    Returns:
        A map-style dataset. Attributes that it lacks are those of ``dataset``. Samples consist of the same types. Their
        arrays and tensors are views of shared memory, of which a page is copied when it is written to.

    Raises:
        OptionError: An argument has a wrong value, or lmdb is not installed. It is a ValueError.
        CacheError: A folder is another user's, shared memory or a limit of the process is too small, or the dataset
            cannot be pickled and has no ``cache_version``.

    Examples:
        >>> import dpex
        >>> class Squares:
        ...     def __len__(self):
        ...         return 4
        ...     def __getitem__(self, index):
        ...         print("preparing", index)
        ...         return index * index
        >>> squares = dpex.cached(Squares(), memory="1MB", cache_version="example")
        >>> squares[3] + squares[3]  # the first samples are prepared twice, to see if they are random
        preparing 3
        preparing 3
        18
        >>> squares.stored()["memory"].kept
        1
    """
    if not is_cachable(dataset):
        raise OptionError(
            f"a {type(dataset).__name__} has no __getitem__ and __len__: only such datasets can be cached"
        )
    if on_random not in ("raise", "skip"):
        raise OptionError(f"on_random={on_random!r}: give 'raise' or 'skip'")
    sizes = {"memory": byte_count(memory), "disk_budget": byte_count(disk_budget)}
    for name, value in sizes.items():
        if value is not None and not (type(value) is int and value >= 0):
            raise OptionError(f"{name}={value!r}: give a number of bytes, a text such as '8GB', or None")
    if sizes["memory"] == 0 and disk is None:
        raise OptionError("memory=0 without disk=: give one of the two, or leave dpex.cached out")
    parts = Cut(dataset, None, None) if upto is None else cut(dataset, upto)
    key = fingerprint(parts.dataset, len(dataset), cache_version, paths)
    folder = None if disk is None else Path(disk).absolute() / key
    return CachedDataset(dataset, parts, key, on_random, (sizes["memory"], folder, sizes["disk_budget"]))


class CachedDataset(Dataset[Any]):
    """A dataset whose samples are prepared once; made by `dpex.cached`.

    Attributes:
        dataset: The dataset within.
        key: The name of its cache, 32 hexadecimal digits.
        later_transform: The steps behind ``upto``, which run each time; None if there are none.
    """

    def __init__(
        self,
        dataset: Any,
        parts: Cut,
        key: str,
        on_random: OnRandom,
        limits: tuple[int | None, Path | None, int | None],
    ) -> None:
        self.dataset, self.key = dataset, key
        self._base, self._first, self.later_transform = parts
        self._samples = len(dataset)
        self._limits, self._on_random = limits, on_random
        self._open()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        place = self._place(index)
        if place is None or self._memory is None or self.is_random:
            return self.dataset[index]
        began = time.perf_counter()
        found = self._kept(place)
        if found is None:
            CACHE_USE.misses += 1
            where, sample = self._prepared(place)
        else:
            (where, sample), cost_us = found
            CACHE_USE.hits += 1
            CACHE_USE.saved_s += max(0.0, cost_us / 1e6 - (time.perf_counter() - began))
        if where is None:
            return sample
        return changed_at(where, sample, self.later_transform)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "dataset" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)

    @property
    def is_random(self) -> bool:
        """True once a sample turned out to be random, so that nothing is cached."""
        return self._memory is not None and self._memory.is_random

    def stored(self) -> dict[str, Stored]:
        """Return what the cache of this machine has at present, by "memory" and, if there is one, "disk"."""
        return {where: store.stored() for where, store in self._stores().items()}

    # -- stores --------------------------------------------------------------------------------------------------------

    def _stores(self) -> dict[str, Any]:
        both = {"memory": self._memory, "disk": self._disk}
        return {where: store for where, store in both.items() if store is not None}

    def _open(self) -> None:
        """Open the stores of this machine. Raises as `cached`."""
        memory, disk, disk_budget = self._limits
        name = type(self.dataset).__name__
        self._pid, self._misses = os.getpid(), 0
        self._disk: disk_store.DiskStore | None = None
        self._memory: MemoryStore | None = None
        try:
            self._memory = MemoryStore(path_of(self.key), self._samples, memory, name)
            if disk is not None:
                self._disk = disk_store.opened(disk, disk_budget, name, self._samples)
        except OSError as error:  # of limits (ulimit -f, -v, -n), for example
            raise CacheError(
                f"a cache of {name} cannot be made: {error}; give a smaller memory=, or see `ulimit -a`"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in vars(self).items() if name not in ("_memory", "_disk", "_pid", "_misses")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._memory = self._disk = None
        try:
            self._open()
        except (CacheError, OptionError) as error:
            where = "" if self._memory is None else "on disk "
            name = type(self.dataset).__name__
            logger.warning("%s is not cached %sin process %s: %s", name, where, os.getpid(), error)

    def _kept(self, place: int) -> tuple[Any, int] | None:
        """Return the sample that is kept, with its place for the later steps, and its cost in microseconds."""
        assert self._memory is not None
        found = self._memory.get(place)
        if found is None and self._disk is not None:
            found = self._disk.get(place)
            if found is not None and not self._memory.why_full:
                self._memory.put(place, Encoded((found[0],), len(found[0])), found[1])
        if found is None:
            return None
        try:
            return decoded(found[0]), found[1]
        except Exception as error:
            raise CacheError(
                f"sample {place} of {type(self.dataset).__name__} cannot be read from its cache ({error}): a class in "
                "it has changed since; give another cache_version="
            ) from error

    def _keep(self, place: int, sample: Any, cost_us: int) -> None:
        assert self._memory is not None
        stores = {where: store for where, store in self._stores().items() if not store.why_full}
        pieces = encoded(sample) if stores else None
        for where, store in stores.items():
            if not store.put(place, pieces, cost_us) and store.why_full and self._memory.is_first_to_tell(where):
                self._tell_full(where, store.stored(), store.why_full)

    def _tell_full(self, where: str, stored: Stored, why: str) -> None:
        all_bytes = stored.nbytes * stored.samples // stored.kept if stored.kept else 0
        logger.warning(
            "the cache of %s (%s) keeps %s of %s samples, in %s bytes, and no more: %s. %sThe others %s",
            stored.name,
            where,
            *(f"{value:,}" for value in (stored.kept, stored.samples, stored.nbytes)),
            why,
            f"All would take about {all_bytes:,} bytes. " if all_bytes else "",
            "are read from disk" if where == "memory" and self._disk is not None else "are prepared each time",
        )

    # -- samples -------------------------------------------------------------------------------------------------------

    def _place(self, index: Any) -> int | None:
        """Return the number of a sample; None for an index that stands for no single sample of the cache."""
        try:
            number = whole_number(index)
        except TypeError:
            return None
        number += self._samples if number < 0 else 0
        return number if 0 <= number < self._samples else None

    def _made(self, place: int) -> tuple[Any, Any]:
        """Prepare a sample; return the place in it for the later steps, None if they have none, and the sample."""
        first = self._first
        if first is None:
            return None, self._base[place]
        first.forget()
        sample = self._base[place]
        if not first.calls:
            return None, sample
        calls, where = first.calls, places_of(first.result, sample)
        first.forget()
        if (calls, len(where)) != (1, 1):
            what = (
                "calls its transform more than once for a sample" if calls > 1
                else "has what its first steps return more than once in a sample" if where
                else "changes what its first steps return, or hides it from lists, tuples and dicts"
            )  # fmt: skip
            raise CacheError(
                f"{type(self.dataset).__name__} {what}, so the later steps cannot follow (sample {place}); leave upto= "
                "out, and put the random part into a dataset around the cached one"
            )
        return where[0], sample

    def _prepared(self, place: int) -> tuple[Any, Any]:
        """Prepare a sample and keep it, unless it is random."""
        if self._pid != os.getpid():
            self._pid, self._misses = os.getpid(), 0
        is_checked = self._misses < CHECKED_FIRST or self._misses % CHECKED_EVERY == 0
        self._misses += 1
        began = time.perf_counter()
        made: tuple[Any, Any]
        if is_checked:
            made, is_random = prepared_twice(lambda: self._made(place), self._base)
        else:
            before = global_marks()
            made = self._made(place)
            is_random = global_marks() != before
        if is_random:
            self._end_caching(place)
            return self._made(place) if is_checked else made
        cost_us = int((time.perf_counter() - began) * 1e6 / (1 + is_checked))
        self._keep(place, made, min(cost_us, 2**32 - 1))
        return made

    def _end_caching(self, place: int) -> None:
        """Raise CacheError for a random sample, or have nothing cached any more."""
        name = type(self.dataset).__name__
        why = random_place(self._base, place) or "put what is random into a dataset around the cached one"
        if self._on_random == "raise":
            raise CacheError(f"sample {place} of {name} is random, so it cannot be cached: {why}, or on_random='skip'")
        assert self._memory is not None
        if not self._memory.is_random:
            self._memory.note_random()
            logger.warning("%s is not cached, as its sample %s is random: %s", name, place, why)
        if self._limits[1] is not None:
            shutil.rmtree(self._limits[1], ignore_errors=True)


# -- what others ask ---------------------------------------------------------------------------------------------------


def caches_in(dataset: Any, levels: int = 4) -> list[CachedDataset]:
    """Return the cached datasets in a dataset: itself, or those in its attributes, lists and datasets within."""
    if isinstance(dataset, CachedDataset):
        return [dataset]
    is_list = isinstance(dataset, (list, tuple))
    parts = dataset[:_MOST_ITEMS] if is_list else list(getattr(dataset, "__dict__", {}).values())
    return [found for part in parts for found in caches_in(part, levels - 1)] if levels else []


def bytes_of(dataset: Any) -> Callable[[], dict[str, Any]]:
    """Return a function that returns the bytes of all caches in a dataset, by fields of `dpex.measure.sums.Sums`.

    It keeps no dataset alive.
    """
    caches = [weakref.ref(one) for one in caches_in(dataset)]

    def present() -> dict[str, int]:
        found: dict[str, int] = {}
        for one in caches:
            cache = one()
            for where, stored in cache.stored().items() if cache is not None else ():
                name = f"cache_{where}_bytes"
                found[name] = found.get(name, 0) + stored.nbytes
        return found

    return present

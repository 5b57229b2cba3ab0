"""`dpex.cached`: wrap a dataset, so that each sample is prepared once for all of its loaders and workers.

A sample is looked for in shared memory, then on disk, and is prepared and kept if it is in neither. This module draws
no random numbers, so the generators are left as the wrapped dataset leaves them. If the wrapped dataset draws random
numbers, the cache raises an error or stops caching (``on_random``).
"""

from __future__ import annotations

import copy
import logging
import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import index as whole_number
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import Dataset, get_worker_info

from dpex.cache.encoding import Encoded, decoded, encoded, is_same
from dpex.cache.files import aside_folder, folder_of, memory_folder, path_of, store_room
from dpex.cache.fingerprint import digest, fingerprint
from dpex.cache.preparing import has_getitem, is_cachable, load_samples, prepared, prepared_again
from dpex.cache.store import MemoryStore, Store, Stored
from dpex.errors import CacheError, OptionError
from dpex.measure.batch_times import CACHE_USE
from dpex.measure.readable import byte_count
from dpex.schedule.names import is_asynchronous, reads_either_way
from dpex.system.clock import monotonic
from dpex.system.cpus import local_ranks
from dpex.transport.pickling import is_shipping

logger: logging.Logger = logging.getLogger("dpex")

FORMAT = 7
"""Version of encoded samples and their stores. Caches of other versions are not read."""
CHECKED_FIRST = 2
"""Samples of each process that are prepared twice, to see if they are random."""
CHECKED_EVERY = 1000
"""Later, one of this many samples is prepared twice."""
_LABEL_DIGITS = 16
"""Digits of a key that stand for name and version. The digits after them belong to the fingerprint."""
_OWN = "_CachedDataset__"
"""Prefix of the cache's own attributes. All other attributes belong to the wrapped dataset."""
OnRandom = Literal["raise", "skip"]


def cached(
    dataset: Any,
    *,
    memory: int | str | None = None,
    disk: str | Path | None = None,
    disk_budget: int | str | None = None,
    name: str | None = None,
    version: str | int | None = None,
    on_random: OnRandom = "raise",
    paths: Iterable[str | Path] | str | Path = (),
) -> CachedDataset:
    """Return a dataset that prepares each sample of ``dataset`` once, and then reads it from a cache.

    The returned dataset, its loaders and their workers use the cache in all epochs. Other trainings of the user on the
    machine share it if they give the same ``name`` and ``version``. Later runs read it if they give the same ``disk``,
    ``version`` and ``name``. A node of a cluster has a cache of its own. The cache is in shared memory, and with
    ``disk`` in a file as well. Samples that do not fit are prepared each time, and the log reports their share. Cached
    samples must be the same in each epoch: put random augmentation into a dataset around the cached one.

    Args:
        dataset: A map-style dataset with a length. ``__getitem__`` or ``__getitems__`` loads its samples.
        memory: The maximum number of bytes of samples in shared memory on each machine, as a number or as a text such
            as "8GB". A table takes 24 bytes more per sample of the dataset. The memory is freed when the last process
            that uses the cache ends. None: half of the free memory or shared memory, whichever is less, divided by the
            number of training processes on the machine if the cache has no ``name``. 0: no cache in memory.
        disk: A folder on a local disk, for a cache that outlives the run. It needs ``version``.
        disk_budget: The maximum number of bytes on the disk. None: half of the free bytes.
        name: A name by which other trainings join the cache, such as the other ranks of a job. It needs ``version``.
        version: Give another value whenever the samples change: other code, other files, other settings. If an old
            version is given for new samples, the old ones are read. With neither ``name`` nor ``disk``
            it has no effect, because no other training can join.
        on_random: What happens when a sample turns out to be random. "raise": CacheError. "skip": a warning, and
            nothing is cached; the samples on disk are set aside. No sample may draw from a global generator. The first
            samples of each process, and one in a thousand later, are prepared twice under different seeds.
        paths: Files and folders that the samples are made from, or one of them. Trainings share a cache only if the
            sizes and modification times of these files are equal. Without ``name`` and ``disk`` it has no effect.

    Returns:
        A map-style dataset. Attributes that it lacks are read from ``dataset``, and are set in ``dataset``. Its samples
        consist of the same types. Arrays and tensors of a cached sample are views of a private copy or, for large
        samples, of shared memory that is mapped copy-on-write.

    Raises:
        OptionError: An argument has a wrong value. It is a ValueError.
        CacheError: A folder belongs to another user, was written by LMDB, or was set aside because of a random sample;
            or a disk, shared memory or a limit of the process is too small; or a path in ``paths`` is missing. Later,
            reading a sample that is random or cannot be pickled raises it, and so does setting an attribute to another
            value than the cached samples were prepared with.

    Examples:
        >>> import dpex
        >>> class Squares:
        ...     def __len__(self):
        ...         return 4
        ...     def __getitem__(self, index):
        ...         print("preparing", index)
        ...         return index * index
        >>> squares = dpex.cached(Squares(), memory="1MB")
        >>> squares[3] + squares[3]  # the first samples are prepared twice, to see if they are random
        preparing 3
        preparing 3
        18
        >>> squares.stored()["memory"].kept
        1
    """
    kind = type(dataset).__name__
    if not is_cachable(dataset):
        raise OptionError(f"a {kind} has no __getitem__ or __getitems__ with __len__: only such datasets can be cached")
    if is_asynchronous(dataset) and not reads_either_way(dataset):
        raise OptionError(
            f"{kind}.__getitem__ is async, and a cache reads samples one by one: make {kind} a dpex.AsyncDataset, "
            "which can be read so, or leave dpex.cached out"
        )
    if callable(getattr(dataset, "set_epoch", None)):
        raise OptionError(
            f"{kind} has set_epoch, so its samples may differ between epochs, and a cache would keep one epoch's: "
            "cache a dataset with the part that stays the same, and put set_epoch into a dataset around it"
        )
    if on_random not in ("raise", "skip"):
        raise OptionError(f"on_random={on_random!r}: give 'raise' or 'skip'")
    sizes = {"memory": byte_count(memory), "disk_budget": byte_count(disk_budget)}
    for option, value in sizes.items():
        if value is not None and not (type(value) is int and value >= 0):
            raise OptionError(f"{option}={value!r}: give a number of bytes, a text such as '8GB', or None")
    if sizes["memory"] == 0 and disk is None:
        raise OptionError("memory=0 without disk=: give one of the two, or leave dpex.cached out")
    _check_names(name, version, disk)
    key, label = uuid.uuid4().hex, kind
    if name is not None or disk is not None:
        label = f"{kind} ({f'{name}, ' if name else ''}version {version})"
        named = digest([FORMAT, name, str(version)])[:_LABEL_DIGITS]
        key = named + fingerprint(dataset, len(dataset), paths)[_LABEL_DIGITS:]
    folder = None if disk is None else folder_of(Path(disk), key)
    if name is not None:
        _warn_of_another(key, f"name={name!r}, version={version!r}", folder)
    elif sizes["memory"] is None:
        sizes["memory"] = store_room() // 2 // local_ranks(os.environ)
    memory_key = key if name is not None or disk is None else uuid.uuid4().hex
    options = _Options(on_random=on_random, label=label, memory_key=memory_key, is_private=name is None, disk=folder)
    return CachedDataset(dataset, key, replace(options, **sizes))


def _check_names(name: Any, version: Any, disk: Any) -> None:
    for option, value in (("name", name), ("version", version)):
        if value is not None and (not isinstance(value, (str, int)) or not str(value)):
            raise OptionError(f"{option}={value!r}: give a text, such as 'photos' or '2', or leave it out")
    needing = [f"{option}={str(value)!r}" for option, value in (("name", name), ("disk", disk)) if value is not None]
    if needing and version is None:
        raise OptionError(
            f"{needing[0]} needs version=: other trainings read these samples as long as the version is the same. Give "
            "version='1', and another one whenever the samples change"
        )


def _warn_of_another(key: str, given: str, folder: Path | None) -> None:
    """Warn if a cache of that name and version has another fingerprint, so that this training cannot join it."""
    label = key[:_LABEL_DIGITS]
    places = [*memory_folder().glob(f"{label}*.samples"), *(folder.parent.glob(f"{label}*") if folder else ())]
    if places and not any(path.stem == key for path in places):
        logger.warning(
            "A cache with %s exists, and its dataset had another state, other classes or other files. A new cache "
            "begins. Give another version=, and remove the old one, %s", given, min(places)
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Options of a cache; see `cached`. ``label``: the displayed name of the dataset. ``disk``: this cache's folder."""

    on_random: OnRandom
    label: str
    memory_key: str
    is_private: bool
    disk: Path | None
    memory: int | None = None
    disk_budget: int | None = None


class CachedDataset(Dataset[Any]):
    """A dataset whose samples are prepared once; made by `dpex.cached`.

    Attributes:
        dataset: The wrapped dataset.
        key: The name of its cache, 32 hexadecimal digits.
    """

    dataset: Any

    def __init__(self, dataset: Any, key: str, options: _Options) -> None:
        vars(self).update(dataset=dataset, key=key)
        self.__options, self.__samples = options, len(dataset)
        self.__open_stores()
        for store in self.__stores.values():
            if store.why_full:
                logger.warning("the cache in %s takes no samples: %s. It is only read", store.path, store.why_full)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        place = self.__place(index)
        if place is None or not self.__is_caching():
            one = has_getitem(self.dataset)
            return self.dataset[index] if one else self.dataset.__getitems__([index])[0]
        in_bulk = not has_getitem(self.dataset)
        found = self.__cached_sample(place)
        (sample,) = self.__prepared([place], in_bulk=in_bulk) if found is None else found
        return sample

    @property
    def __getitems__(self) -> Any:
        """The method that returns a list of samples at once; None if ``dataset`` has no such method."""
        return self.__load_many if getattr(self.dataset, "__getitems__", None) else None

    def __load_many(self, indices: Sequence[Any]) -> Any:
        places = [place for index in indices if (place := self.__place(index)) is not None]
        if len(places) < len(indices) or not self.__is_caching():
            return self.dataset.__getitems__(indices)
        each = ((at, self.__cached_sample(place)) for at, place in enumerate(places))
        found = {at: kept[0] for at, kept in each if kept is not None}
        missing = [at for at in range(len(places)) if at not in found]
        if missing:
            made = self.__prepared([places[at] for at in missing], in_bulk=True)
            found.update(zip(missing, made, strict=True))
        return [found[at] for at in range(len(places))]

    @property
    def is_random(self) -> bool:
        """True once a sample turned out to be random, so that nothing is cached."""
        return any(store.is_random for store in self.__stores.values())

    def __is_caching(self) -> bool:
        return bool(self.__stores) and not self.is_random

    def stored(self) -> dict[str, Stored]:
        """Return the present contents of the cache of this machine, by "memory" and, if there is one, "disk"."""
        return {where: store.stored() for where, store in self.__stores.items()}

    # -- attributes of the dataset -------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith(_OWN):
            super().__setattr__(name, value)
        else:
            self.__check_change(name, value)
            setattr(self.dataset, name, value)

    def __delattr__(self, name: str) -> None:
        self.__check_change(name)
        delattr(self.dataset, name)

    def __check_change(self, name: str, *value: Any) -> None:
        """Raise CacheError if samples may be cached with another value of ``name``. Workers may change their copies.

        A cache that other trainings can join counts as filled, because its key was made from the dataset as it was.
        """
        if name in vars(self) or hasattr(type(self), name):
            raise AttributeError(f"{name!r} belongs to the cache of {self.__options.label}: set it in its .dataset")
        if get_worker_info() is not None or not hasattr(self.dataset, name):
            return
        is_joined = not self.__options.is_private or self.__options.disk is not None
        has_samples = is_joined or any(store.stored().kept for store in self.__stores.values())
        if has_samples and digest(value) != digest((getattr(self.dataset, name),)):
            raise CacheError(
                f"attribute {name!r} of {type(self.dataset).__name__} would get another value than that of cached "
                "samples, so these may be old. Set it before dpex.cached, put what depends on it into a dataset around "
                "the cached one, or call dpex.cached again"
            )

    # -- stores --------------------------------------------------------------------------------------------------------

    def __open_stores(self) -> None:
        """Open the stores of this machine. Raises the errors of `cached`."""
        options = self.__options
        stores: dict[str, Store] = {}
        self.__pid, self.__misses, self.__stores = os.getpid(), 0, stores
        label, samples, disk = options.label, self.__samples, options.disk
        if disk is not None and aside_folder(disk).exists():
            text = (
                f"{label} is not cached, as a sample was random in an earlier run: remove {aside_folder(disk)} to "
                f"begin anew, rename it to {disk.name} to read it as it is, or give another version="
            )
            if options.on_random == "raise":
                raise CacheError(text)
            logger.warning(text)
            return
        try:
            if options.memory != 0:
                stores["memory"] = MemoryStore(path_of(options.memory_key), samples, options.memory, label)
            if disk is not None:
                stores["disk"] = Store(disk / "samples", samples, options.disk_budget, label)
        except OSError as error:  # a limit is reached (ulimit -f, -v, -n), or the disk is full
            raise CacheError(
                f"a cache of {label} cannot be made: {error}; give a smaller memory=, another disk=, or see `ulimit -a`"
            ) from error

    def __getstate__(self) -> Any:
        options = self.__options
        if options.is_private and not is_shipping():  # only a copy for a process of this run shares the cache
            options = replace(options, memory_key="")
        return self.dataset, self.key, options, self.__samples

    def __setstate__(self, state: Any) -> None:
        dataset, key, options, self.__samples = state
        vars(self).update(dataset=dataset, key=key)
        self.__options = options if options.memory_key else replace(options, memory_key=uuid.uuid4().hex)
        try:
            self.__open_stores()
        except (CacheError, OptionError) as error:
            where = "on disk " if self.__stores else ""
            logger.warning("%s is not cached %sin process %s: %s", options.label, where, os.getpid(), error)

    def __copy__(self) -> CachedDataset:
        """Return a dataset with attributes of its own and the same cache."""
        made = type(self).__new__(type(self))
        vars(made).update(vars(self), dataset=copy.copy(self.dataset))
        return made

    def __cached_sample(self, place: int) -> tuple[Any] | None:
        """Return a cached sample, in a tuple; None if the sample has to be prepared."""
        began = monotonic()
        memory, disk = (self.__stores.get(where) for where in ("memory", "disk"))
        found = None if memory is None else memory.get(place)
        if found is None and disk is not None:
            found = disk.get(place)
            if found is not None and memory is not None and not memory.why_full:
                memory.put(place, Encoded((found[0],), len(found[0])), found[1])
        if found is None:
            CACHE_USE.misses += 1
            return None
        try:
            kept, cost_s = decoded(found[0]), found[1] / 1e6
        except Exception as error:
            raise CacheError(
                f"sample {place} of {self.__options.label} cannot be read from its cache ({error}): a class in it has "
                "changed since; give another version="
            ) from error
        CACHE_USE.hits += 1
        CACHE_USE.saved_s += max(0.0, cost_s - (monotonic() - began))
        return (kept,)

    def __store_sample(self, place: int, sample: Any, cost_us: int) -> None:
        stores = {where: store for where, store in self.__stores.items() if not store.why_full}
        if not stores:
            return
        pieces = encoded(sample)
        for where, store in stores.items():
            if store.put(place, pieces, cost_us) or store.is_random:
                continue
            if store.is_first("full" if store.why_full else "left_out"):
                self.__warn_of_full_store(where, store, place, pieces.nbytes)

    def __warn_of_full_store(self, where: str, store: Store, place: int, nbytes: int) -> None:
        stored, label = store.stored(), self.__options.label
        goes_on = "read from disk" if where == "memory" and "disk" in self.__stores else "prepared each time"
        why = f"no more: {store.why_full}" if store.why_full else f"not sample {place}, of {nbytes:,} bytes"
        logger.warning(
            "the cache of %s in %s keeps %s of %s samples, in %s of %s bytes, and %s. All would take about %s bytes. "
            "Samples that it does not keep are %s",
            *(label, store.path, stored.kept, stored.samples, f"{stored.nbytes:,}", f"{stored.budget:,}"),
            *(why, f"{stored.nbytes * stored.samples // max(1, stored.kept):,}", goes_on),
        )

    # -- samples -------------------------------------------------------------------------------------------------------

    def __place(self, index: Any) -> int | None:
        """Return the number of a sample; None for an index that stands for no single sample of the cache."""
        try:
            number = whole_number(index)
        except TypeError:
            return None
        number += self.__samples if number < 0 else 0
        return number if 0 <= number < self.__samples else None

    def __prepared(self, places: Sequence[int], *, in_bulk: bool) -> list[Any]:
        """Prepare samples and keep them, unless one is random."""
        if self.__pid != os.getpid():
            self.__pid, self.__misses = os.getpid(), 0
        numbers = enumerate(places, self.__misses)
        due = [place for number, place in numbers if number < CHECKED_FIRST or number % CHECKED_EVERY == 0]
        self.__misses += len(places)
        differing: list[int] = []
        make = partial(load_samples, self.dataset, in_bulk=in_bulk)
        made, took_s, is_random = prepared(partial(make, places), self.dataset if due else None)
        if due and not is_random:
            again = zip(due, prepared_again(partial(make, due), self.dataset), strict=True)
            differing = [place for place, other in again if not is_same(made[places.index(place)], other)]
        if is_random or differing:
            self.__end_caching((differing or places)[0])
            return made
        cost_us = min(int(took_s / len(places) * 1e6), 2**32 - 1)
        for place, each in zip(places, made, strict=True):
            self.__store_sample(place, each, cost_us)
        return made

    def __end_caching(self, place: int) -> None:
        """Raise CacheError for a random sample or, under ``on_random="skip"``, end the caching."""
        label, remedy = self.__options.label, "put the random part into a dataset around the cached one"
        if self.__options.on_random == "raise":
            raise CacheError(
                f"sample {place} of {label} is random, so it cannot be cached: {remedy}, or on_random='skip'"
            )
        first = {where: store.is_first("is_random") for where, store in self.__stores.items()}
        if any(first.values()):
            logger.warning("%s is not cached, as its sample %s is random: %s", label, place, remedy)
        if first.get("disk"):
            self.__stores["disk"].set_aside()

    def stop_caching(self) -> None:
        """Neither read from the cache nor keep samples in it, in this process."""
        self.__stores = {}

"""A `DpexDataLoader` behind a loader of torch's class: it has that loader's attributes and makes its iterators.

Such a proxy is made when the loader is first iterated, kept as long as the loader lives, and takes over what was
changed each time an iterator is asked for. Used by whichever thread iterates. A loader gets one in three ways: by
``dpex run``, by `dpex.serve`, or because a framework built it from a `DpexDataLoader`.

Accelerate and Ray Train build a plain `torch.utils.data.DataLoader` from the attributes of another loader, and
Lightning calls the loader's own class again. `remember` notes each `DpexDataLoader` in a table by dataset. A loader was
made from a noted one if it has, or wraps, the same dataset, and has the same object as ``timeout``. Frameworks copy
that attribute, and each loader of dpex's has a float of its own there.

The table keeps no dataset and no loader alive. A note outlives its loader, as scripts write ``loader =
accelerator.prepare(loader)``. It goes with the dataset, or with the last loader that has this ``timeout`` if the
dataset, such as a list, cannot be referred to weakly.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe, get_worker_info

from dpex.loader import hook
from dpex.loader.sizing import TORCH_PREFETCH_FACTOR, Streams
from dpex.schedule.names import attribute
from dpex.system.user_warnings import warn

if TYPE_CHECKING:
    from dpex._torch import BaseDataLoaderIter
    from dpex.dataloader import DpexDataLoader
    from dpex.loader.runtime import LoaderRuntime

_CONTEXT = "_DataLoader__multiprocessing_context"
TAKEN_OVER = (
    *("dataset", "batch_size", "sampler", "batch_sampler", "drop_last", "collate_fn", "pin_memory", "timeout"),
    *("pin_memory_device", "worker_init_fn", "generator", "in_order", "_dataset_kind", "_IterableDataset_len_called"),
)
OF_WORKERS = ("persistent_workers", _CONTEXT)
"""Attributes that only a loader with workers has."""
_PRIVATE = ("_auto_collation", "_index_sampler", "multiprocessing_context")
"""Private attributes of a loader that torch's iterators read; dpex's would not see those of a subclass."""


class _Known:
    """The proxy of a loader, and what it was made for; `_GIVEN`: it was given to the loader from outside."""

    def __init__(self, loader: DataLoader[Any], proxy: DpexDataLoader[Any], made_for: object) -> None:
        forget = functools.partial(_known.pop, id(loader), None)
        self.reference = weakref.ref(loader, lambda _: forget())
        self.proxy, self.made_for = proxy, made_for


_GIVEN = object()
_known: dict[int, _Known] = {}
_inherited: list[_Known] = []


def _leave_to_parent() -> None:
    """Forget the parent's proxies in a forked process, without ending them: the parent may use them."""
    _inherited.extend(_known.values())
    _known.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def is_piped(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, (IterDataPipe, MapDataPipe))


def why_not(loader: DataLoader[Any]) -> str | None:
    """Return in words why dpex cannot serve a loader; None: it can."""
    if is_piped(loader):
        return "DataPipes are left to it"
    own = [name for name in _PRIVATE if getattr(type(loader), name, None) is not getattr(DataLoader, name)]
    if own:
        return f"its class defines {', '.join(own)}"
    context = loader.multiprocessing_context
    if context is not None and not type(context).__module__.startswith("multiprocessing."):
        return f"it has a multiprocessing context of another library, {context!r}"
    return None


def proxy_of(loader: DataLoader[Any], made_for: object, make: Callable[[], DpexDataLoader[Any]]) -> DpexDataLoader[Any]:
    """Return the loader's proxy, with the loader's attributes as they are now.

    A new proxy is made if the loader has none, or one that was made for something else.
    """
    known = _known.get(id(loader))
    if known is None or known.made_for != made_for:
        known = _known[id(loader)] = _Known(loader, make(), made_for)
    _take_over(known.proxy, loader)
    return known.proxy


def give_proxy(loader: DataLoader[Any], proxy: DpexDataLoader[Any]) -> None:
    """Have this proxy make the loader's iterators from now on."""
    _known[id(loader)] = _Known(loader, proxy, _GIVEN)


def given_proxy(loader: DataLoader[Any]) -> DpexDataLoader[Any] | None:
    """Return the proxy that the loader was given, with the loader's attributes as they are now; else None."""
    known = _known.get(id(loader))
    if known is None or known.made_for is not _GIVEN:
        return None
    _take_over(known.proxy, loader)
    return known.proxy


def known_proxy(loader: DataLoader[Any]) -> DpexDataLoader[Any] | None:
    """Return the loader's proxy if it has one already, else None."""
    known = _known.get(id(loader))
    return None if known is None else known.proxy


def describe(loader: Any) -> str:
    """Return a loader in words, such as "a DataLoader of a TensorDataset"."""
    if loader.dataset is loader:  # fastai hands torch's iterators a stand-in of its loader
        loader = getattr(loader, "d", loader)
    package = type(loader).__module__.partition(".")[0]
    whose = "" if package in ("torch", "__main__") else f" ({package})"
    return f"{_a(type(loader).__name__)}{whose} of {_a(type(loader.dataset).__name__)}"


def _a(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"


def _take_over(proxy: DpexDataLoader[Any], loader: DataLoader[Any]) -> None:
    names = TAKEN_OVER + (OF_WORKERS if loader.num_workers else ())
    vars(proxy).update({name: getattr(loader, name) for name in names if hasattr(loader, name)})


# -- loaders that a framework built from one of dpex's -----------------------------------------------------------------

_TORCHS_MODULE = "torch.utils.data.dataloader"
_OWN = {*TAKEN_OVER, "_iterator", "_begun", "_runtime", "_source"} - {"in_order"}
"""Attributes of a loader that are no settings: its data, and what it has while it is used."""
_RESIZED = ("_settings", "_pins")
"""Settings that `resize` of the user's loader changes in its proxies, too."""
_MOST = 16
"""Notes per dataset. A loader that is made anew for each epoch leaves one each time."""


class Source:
    """The note of a `DpexDataLoader`: what loaders that are made from it are to have.

    settings: the loader's attributes without its data, kept up to date as long as it lives.
    """

    def __init__(self, loader: DpexDataLoader[Any], loader_class: type[DpexDataLoader[Any]]) -> None:
        self.loader_class = loader_class
        dataset, attributes = loader.dataset, vars(loader).items()
        self.settings: dict[str, Any] = {
            name: value for name, value in attributes if name not in _OWN and value is not dataset
        }
        self._loader = weakref.ref(loader)
        self._timeout: Any = None
        self._note: Any = None
        self._forget: Any = None
        self.mark(loader.timeout)

    def assign(self, name: str, value: Any) -> None:
        """An attribute of the loader was set."""
        if name in self.settings:
            self.settings[name] = value

    def mark(self, timeout: Any) -> None:
        """Recognise by this object the loaders that are made from now on. It is not kept alive."""
        try:
            self._timeout = weakref.ref(timeout, self._forget)
        except TypeError:  # of a kind that is no number of `own_number`
            self._timeout = lambda: timeout

    def is_marked_by(self, timeout: Any) -> bool:
        """Return True if a loader with this ``timeout`` was made from this one."""
        return timeout is not None and self._timeout() is timeout

    def is_auto_for(self, num_workers: int | str) -> bool:
        """Return True if a loader with ``num_workers`` is tuned as this one is. Another number was set on purpose."""
        return bool(self.settings["_is_auto"]) and num_workers == self.settings["num_workers"]

    @property
    def streams(self) -> Streams | None:
        """The reason for the number of workers of an iterable dataset under "auto"."""
        streams: Streams | None = self.settings["_streams"]
        return streams

    @property
    def runtime(self) -> LoaderRuntime | None:
        """The runtime of the user's own loader, whose object so shows decisions and figures of those made from it."""
        loader = self._loader()
        return None if loader is None else loader._runtime


_notes: dict[int, list[Source]] = {}


class _OwnNumber(float):
    """A number that can be referred to weakly."""


def own_number(timeout: Any) -> Any:
    """Return a float object of its own with this value; torch refuses values that are no numbers."""
    return _OwnNumber(timeout) if isinstance(timeout, (int, float)) else timeout


def remember(loader: DpexDataLoader[Any], loader_class: type[DpexDataLoader[Any]]) -> Source:
    """Note the loader, and have loaders that are made from it served from now on by ``loader_class``."""
    hook.install(sys.modules[_TORCHS_MODULE], hook.FIRST, _serve)
    source, dataset = Source(loader, loader_class), loader.dataset
    notes = _notes.setdefault(id(dataset), [])
    notes.append(source)
    del notes[:-_MOST]
    try:
        source._note = weakref.ref(dataset, _forgetting(id(dataset), None))
    except TypeError:  # such as a list: the note goes with the last loader that has this ``timeout``
        source._forget = _forgetting(id(dataset), source)
        source.mark(loader.timeout)
    return source


def _forgetting(key: int, source: Source | None) -> Any:
    """A callback that removes this note, or all notes of a dataset that has gone."""
    kept = None if source is None else weakref.ref(source)
    known = _notes  # held here: a dataset may go after the interpreter has cleared this module

    def forget(_: Any) -> None:
        notes = known.get(key, [])
        notes[:] = [] if kept is None else [one for one in notes if one is not kept()]
        if not notes:
            known.pop(key, None)

    return forget


def source_of(dataset: Any, timeout: Any) -> Source | None:
    """Return what a loader with this dataset and this ``timeout`` was made from; None: not from one of dpex's."""
    for known in (dataset, attribute(dataset, "dataset")):
        for source in _notes.get(id(known), ()):
            if source.is_marked_by(timeout):
                return source
    return None


def _serve(loader: DataLoader[Any], torchs: hook.TorchsMethod) -> BaseDataLoaderIter | None:
    """See `dpex.loader.hook.Server`: the proxy's iterator, for a plain loader that has one or was made from dpex's."""
    if get_worker_info() is not None:
        return None
    given, source = given_proxy(loader), _source_behind(loader)
    if given is not None:
        return given._get_iterator()
    if source is None:
        return None
    reason = why_not(loader)
    if reason is not None:
        if not is_piped(loader):  # dpex's own class leaves these to torch, too
            warn(
                f"PyTorch's own iterators serve {describe(loader)} that was made from a DpexDataLoader: {reason}. "
                "dpex's options do nothing there. To have them work, train with the DpexDataLoader itself"
            )
        return None
    proxy = _proxy(loader, source)
    return iter(proxy) if proxy.persistent_workers and not loader.persistent_workers else proxy._get_iterator()


def proxy_behind(loader: DataLoader[Any]) -> DpexDataLoader[Any] | None:
    """Return the proxy that a loader of torch's class has or will have when it is iterated; None: torch serves it."""
    proxy, source = known_proxy(loader), _source_behind(loader)
    if proxy is not None or source is None or not hook.asks(loader) or why_not(loader) is not None:
        return proxy
    return _proxy(loader, source)


def _source_behind(loader: DataLoader[Any]) -> Source | None:
    source = source_of(getattr(loader, "dataset", None), getattr(loader, "timeout", None))
    return None if source is None or isinstance(loader, source.loader_class) else source


def _proxy(loader: DataLoader[Any], source: Source) -> DpexDataLoader[Any]:
    """The proxy of a plain loader that was made from one of dpex's.

    Where the framework left torch's defaults for ``prefetch_factor``, ``in_order``, ``persistent_workers`` and
    ``multiprocessing_context``, which Ray Train does not copy, the source's count.
    """
    count, prefetch = int(loader.num_workers), loader.prefetch_factor
    made_for = (count, prefetch, id(source))
    proxy = proxy_of(loader, made_for, lambda: _new_proxy(source, count, prefetch))
    proxy.in_order = loader.in_order and source.settings["in_order"]
    if count:
        left_out = [name for name in OF_WORKERS if not getattr(proxy, name)]
        vars(proxy).update({name: source.settings[name] for name in left_out})
    if proxy._runtime is source.runtime:
        vars(proxy).update({name: source.settings[name] for name in _RESIZED})
    return proxy


def _new_proxy(source: Source, count: int, prefetch: int | None) -> DpexDataLoader[Any]:
    from dpex.loader.runtime import LoaderRuntime

    settings = {**source.settings, "_chosen": count, "_iterator": None}  # torch has warned of too many workers
    if count != settings["num_workers"]:
        settings |= {"num_workers": count, "_is_auto": False, "_settings": None, "_pins": {}}
    if not count:
        settings |= {"prefetch_factor": None, "persistent_workers": False}
    elif prefetch != TORCH_PREFETCH_FACTOR or settings["prefetch_factor"] is None:
        settings["prefetch_factor"] = TORCH_PREFETCH_FACTOR if prefetch == TORCH_PREFETCH_FACTOR else prefetch
    proxy = source.loader_class.__new__(source.loader_class)
    vars(proxy).update(settings, _runtime=source.runtime or LoaderRuntime(), _source=None)
    return proxy

"""Loaders that a framework built from a `DpexDataLoader` are served by dpex, with all the options of that one.

Accelerate and Ray Train build a plain `torch.utils.data.DataLoader` from the attributes of another loader, and
Lightning calls the loader's own class again. `remember` notes each `DpexDataLoader` in a table by dataset. A loader was
made from a noted one if it has, or wraps, the same dataset, and has the same object as ``timeout``. Frameworks copy
that attribute, and each loader of dpex's has a float of its own there. The proxy of such a loader makes its iterators
(`dpex.loader.proxies`).

The table keeps no dataset and no loader alive. A note outlives its loader, as scripts write ``loader =
accelerator.prepare(loader)``, and goes with the dataset.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from dpex.loader import hook
from dpex.loader.proxies import OF_WORKERS, TAKEN_OVER, describe, given_proxy, is_piped, known_proxy, proxy_of, why_not
from dpex.loader.sizing import TORCH_PREFETCH_FACTOR
from dpex.schedule.probing import attribute
from dpex.system.user_warnings import warn

if TYPE_CHECKING:
    from dpex.loader.runtime import LoaderRuntime
    from dpex.loader.stream_count import Streams

_TORCHS_MODULE = "torch.utils.data.dataloader"
_OWN = {*TAKEN_OVER, "_iterator", "_begun", "_runtime", "_source"} - {"timeout", "in_order"}
"""Attributes of a loader that are no settings: its data, and what it has while it is used."""
_RESIZED = ("_sizes", "_pins")
"""Settings that `resize` of the user's own loader changes while others are served."""
_MOST = 16
"""Notes per dataset. A loader that is made anew for each epoch leaves one each time."""


class Source:
    """The note of a `DpexDataLoader`: what loaders that are made from it are to have.

    settings: the loader's attributes without its data, kept up to date as long as it lives.
    """

    def __init__(self, loader: Any, loader_class: Any) -> None:
        self.loader_class = loader_class
        dataset, attributes = loader.dataset, vars(loader).items()
        self.settings = {name: value for name, value in attributes if name not in _OWN and value is not dataset}
        self._loader = weakref.ref(loader)
        self._note: Any = None

    def assign(self, name: str, value: Any) -> None:
        """An attribute of the loader was set."""
        if name in self.settings:
            self.settings[name] = value

    def is_auto_for(self, num_workers: int | str) -> bool:
        """Return True if a loader with ``num_workers`` is tuned as this one is. Another number was set on purpose."""
        return bool(self.settings["_is_auto"]) and num_workers == self.settings["num_workers"]

    @property
    def streams(self) -> Streams | None:
        """Why there are as many workers, for an iterable dataset under "auto"."""
        streams: Streams | None = self.settings["_streams"]
        return streams

    @property
    def runtime(self) -> LoaderRuntime | None:
        """The runtime of the user's own loader, whose object so shows decisions and figures of those made from it."""
        loader = self._loader()
        return None if loader is None else loader._runtime


_notes: dict[int, list[Source]] = {}


def own_number(timeout: Any) -> Any:
    """Return a float object of its own with this value; torch refuses values that are no numbers."""
    return timeout + 0.0 if isinstance(timeout, (int, float)) else timeout


def remember(loader: Any, loader_class: Any) -> Source:
    """Note the loader, and have loaders that are made from it served from now on by ``loader_class``."""
    hook.install(sys.modules[_TORCHS_MODULE], hook.FIRST, _serve)
    source, dataset = Source(loader, loader_class), loader.dataset
    notes = _notes.setdefault(id(dataset), [])
    notes.append(source)
    del notes[:-_MOST]
    try:
        source._note = weakref.ref(dataset, _forgetting(id(dataset), None))
    except TypeError:  # such as a list: the note goes with the loader
        source._note = weakref.ref(loader, _forgetting(id(dataset), source))
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
            if source.settings["timeout"] is timeout:
                return source
    return None


def _serve(loader: Any, torchs: hook.TorchsMethod) -> Any:
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


def proxy_behind(loader: Any) -> Any:
    """Return the proxy that a loader of torch's class has or will have when it is iterated; None: torch serves it."""
    proxy, source = known_proxy(loader), _source_behind(loader)
    if proxy is not None or source is None or not hook.asks(loader) or why_not(loader) is not None:
        return proxy
    return _proxy(loader, source)


def _source_behind(loader: Any) -> Source | None:
    source = source_of(getattr(loader, "dataset", None), getattr(loader, "timeout", None))
    return None if source is None or isinstance(loader, source.loader_class) else source


def _proxy(loader: Any, source: Source) -> Any:
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


def _new_proxy(source: Source, count: int, prefetch: int | None) -> Any:
    from dpex.loader.runtime import LoaderRuntime

    settings = {**source.settings, "_chosen": count, "_iterator": None}  # torch has warned of too many workers
    if count != settings["num_workers"]:
        settings |= {"num_workers": count, "_is_auto": False, "_sizes": None, "_pins": {}}
    if not count:
        settings |= {"prefetch_factor": None, "_prefetch_is_given": False, "persistent_workers": False}
    elif prefetch != TORCH_PREFETCH_FACTOR or settings["prefetch_factor"] is None:
        settings |= {"prefetch_factor": prefetch, "_prefetch_is_given": prefetch != TORCH_PREFETCH_FACTOR}
    proxy = source.loader_class.__new__(source.loader_class)
    vars(proxy).update(settings, _runtime=source.runtime or LoaderRuntime(), _source=None)
    return proxy

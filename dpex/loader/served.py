"""A `DpexDataLoader` behind a loader of torch's class: it has that loader's data and makes its iterators.

`dpex.serve` puts a `StandIn` in place of the loader's method ``_get_iterator``, which torch's ``__iter__`` calls. No
other loader changes. A wrapper that copies the loader's ``__dict__``, such as Ray Train's and Fabric's, iterates the
wrapped loader. ``dpex run`` keeps a `StandIn` in another attribute, because it replaces the method in torch's class.

Each iterator uses the loader's dataset, order and collate function at the time of ``iter()``. The options that control
how batches are made are fixed when the loader is served. A `StandIn` is used by whichever thread iterates.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe

from dpex.loader.base_loader import BaseLoader
from dpex.loader.sizing import LeftOut, given_prefetch
from dpex.loader.unused import count_as_used
from dpex.system.compiler import untraced

if TYPE_CHECKING:
    from dpex._torch import BaseDataLoaderIter

ON_DEMAND, BELOW_RUN = "_get_iterator", "_dpex_stand_in"
"""The attribute of a loader in which `dpex.serve` keeps a `StandIn`, and the attribute for ``dpex run``."""
OF_DATA = (
    *("dataset", "batch_size", "sampler", "batch_sampler", "drop_last", "collate_fn", "pin_memory", "timeout"),
    *("pin_memory_device", "worker_init_fn", "generator", "_dataset_kind", "_IterableDataset_len_called"),
)
OF_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context")
"""torch's options that a loader without workers may not have."""
_PRIVATE = ("_auto_collation", "_index_sampler", "multiprocessing_context")
"""Private attributes of a loader that torch's iterators read; dpex's iterators would not see a subclass's values."""


Behind = TypeVar("Behind", bound=BaseLoader[Any])


class StandIn(Generic[Behind]):
    """Makes a loader's iterators. It keeps the `DpexDataLoader` behind it alive, but not the loader itself.

    A shallow copy of the loader shares it; a deep copy and a pickle get torch's method back.

    made_for: The settings for which the `DpexDataLoader` was made. Other settings need a new `StandIn`.
    """

    def __init__(self, loader: DataLoader[Any], behind: Behind, made_for: object = None) -> None:
        count_as_used(behind)
        self._loader = weakref.ref(loader)
        self._behind = behind
        self.made_for: object = made_for

    def is_of(self, loader: DataLoader[Any]) -> bool:
        """Return False if ``loader`` has this stand-in only because it copied the attributes of the served loader."""
        return self._loader() is loader

    @property
    def behind(self) -> Behind:
        """The `DpexDataLoader`, after copying the loader's present `OF_DATA` to it."""
        loader = self._loader()
        if loader is not None:
            vars(self._behind).update({name: getattr(loader, name) for name in OF_DATA if hasattr(loader, name)})
        return self._behind

    @untraced
    def __call__(self) -> BaseDataLoaderIter:
        return iter(self.behind)

    def __reduce__(self) -> Any:
        return getattr, (self._loader(), "_get_iterator")


def stand_in_of(loader: Any) -> StandIn[Any] | None:
    """Return the stand-in that makes this loader's iterators. None: torch makes them, or the loader is of another
    kind."""
    attributes = getattr(loader, "__dict__", {})
    found = [attributes.get(name) for name in (ON_DEMAND, BELOW_RUN)]
    return next((one for one in found if isinstance(one, StandIn)), None)


def settings_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the torch options that determine how a loader makes batches. A prefetch that was not given is None."""
    found = {"in_order": getattr(loader, "in_order", True)}  # torch 2.6 and later
    if not loader.num_workers:
        return found
    found |= {name: getattr(loader, name) for name in OF_WORKERS}
    is_known = hasattr(loader, "_is_auto") and not isinstance(loader.prefetch_factor, LeftOut)
    return found if is_known else found | {"prefetch_factor": given_prefetch(loader.prefetch_factor)}


def why_not_served(loader: DataLoader[Any]) -> str | None:
    """Return in words why dpex cannot serve a loader; None: it can."""
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return "DataPipes are left to PyTorch"
    own = [name for name in _PRIVATE if getattr(type(loader), name, None) is not getattr(DataLoader, name)]
    if own:
        return f"its class defines {', '.join(own)}"
    context = loader.multiprocessing_context
    if context is not None and not type(context).__module__.startswith("multiprocessing."):
        return f"it has a multiprocessing context of another library, {context!r}"
    return None


def describe_loader(loader: Any) -> str:
    """Return a loader in words, such as "a DataLoader of a TensorDataset"."""
    if loader.dataset is loader:  # fastai passes a substitute to torch's iterators; `d` is its loader
        loader = getattr(loader, "d", loader)
    package = type(loader).__module__.partition(".")[0]
    whose = "" if package in ("torch", "__main__") else f" ({package})"
    return f"{_with_article(type(loader).__name__)}{whose} of {_with_article(type(loader.dataset).__name__)}"


def _with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"

"""A `DpexDataLoader` behind a loader of torch's class: it has that loader's attributes and makes its iterators.

It is made when the loader is first iterated, kept as long as the loader lives, and takes over what was changed each
time an iterator is asked for. Used by whichever thread iterates.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe

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
    """The proxy of a loader, what it was made for, and whether it was given to the loader from outside."""

    def __init__(self, loader: Any, proxy: Any, made_for: object = None, *, is_given: bool = False) -> None:
        forget = functools.partial(_known.pop, id(loader), None)
        self.reference = weakref.ref(loader, lambda _: forget())
        self.proxy, self.made_for, self.is_given = proxy, made_for, is_given


_known: dict[int, _Known] = {}
_inherited: list[_Known] = []


def _leave_to_parent() -> None:
    """In a forked process: its loaders get proxies of their own; ending the parent's here might end what it uses."""
    _inherited.extend(_known.values())
    _known.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def is_piped(loader: Any) -> bool:
    """Return True if the loader's dataset is a DataPipe."""
    return isinstance(loader.dataset, (IterDataPipe, MapDataPipe))


def why_not(loader: Any) -> str | None:
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


def proxy_of(loader: Any, made_for: object, make: Callable[[], Any]) -> Any:
    """Return the loader's proxy, with the loader's attributes as they are now.

    A new proxy is made if the loader has none, or one that was made for something else.
    """
    known = _known.get(id(loader))
    if known is None or known.made_for != made_for:
        known = _known[id(loader)] = _Known(loader, make(), made_for)
    _take_over(known.proxy, loader)
    return known.proxy


def give_proxy(loader: Any, proxy: Any) -> None:
    """Have this proxy make the loader's iterators from now on."""
    _known[id(loader)] = _Known(loader, proxy, is_given=True)


def given_proxy(loader: Any) -> Any:
    """Return the proxy that the loader was given, with the loader's attributes as they are now; else None."""
    known = _known.get(id(loader))
    if known is None or not known.is_given:
        return None
    _take_over(known.proxy, loader)
    return known.proxy


def known_proxy(loader: Any) -> Any:
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


def _take_over(proxy: Any, loader: Any) -> None:
    names = TAKEN_OVER + (OF_WORKERS if loader.num_workers else ())
    vars(proxy).update({name: getattr(loader, name) for name in names if hasattr(loader, name)})

"""The two places at which torch's loaders come to dpex: where a loader makes an iterator, and where one is made.

`DataLoader._get_iterator` first asks those who may serve a loader; nobody: torch does. The constructor of torch's
iterators tells of each iterator, so that loaders that make one without asking are noticed. Nothing is replaced before
`install` is called, and this module imports no torch, as ``dpex run`` installs itself before torch is there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

_ITERATOR_CLASS = "_BaseDataLoaderIter"
_METHOD = "_get_iterator"
_MARK = "_dpex_asks_servers"
TorchsMethod = Callable[[Any], Any]


class IteratorServer(Protocol):
    """Who may serve loaders."""

    def serve(self, loader: Any, torchs: TorchsMethod) -> Any:
        """An iterator over the loader, or None; ``torchs`` is torch's own method."""

    def witness(self, iterator: Any, loader: Any) -> None:
        """An iterator is being made, whoever makes it."""


_servers: dict[int, IteratorServer] = {}
FIRST, SECOND = 0, 1
"""Places in which servers are asked: first for loaders that come from dpex's, then by `dpex run`."""


def install(module: ModuleType, place: int, server: IteratorServer) -> None:
    """Have this server asked from now on; ``module`` is torch's that defines the loader. It replaces one in its place.

    Idempotent: torch's methods are replaced once.
    """
    _servers[place] = server
    loader_class: Any = module.DataLoader
    if not hasattr(getattr(loader_class, _METHOD), _MARK):
        _replace_methods(loader_class, getattr(module, _ITERATOR_CLASS))


def remove(place: int) -> None:
    """Have nobody asked in that place any more."""
    _servers.pop(place, None)


def _in_turn() -> list[IteratorServer]:
    return [server for _, server in sorted(_servers.items())]


def _replace_methods(loader_class: Any, iterator_class: Any) -> None:
    torchs_method, torchs_init = getattr(loader_class, _METHOD), iterator_class.__init__

    @functools.wraps(torchs_method)
    def _get_iterator(self: Any) -> Any:
        for server in _in_turn():
            iterator = server.serve(self, torchs_method)
            if iterator is not None:
                return iterator
        return torchs_method(self)

    @functools.wraps(torchs_init)
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        torchs_init(self, loader, *args, **kwargs)
        for server in _in_turn():
            server.witness(self, loader)

    setattr(_get_iterator, _MARK, True)
    setattr(loader_class, _METHOD, _get_iterator)
    iterator_class.__init__ = __init__


def asks(loader: Any) -> bool:
    """Whether the servers are asked when this loader makes an iterator."""
    return hasattr(getattr(type(loader), _METHOD, None), _MARK)

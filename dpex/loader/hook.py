"""The one place at which torch's loaders come to dpex: `DataLoader._get_iterator`. Apart, as it must not import torch.

`dpex run` installs itself before torch is imported. The method is replaced at the first `install`, once in a process,
and asks the servers in turn. If none returns an iterator, torch makes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

FIRST, SECOND = 0, 1
"""Places in which servers are asked: first for loaders that were made from one of dpex's, then for `dpex run`."""
_METHOD = "_get_iterator"
_MARK = "_dpex_asks_servers"
TorchsMethod = Callable[[Any], Any]
Server = Callable[[Any, TorchsMethod], Any]
"""Takes a loader and torch's own method; returns an iterator over the loader, or None."""
_servers: dict[int, Server] = {}
observers: dict[int, Callable[[Any], None]] = {}
"""Called with each `DpexDataLoader` that makes an iterator: `dpex run` reports on it at the end."""


def install(module: ModuleType, place: int, server: Server) -> None:
    """Ask this server from now on, in place of the one that was there. ``module`` is torch's that defines the loader.

    Idempotent: torch's method is replaced once.
    """
    _servers[place] = server
    loader_class: Any = module.DataLoader
    torchs = getattr(loader_class, _METHOD)
    if hasattr(torchs, _MARK):
        return

    from dpex.system.compiler import untraced

    @untraced
    @functools.wraps(torchs)
    def _get_iterator(self: Any) -> Any:
        for _, server in sorted(_servers.items()):
            iterator = server(self, torchs)
            if iterator is not None:
                return iterator
        return torchs(self)

    setattr(_get_iterator, _MARK, True)
    setattr(loader_class, _METHOD, _get_iterator)


def remove(place: int) -> None:
    """Ask no server and no observer in that place any more."""
    _servers.pop(place, None)
    observers.pop(place, None)


def asks(loader: Any) -> bool:
    """Return True if the servers are asked when this loader makes an iterator."""
    return hasattr(getattr(type(loader), _METHOD, None), _MARK)

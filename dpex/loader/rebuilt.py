"""Loaders that a framework built from a `DpexDataLoader` are served by dpex, with all the options of that one.

Accelerate, the Hugging Face Trainer and Ray Train build a plain `torch.utils.data.DataLoader` from the attributes of
another loader. Such a loader has the other's `Origin`, and where torch's class makes an iterator, the loader's proxy
does (`dpex.loader.proxies`). Where a class makes iterators itself, a warning says that dpex's options do nothing, and
what to do. Nothing is replaced in torch before there is a loader of dpex's.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch.utils.data import get_worker_info

from dpex.loader import torch_hooks
from dpex.loader.origin import Origin, carrying, origin_of_loader
from dpex.loader.proxies import describe, is_piped, known_proxy, proxy_of, why_not
from dpex.loader.sizing import TORCH_PREFETCH_FACTOR
from dpex.system.user_warnings import warn

_TORCHS_MODULE = "torch.utils.data.dataloader"
_REMEDIES = {
    "torchdata": "leave out use_stateful_dataloader=True where Accelerate made it, or train with the DpexDataLoader "
    "itself",
}
"""What is to be done where a class of that package makes iterators itself."""
_RESIZED = ("_sizes", "_pins")
"""What `resize` of the user's own loader has changed."""
_REMEDY = "train with the DpexDataLoader itself"


class _Rebuilt:
    """Serves the loaders that have an origin; see `dpex.loader.torch_hooks`."""

    def __init__(self) -> None:
        self._told: set[type] = set()

    def serve(self, loader: Any, torchs: torch_hooks.TorchsMethod) -> Any:
        """The proxy's iterator, for a plain loader that was made from one of dpex's."""
        origin = _origin_behind(loader)
        if origin is None or get_worker_info() is not None:
            return None
        reason = why_not(loader)
        if reason is not None:
            if not is_piped(loader):  # dpex's own class leaves these to torch, too
                self._warn(loader, reason)
            return None
        return rebuilt_proxy(loader, origin)._get_iterator()

    def witness(self, iterator: Any, loader: Any) -> None:
        """Warn of a loader that has an origin and makes torch's iterators itself."""
        if torch_hooks.asks(loader) or get_worker_info() is not None:
            return
        if _origin_behind(loader) is not None:
            self._warn(loader, "its class makes them itself")

    def _warn(self, loader: Any, reason: str) -> None:
        if type(loader) in self._told:
            return
        self._told.add(type(loader))
        remedy = _REMEDIES.get(type(loader).__module__.partition(".")[0], _REMEDY)
        warn(
            f"PyTorch's own iterators serve {describe(loader)} that was made from a DpexDataLoader: {reason}. Its "
            f"workers (num_workers={int(loader.num_workers)}) are PyTorch's, and dpex's options do nothing there. To "
            f"have them work, {remedy}"
        )


_rebuilt = _Rebuilt()


def recognise() -> None:
    """Have loaders that are made from dpex's recognised from now on. Idempotent."""
    torch_hooks.install(sys.modules[_TORCHS_MODULE], torch_hooks.FIRST, _rebuilt)


def proxy_behind(loader: Any) -> Any:
    """What serves a loader of torch's class, or will when it is iterated; None: dpex does not."""
    proxy, origin = known_proxy(loader), _origin_behind(loader)
    if proxy is not None or origin is None or not torch_hooks.asks(loader) or why_not(loader) is not None:
        return proxy
    return rebuilt_proxy(loader, origin)


def rebuilt_proxy(loader: Any, origin: Origin) -> Any:
    """The proxy of a plain loader that was made from one of dpex's.

    Where the framework left torch's defaults for ``prefetch_factor`` and ``in_order``, which Ray Train does not copy,
    those of the origin count.
    """
    count, prefetch = int(loader.num_workers), loader.prefetch_factor
    if count and prefetch == TORCH_PREFETCH_FACTOR and origin.prefetch_factor is not None:
        prefetch = origin.prefetch_factor
    made_for = (count, prefetch, id(origin), origin.is_auto)
    proxy = proxy_of(loader, made_for, functools.partial(_new_proxy, loader, count, prefetch, origin))
    proxy.in_order = proxy.in_order and origin.in_order
    source = origin.loader
    if source is not None and source._runtime is proxy._runtime:
        vars(proxy).update({name: vars(source)[name] for name in _RESIZED})
    return proxy


def _new_proxy(loader: Any, count: int, prefetch: int | None, origin: Origin) -> Any:
    proxy = origin.loader_class(
        loader.dataset, num_workers=count, timeout=carrying(0, origin), prefetch_factor=prefetch if count else None
    )
    proxy._chosen = proxy.num_workers  # torch has warned of too many, where the plain loader was made
    return proxy


def _origin_behind(loader: Any) -> Origin | None:
    origin = origin_of_loader(loader)
    return None if origin is None or isinstance(loader, origin.loader_class) else origin

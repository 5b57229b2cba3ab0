"""From the loaders of a framework to dpex: have them served, and find what serves them."""

from __future__ import annotations

from typing import Any, Literal

from torch.utils.data import DataLoader

from dpex.dataloader import DpexDataLoader
from dpex.errors import OptionError
from dpex.loader.proxies import give_proxy, why_not
from dpex.loader.rebuilt import proxy_behind

_INSIDE = ("base_dataloader", "_dataloader")
"""Attributes in which frameworks keep the loader that they wrap: Accelerate's; Fabric's and Ray Train's."""
_MOST_WRAPPERS = 8
"""Loaders within loaders that are looked through; more are a loader that contains itself."""


def serve(loader: Any, num_workers: int | Literal["auto"] = "auto", **options: Any) -> DpexDataLoader[Any]:
    """Have dpex make the batches of a loader of PyTorch's class, from its next ``iter()`` on.

    It is for frameworks that make the loader themselves, such as the Hugging Face `Trainer`.

    Args:
        loader: A `torch.utils.data.DataLoader`, or what Accelerate or Fabric has wrapped around one.
        num_workers: The number of workers in place of the loader's; ``"auto"``: as many as pay, found and changed while
            training runs.
        options: Options of `DpexDataLoader` beyond PyTorch's arguments, by name.

    Returns:
        The `DpexDataLoader` behind the loader, which shows what it does.

    Raises:
        OptionError: An option has a value that makes no sense, or dpex cannot serve this loader.
        TypeError: There is no such option.

    Examples:
        >>> import dpex
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(6), batch_size=3)
        >>> behind = dpex.serve(loader, num_workers="auto", name="train")
        >>> [batch.tolist() for batch in loader]
        [[0, 1, 2], [3, 4, 5]]
        >>> behind.stats().batches
        2
    """
    inner = _innermost(loader)
    if isinstance(inner, DpexDataLoader):
        return inner
    makes_its_own = getattr(type(inner), "_get_iterator", None) is not DataLoader._get_iterator
    reason = "its class makes iterators itself" if makes_its_own else why_not(inner)
    if reason is not None:
        raise OptionError(f"serve({loader!r}): dpex cannot make its batches: {reason}. Train with a DpexDataLoader")
    proxy: DpexDataLoader[Any] = DpexDataLoader(inner.dataset, num_workers=num_workers, **options)
    give_proxy(inner, proxy)
    return proxy


def loader_behind(loader: Any) -> DpexDataLoader[Any] | None:
    """Return the `DpexDataLoader` that makes the batches of a framework's loader; None if none does.

    Args:
        loader: A loader that Accelerate, Fabric, Lightning, Ray Train or the Hugging Face `Trainer` has made, one of
            PyTorch's own class below ``dpex run``, or a `DpexDataLoader`, which is returned as it is.

    Returns:
        The loader whose ``decisions``, ``stats()``, ``diagnose()``, ``resize()`` and ``close()`` are about it.

    Examples:
        >>> from dpex import DpexDataLoader, loader_behind
        >>> loader = DpexDataLoader(range(6), num_workers=1)
        >>> loader_behind(loader) is loader
        True
    """
    inner = _innermost(loader)
    proxy: DpexDataLoader[Any] | None = inner if isinstance(inner, DpexDataLoader) else proxy_behind(inner)
    return proxy


def _innermost(loader: Any) -> Any:
    """The loader within a framework's wrappers."""
    for _ in range(_MOST_WRAPPERS):
        attributes = {} if isinstance(loader, DpexDataLoader) else getattr(loader, "__dict__", {})
        inside = [attributes[name] for name in _INSIDE if name in attributes]
        if not inside:
            break
        loader = inside[0]
    return loader

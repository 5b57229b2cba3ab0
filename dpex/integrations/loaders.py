"""From the loaders of a framework to dpex: have them served, and find what serves them."""

from __future__ import annotations

from typing import Any, Literal

from dpex.dataloader import DpexDataLoader
from dpex.device.arguments import parse
from dpex.errors import OptionError
from dpex.loader.origin import DEFAULTS, OPTION_NAMES, Origin, carrying
from dpex.loader.rebuilt import proxy_behind, recognise
from dpex.loader.sizing import worker_count
from dpex.options import complete

_INSIDE = ("base_dataloader", "_dataloader")
"""Attributes in which frameworks keep the loader that they wrap: Accelerate's; Fabric's and Ray Train's."""
_MOST_WRAPPERS = 8
"""Loaders within loaders that are looked through; more are a loader that contains itself."""


def num_workers(count: int | Literal["auto"] = "auto", **options: Any) -> int:
    """Return a number of workers that has any loader of PyTorch's class that is made with it served by dpex.

    It is for frameworks that make the loader themselves and take no more than a number, such as the Hugging Face
    `Trainer`. The number is an `int` with dpex's options; where a framework copies it, they go along.

    Args:
        count: The number of workers; ``"auto"``: as many as pay, found and changed while training runs.
        options: Options of `DpexDataLoader` beyond PyTorch's arguments, by name.

    Returns:
        The number; for ``"auto"``, one that this machine can have.

    Raises:
        OptionError: An option has a value that makes no sense. It is a ValueError.
        OptionError: There is no such option.

    Examples:
        >>> import dpex
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(6), batch_size=3, num_workers=dpex.num_workers("auto", name="train"))
        >>> [batch.tolist() for batch in loader]
        [[0, 1, 2], [3, 4, 5]]
        >>> dpex.loader_behind(loader).stats().batches
        2
    """
    unknown = sorted(options.keys() - set(OPTION_NAMES))
    if unknown:
        raise OptionError(f"num_workers() has no option {unknown[0]!r}: give one of {', '.join(OPTION_NAMES)}")
    given = {**DEFAULTS, **options}
    kept = {**vars(complete(given, is_auto=count == "auto")), "device": parse(given["device"])}
    workers = worker_count(count)
    recognise()
    number: int = carrying(workers, Origin(DpexDataLoader, kept, workers=workers, is_auto=count == "auto"))
    return number


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
    for _ in range(_MOST_WRAPPERS):
        if isinstance(loader, DpexDataLoader):
            return loader
        attributes = getattr(loader, "__dict__", {})
        inside = [attributes[name] for name in _INSIDE if name in attributes]
        if not inside:
            break
        loader = inside[0]
    proxy: DpexDataLoader[Any] | None = proxy_behind(loader)
    return proxy

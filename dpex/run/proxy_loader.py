"""A `DpexDataLoader` behind each of torch's loaders: it has the loader's attributes and makes its iterators.

It is made when the loader is first iterated, kept as long as the loader lives, and takes over what the script has
changed each time an iterator is asked for. A loader that dpex cannot stand in for is left to torch, and a line says
why. Used by whichever thread iterates.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from dpex._torch import DatasetKind
from dpex.dataloader import DpexDataLoader
from dpex.loader.proxies import describe, proxy_of, why_not
from dpex.run.closing import note
from dpex.run.options import Count, RunOptions
from dpex.system.cpus import rank


class ProxyLoader(DpexDataLoader[Any]):
    """Makes another loader's iterators."""

    def check_worker_number_rationality(self) -> None:
        """Do nothing: torch has warned of the loader itself."""


_said: set[str] = set()


def iterator(loader: Any, torchs: Callable[[Any], Any], options: RunOptions) -> Any:
    """Return an iterator over a loader of the script; ``torchs`` is torch's own method.

    Raises:
        OptionError: an option of ``dpex run`` that cannot be had.
    """
    if isinstance(loader, DpexDataLoader) or get_worker_info() is not None:
        return torchs(loader)
    reason = why_not(loader)
    if reason is not None:
        _say(f"dpex {options.command}: PyTorch's own iterators serve {describe(loader)}: {reason}")
        return torchs(loader)
    proxy = stand_in(loader, options)
    made = proxy._get_iterator()
    note(loader, proxy, options)
    return made


def observe(loader: Any, options: RunOptions) -> None:
    """Have the report be about a `DpexDataLoader` of the script, too, which keeps its own settings."""
    if not isinstance(loader, ProxyLoader) and get_worker_info() is None:
        note(loader, loader, options)


def stand_in(loader: Any, options: RunOptions) -> ProxyLoader:
    """Return the loader's proxy, with the loader's attributes as they are now."""
    given = int(loader.num_workers)
    iterable = loader._dataset_kind == DatasetKind.Iterable
    workers = options.workers(given, iterable=iterable)
    made_for = (workers, loader.prefetch_factor, options)

    def make() -> ProxyLoader:
        if not given and not workers and options.num_workers != "keep" and not iterable:
            _hint(loader)
        return _new(loader, given, workers, options)

    proxy: ProxyLoader = proxy_of(loader, made_for, make)
    return proxy


def _new(loader: Any, given: int, workers: Count, options: RunOptions) -> ProxyLoader:
    proxy = ProxyLoader(
        loader.dataset,
        num_workers=workers,
        prefetch_factor=loader.prefetch_factor if given and workers else None,
        **options.loader_options(workers),
    )
    proxy._runtime.is_diagnosed = True  # batches made in the training process are counted, too
    return proxy


def _hint(loader: Any) -> None:
    if rank(os.environ) == 0:
        _say(
            f"dpex run: {describe(loader)} has num_workers=0 and stays in the training process; "
            "--also-in-process gives it workers"
        )


def _say(text: str) -> None:
    """Print a line to stderr, once in a process."""
    if text not in _said:
        _said.add(text)
        print(text, file=sys.stderr, flush=True)

"""A `DpexDataLoader` behind each of torch's loaders: it has the loader's attributes and makes its iterators.

It is made when the loader is first iterated, kept as long as the loader lives, and takes over what the script has
changed each time an iterator is asked for. A loader that dpex cannot stand in for is left to torch, and a line says
why. Used by whichever thread iterates.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe, get_worker_info
from torch.utils.data.dataloader import _DatasetKind

from dpex.autotune.runtime.recorder import rank
from dpex.dataloader import DpexDataLoader
from dpex.dropin.options import Count, RunOptions

logger = logging.getLogger("dpex")
_CONTEXT = "_DataLoader__multiprocessing_context"
_TAKEN_OVER = (
    *("dataset", "batch_size", "sampler", "batch_sampler", "drop_last", "collate_fn", "pin_memory", "timeout"),
    *("pin_memory_device", "worker_init_fn", "generator", "in_order", "_dataset_kind", "_IterableDataset_len_called"),
)
_OF_WORKERS = ("persistent_workers", _CONTEXT)
"""Attributes that only a loader with workers has."""
_PRIVATE = ("_auto_collation", "_index_sampler", "multiprocessing_context")
"""What torch's iterators ask of a loader; dpex's would not see a subclass's own."""


class StandIn(DpexDataLoader[Any]):
    """Makes another loader's iterators."""

    def check_worker_number_rationality(self) -> None:
        """torch has said it of the loader itself."""


class _Known:
    """The stand-in of a loader, and what it was made for."""

    def __init__(self, loader: Any, made_for: Any, stand_in: StandIn) -> None:
        forget = functools.partial(_known.pop, id(loader), None)
        self.reference = weakref.ref(loader, lambda _: forget())
        self.made_for = made_for
        self.stand_in = stand_in


_known: dict[int, _Known] = {}
_inherited: list[_Known] = []
_said: set[str] = set()


def _leave_to_parent() -> None:
    """In a forked process: its loaders get stand-ins of their own; ending the parent's here might end what it uses."""
    _inherited.extend(_known.values())
    _known.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def iterator(loader: Any, torchs: Callable[[Any], Any], options: RunOptions) -> Any:
    """What ``loader._get_iterator()`` returns below ``dpex run``; ``torchs`` is torch's own method.

    Raises:
        OptionError: an option of ``dpex run`` that cannot be had.
    """
    if isinstance(loader, DpexDataLoader) or get_worker_info() is not None:
        return torchs(loader)
    reason = why_not(loader)
    if reason is not None:
        _say(f"dpex run: PyTorch's own iterators serve {_name(loader)}: {reason}")
        return torchs(loader)
    return stand_in(loader, options)._get_iterator()


def why_not(loader: Any) -> str | None:
    """Why dpex cannot stand in for a loader, in words; None: it can."""
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return "DataPipes are left to it"
    own = [name for name in _PRIVATE if getattr(type(loader), name, None) is not getattr(DataLoader, name)]
    if own:
        return f"its class defines {', '.join(own)}"
    context = loader.multiprocessing_context
    if context is not None and not type(context).__module__.startswith("multiprocessing."):
        return f"it has a multiprocessing context of another library, {context!r}"
    return None


def stand_in(loader: Any, options: RunOptions) -> StandIn:
    """The loader's stand-in, with its attributes as they are now."""
    given = int(loader.num_workers)
    iterable = loader._dataset_kind == _DatasetKind.Iterable
    workers = options.workers(given, iterable=iterable)
    made_for = (workers, loader.prefetch_factor, options)
    known = _known.get(id(loader))
    if known is None or known.made_for != made_for:
        if not given and not workers and options.num_workers != "keep" and not iterable:
            _hint()
        known = _known[id(loader)] = _Known(loader, made_for, _new(loader, given, workers, options))
    _take_over(known.stand_in, loader)
    return known.stand_in


def _new(loader: Any, given: int, workers: Count, options: RunOptions) -> StandIn:
    return StandIn(
        loader.dataset,
        num_workers=workers,
        prefetch_factor=loader.prefetch_factor if given and workers else None,
        **options.loader_options(workers),
    )


def _take_over(stand_in: StandIn, loader: Any) -> None:
    names = _TAKEN_OVER + (_OF_WORKERS if loader.num_workers else ())
    vars(stand_in).update({name: getattr(loader, name) for name in names if hasattr(loader, name)})


def _hint() -> None:
    if rank(os.environ) == 0:
        _say(
            "dpex run: a DataLoader has num_workers=0 and stays in the training process; "
            "--also-in-process gives it workers"
        )


def _name(loader: Any) -> str:
    return f"a {type(loader).__name__} of a {type(loader.dataset).__name__}"


def _say(text: str) -> None:
    """One line on stderr, once in a process."""
    if text not in _said:
        _said.add(text)
        print(text, file=sys.stderr, flush=True)

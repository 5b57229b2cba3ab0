"""Warn of a `DpexDataLoader` whose dpex options had no effect, because it was never iterated.

Accelerate and Ray Train build a plain `DataLoader` from the user's loader, and lose dpex's options. The warning comes
once in a process, when such a loader is deleted, or at exit unless an exception ended the process.

A loader counts as used if it was iterated, copied, or given as ``like=`` to `dpex.serve`. It also counts as used if
another loader with its dataset and its options is made during its life, as Lightning and Fabric do.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
import weakref
from typing import TYPE_CHECKING, Any

from dpex.options import DEFAULTS
from dpex.system.compiler import untraced
from dpex.system.user_warnings import is_first, user_line

if TYPE_CHECKING:
    from dpex.loader.base_loader import BaseLoader

ABOUT = "loaders without one iter()"
"""The argument of `is_first` for this warning."""
_NO_OPTIONS = {**DEFAULTS, "seeding": "worker"}
_watched: dict[int, weakref.finalize[..., Any]] = {}
"""The finalizer that warns when a loader ends, by the loader's `id`."""


def warn_if_unused(loader: BaseLoader[Any]) -> None:
    """Warn when this loader is deleted before `count_as_used`. Loaders from which it was built count as used."""
    options = _options_of(loader)
    for other in [alive[0] for one in list(_watched.values()) if (alive := one.peek()) is not None]:
        if other.dataset is loader.dataset and _options_of(other) == options:
            count_as_used(other)
    if options == _NO_OPTIONS:
        return
    kind = type(loader.dataset).__name__
    ending = weakref.finalize(loader, _warn_of_unused, id(loader), os.getpid(), kind, *user_line())
    ending.atexit = False
    _watched[id(loader)] = ending
    if is_first("the exit is watched"):  # registered after `finalize`'s exit handler, so it runs before that
        atexit.register(_warn_of_all_unused)


def count_as_used(loader: BaseLoader[Any]) -> None:
    """Have this loader end without a warning."""
    ending = _watched.pop(id(loader), None)
    if ending is not None:
        ending.detach()


def _options_of(loader: BaseLoader[Any]) -> dict[str, Any]:
    return {name: getattr(loader, name) for name in DEFAULTS}


@untraced
def _warn_of_unused(key: int, pid: int, kind: str, file: str, line: int) -> None:
    _watched.pop(key, None)
    if pid == os.getpid() and is_first(ABOUT):
        text = (
            f"a DpexDataLoader of a {kind} ended without one iter(), so its options did nothing. If a framework built "
            "another loader from it, call dpex.serve(that_loader, like=this_one) before that loader is iterated"
        )
        warnings.warn_explicit(text, UserWarning, file, line)


def _warn_of_all_unused() -> None:
    if not hasattr(sys, "last_value"):  # print nothing after the traceback of an exception
        for ending in list(_watched.values()):
            ending()

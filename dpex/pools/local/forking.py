"""Fork a process that `multiprocessing` takes for one of its own, and tie its end to its parent's.

A worker is forked by a template, but belongs to the trainer (`Kinship`). A dataset that picks a port or a GPU by
``current_process()._identity[0]``, or watches ``parent_process()``, must find the values that it finds in torch's
workers: numbers that the trainer counts, and the trainer. ``os.getppid()`` is the kernel's, and stays the template.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import process, util
from typing import Any, NamedTuple

_PR_SET_PDEATHSIG = 1
"""An option of `prctl`: the signal that this process gets when its parent ends (linux/prctl.h)."""


class Kinship(NamedTuple):
    """``name`` and ``identity`` of a process, and name and pid of its parent, as `multiprocessing` has them.

    ``start_method``: of the processes that it starts itself; None: as in the process that it is forked from.
    """

    name: str
    identity: tuple[int, ...]
    parent: str
    parent_pid: int
    start_method: str | None = None


class Names:
    """Gives the next workers of this process the names that torch's would have; ``kind``: the class of theirs."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def next(self) -> Kinship:
        """Return the kinship of a further worker."""
        here: Any = multiprocessing.current_process()
        identity = (*here._identity, next(process._process_counter))  # type: ignore[attr-defined]
        name = f"{self._kind.__name__}-{':'.join(map(str, identity))}"
        return Kinship(name, identity, here.name, os.getpid(), self._kind._start_method)


def helper(name: str) -> Kinship:
    """Return the kinship of a process that helps this one, and takes no number among its children."""
    here: Any = multiprocessing.current_process()
    return Kinship(name, here._identity, here.name, os.getpid())


def fork_process(body: Callable[[], object], kinship: Kinship, sentinel: int | None = None) -> int:
    """Fork a process that calls ``body`` and ends; return its pid.

    Args:
        body: The function. Its traceback goes to stderr, and the exit code is 1 then.
        kinship: Of the new process.
        sentinel: A descriptor that is readable once its parent has ended.

    Raises:
        OSError: The system has no room for a process.
    """
    util._flush_std_streams()  # type: ignore[attr-defined]
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        child: Any = multiprocessing.Process(target=body, name=kinship.name, daemon=True)
        child._identity, child._parent_name, child._parent_pid = kinship.identity, kinship.parent, kinship.parent_pid
        child._start_method = kinship.start_method
        code = child._bootstrap(parent_sentinel=sentinel)
    finally:
        os._exit(code)


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL for this process when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)

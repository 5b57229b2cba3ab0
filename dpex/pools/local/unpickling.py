"""Unpickle the plan of workers once, in a process that then forks them, instead of once in each worker.

A worker that is not forked from the training process unpickles the dataset, and so has objects, threads and open files
of its own. For a large dataset that is a copy, and seconds of work, per worker. So where the pickle is large, the fork
server forks a process that unpickles it and takes over as the fork server. Workers then share what it has. That must
not be noticed: if unpickling starts a thread or a process, opens a file or uses a GPU, or if a class of the user's has
a ``__setstate__``, which may do what each worker needs for itself, the process ends and each worker unpickles.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn

import torch

from dpex.pools.local import forking
from dpex.pools.local.fork_server import Prepared, in_common
from dpex.pools.local.worker_process import WorkerPlan

LEAST_BYTES = 1 << 22
"""Bytes of a pickle from which it is unpickled once. Unpickling takes some 10 ms then: workers differ by as much."""
_UNFIT = 77
"""The exit code of a process that found out that each worker must unpickle."""
_LIBRARIES = frozenset(("dpex", "numpy", "pandas", "pyarrow", "datasets", "torch", "PIL"))
"""Packages whose ``__setstate__`` only restores the object."""
_TOO_SMALL = "each worker unpickles the dataset, whose pickle of {kib:,} KiB is too small to gain from sharing it"
_HAS_EFFECTS = (
    "each worker unpickles the dataset, as unpickling it does more than make objects: it fails, starts a thread or a "
    "process, opens a file, uses a GPU or calls a __setstate__ of a class of yours"
)


def why_each_unpickles(nbytes: int) -> str:
    """Return why each worker unpickles a pickle of this size; "" if one process may do so for all."""
    return "" if nbytes >= LEAST_BYTES else _TOO_SMALL.format(kib=nbytes >> 10)


def serve_in_common(
    open_plan: Callable[[Callable[[memoryview], WorkerPlan]], WorkerPlan],
    serve_workers: Callable[[Callable[[], Prepared]], None],
) -> str:
    """Fork a process that unpickles the plan and serves the workers; return why each worker must unpickle instead.

    Does not return if it served: this process ends with it.

    Args:
        open_plan: Returns the plan that the given function unpickles.
        serve_workers: Runs the fork server with what the given function returns.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else the kernel takes the exit code
    body = partial(_serve, os.getpid(), open_plan, serve_workers)
    pid = forking.fork_process(body, forking.helper("dpex-template"))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != _UNFIT:
        os._exit(max(0, code) or 128)
    return _HAS_EFFECTS


def _serve(parent_pid: int, open_plan: Callable[..., WorkerPlan], serve_workers: Callable[..., None]) -> None:
    forking.die_with_parent(parent_pid)
    serve_workers(partial(_prepared, open_plan))


def _prepared(open_plan: Callable[..., WorkerPlan]) -> Prepared:
    """Unpickle the plan; end this process if that has effects."""
    began, before = time.perf_counter(), _own()
    unpickler: list[_WatchingUnpickler] = []

    def loads(data: memoryview) -> WorkerPlan:
        unpickler.append(_WatchingUnpickler(io.BytesIO(data)))
        plan: WorkerPlan = unpickler[0].load()
        return plan

    try:
        plan = open_plan(loads)
    except Exception:
        _end_as_unfit()
    if unpickler[0].has_setstate or not _own() <= before or torch.cuda.is_initialized():
        _end_as_unfit()
    return in_common(plan, time.perf_counter() - began)


def _end_as_unfit() -> NoReturn:
    os._exit(_UNFIT)


def _own() -> set[tuple[str, int]]:
    """Return the threads, the children and the open files of this process."""
    threads = {("thread", int(one.name)) for one in Path("/proc/self/task").iterdir()}
    files = {("file", int(one.name)) for one in Path("/proc/self/fd").iterdir() if one.exists()}
    return threads | files | {("child", child.pid or 0) for child in multiprocessing.active_children()}


class _WatchingUnpickler(pickle.Unpickler):
    """Notes whether a class of the user's has a ``__setstate__`` of its own."""

    has_setstate = False

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if isinstance(found, type):
            self.has_setstate |= any(
                isinstance(vars(base).get("__setstate__"), FunctionType) and not _is_of_library(base)
                for base in found.__mro__
            )
        return found


def _is_of_library(kind: type) -> bool:
    root = str(kind.__module__).partition(".")[0]
    return root in _LIBRARIES or root in sys.stdlib_module_names

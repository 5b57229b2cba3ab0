"""A plan pickled once and sent to many processes that start from nothing, under "spawn" or "forkserver".

The pickle lies in anonymous memory. Through a pipe, the trainer would have to wait until the new process has imported
the user's script and reads. A worker that starts later gets the dataset as it was when the epoch began, as a forked one
does.

`multiprocessing` lets connections and shared tensors travel as descriptors while it pickles the arguments of a process.
`_Freezing` takes the place of its ``Popen`` while a plan is frozen, and keeps a duplicate of each descriptor. The real
``Popen`` of each process sends these duplicates on.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import TYPE_CHECKING, Any

from dpex.errors import ClusterError

if TYPE_CHECKING:
    from dpex.pools.local.worker_process import WorkerPlan

_arrived: list[int] = []
"""Descriptors of the plan that is being unpickled in this process, in the order in which they were frozen."""


class FrozenPlan:
    """A plan as bytes and descriptors. Raises what pickling raises.

    It may be pickled while a process is being started, and only then. `close` it in the process that froze it.
    """

    def __init__(self, plan: WorkerPlan) -> None:
        self._memory = os.memfd_create("dpex-plan")
        self._fds: list[int] = []
        try:
            with _freezing(self._fds):
                self._write(plan)
        except BaseException:
            self.close()
            raise

    def _write(self, plan: WorkerPlan) -> None:
        with os.fdopen(self._memory, "wb", closefd=False) as file:
            if _is_session_without_script():
                file.write(_pickled_in_session(plan))
            else:
                ForkingPickler(file).dump(plan)

    def open(self) -> WorkerPlan:
        """Return the plan, once, in a process that was started with this one among its arguments."""
        _arrived[:] = self._fds
        with mmap.mmap(self._memory, 0, prot=mmap.PROT_READ) as memory:
            plan: WorkerPlan = pickle.loads(memory)
        self._fds = []
        self.close()
        return plan

    def __reduce__(self) -> tuple[Callable[..., FrozenPlan], tuple[Any, list[Any]]]:
        return _arrives, (DupFd(self._memory), [DupFd(fd) for fd in self._fds])

    def close(self) -> None:
        """Forget the plan; idempotent."""
        while self._fds:
            os.close(self._fds.pop())
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


def _arrives(memory: Any, fds: list[Any]) -> FrozenPlan:
    """In the new process."""
    plan = FrozenPlan.__new__(FrozenPlan)
    plan._memory = memory.detach()
    plan._fds = [fd.detach() for fd in fds]
    return plan


class _FrozenFd:
    """A descriptor in the pickle: its place among those that travel with it."""

    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        """Return the descriptor, which is the caller's from then on; see `multiprocessing.reduction.DupFd`."""
        return _arrived[self._place]


class _Freezing:
    """The part of a ``Popen`` of `multiprocessing` that pickling uses."""

    DupFd = _FrozenFd

    def __init__(self, fds: list[int]) -> None:
        self._fds = fds

    def duplicate_for_child(self, fd: int) -> int:
        """Keep a duplicate of the descriptor, and return its place."""
        self._fds.append(os.dup(fd))
        return len(self._fds) - 1


@contextmanager
def _freezing(fds: list[int]) -> Iterator[None]:
    set_spawning_popen(_Freezing(fds))  # type: ignore[arg-type]
    try:
        yield
    finally:
        set_spawning_popen(None)


def _is_session_without_script() -> bool:
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is None and not hasattr(main, "__file__")


def _pickled_in_session(plan: WorkerPlan) -> bytes:
    """Pickle by value what a session without a script defines, such as a notebook: no other process can import it.

    That takes Ray's cloudpickle. Without it, the new process says what it misses.
    """
    data = bytes(ForkingPickler.dumps(plan))
    if b"__main__" in data:
        from dpex.transport.pickling import cloud_dumps

        with contextlib.suppress(ClusterError):
            return cloud_dumps(plan)
    return data

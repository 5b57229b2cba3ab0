"""Workers that the trainer itself starts by a start method of `multiprocessing`: "spawn" or "forkserver".

Each begins as that method has it: as a fresh interpreter, or as a fork of a server that has imported nothing of the
user's but what ``set_forkserver_preload`` named. It imports and unpickles for itself, so it has threads, clients and
open files of its own. With "spawn" its parent is the trainer. Processes that are asked for together start side by side:
nothing here waits for one of them.

A worker is killed when the trainer has ended. The kernel could do that (PR_SET_PDEATHSIG), but would take the end of
the thread that started the worker for the end of the trainer. So a thread of the worker watches a pidfd of the trainer.

The plan of the workers is pickled once (`FrozenPlan`). The pickle lies in anonymous memory: through a pipe, the trainer
would have to wait until the new process has imported the user's script and reads. A worker that starts later gets the
dataset as it was when the epoch began, as a forked one does.

`multiprocessing` lets connections and shared tensors travel as descriptors while it pickles the arguments of a process.
`_Freezing` takes the place of its ``Popen`` while a plan is frozen, and keeps a duplicate of each descriptor. The real
``Popen`` of each process sends these duplicates on.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

from dpex.errors import ClusterError
from dpex.pools.local import signals
from dpex.pools.local.handles import exit_code, readable_within
from dpex.pools.local.worker_process import WorkerPlan, run_worker
from dpex.system.clock import monotonic
from dpex.system.processes import pidfd, watch
from dpex.system.user_warnings import warn

_LAST_WORDS_S = 1.0
"""Seconds that a worker has to end after SIGTERM, before it is killed; and in which its exit code must come."""


class DirectStarter:
    """Starts each worker as a process of the context; a `dpex.pools.local.starter.Starter`.

    Raises what pickling raises, after a warning that begins with torch's words.
    """

    is_quick = False

    def __init__(self, context: Any, plan: WorkerPlan) -> None:
        self._context = context
        try:
            self._plan = FrozenPlan(plan)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            warn(
                "Got pickle error when attempting to start a worker Process. "
                f"The start method {context.get_start_method()!r} sends the dataset and its functions to workers "
                f"by pickle, which failed: {error}. Define them at the top of a module, or use the start method "
                "'fork'.",
                UserWarning,
            )
            raise

    def open(self) -> DirectProcesses:
        """See `Starter.open`."""
        return DirectProcesses(self._context, self._plan)

    def close(self) -> None:
        """See `Starter.close`."""
        self._plan.close()


class DirectProcesses:
    """Processes that the trainer started; a `dpex.pools.local.starter.ProcessSource`.

    Each is watched by a pidfd. The pipes that `multiprocessing` watches tell too little: what a worker forked holds its
    pipe open, and that of "forkserver" is closed when the server ends, while the worker lives on.
    """

    ready = True
    overdue = False

    def __init__(self, context: Any, plan: FrozenPlan) -> None:
        self._context = context
        self._plan = plan
        self._survives = signals.survived()
        self._running: dict[int, tuple[int, Any]] = {}
        """The number and the process, by the descriptor that is readable once the process has ended."""
        self._news: list[tuple[Any, ...]] = []
        self._has_news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._has_news, select.EPOLLIN)
        self._grace_s = 0.0
        self._owner = os.getpid()
        watch(self)

    def fileno(self) -> int:
        """See `ProcessSource.fileno`."""
        return self._epoll.fileno()

    def why_not(self) -> str:
        """See `ProcessSource.why_not`."""
        return "cannot be asked"

    def start_process(self, number: int, fds: list[int], arguments: tuple[Any, ...]) -> str:
        """See `ProcessSource.start_process`. Returns at once; the process has yet to import."""
        process = self._context.Process(
            target=_run, args=(self._plan, _Descriptors(fds), self._survives, os.getpid(), arguments), daemon=True
        )
        try:
            with self._kept_from_starting():
                process.start()
        except (OSError, EOFError) as error:  # EOFError: the server of "forkserver" has ended
            self._tell("refused", number, str(error) or "the fork server has ended")
            return str(process.name)
        fd = pidfd(process.pid)
        fd = process.sentinel if fd < 0 else fd
        self._epoll.register(fd, select.EPOLLIN)
        self._running[fd] = number, process
        self._tell("up", number, process.pid)
        return str(process.name)

    def _kept_from_starting(self) -> AbstractContextManager[None]:
        """Block what the workers survive until `_run` has arranged for it.

        The server of "forkserver" must not be started meanwhile: it would hand that on to every process that it forks.
        """
        if self._context.get_start_method() != "spawn":
            return contextlib.nullcontext()
        return signals.blocked({*self._survives, signal.SIGINT})

    def _tell(self, *what: Any) -> None:
        self._news.append(what)
        os.eventfd_write(self._has_news, 1)

    def news(self) -> list[tuple[Any, ...]]:
        """See `ProcessSource.news`."""
        if not self._epoll.closed:
            self._wait(0.0)
        found, self._news = self._news, []
        return found

    def _wait(self, timeout_s: float) -> None:
        for fd, _ in self._epoll.poll(timeout_s):
            if fd == self._has_news:
                os.eventfd_read(fd)
            else:
                self._ended(fd)

    def _ended(self, fd: int) -> None:
        self._epoll.unregister(fd)
        number, process = self._running.pop(fd)
        if fd != process.sentinel:
            os.close(fd)
        self._news.append(("exit", number, process.pid, exit_code(process, _LAST_WORDS_S)))
        with contextlib.suppress(ValueError):  # it lives, and has closed the pipe that shows its end
            process.close()

    def end(self, grace_s: float) -> None:
        """See `ProcessSource.end`: `join` ends the workers that stay longer."""
        self._grace_s = grace_s

    def join(self, timeout_s: float) -> list[tuple[Any, ...]]:
        """See `ProcessSource.join`. Workers that stay get SIGTERM, unless the trainer survives that, then SIGKILL."""
        if self._owner != os.getpid() or self._epoll.closed:
            return []
        self._wait_for_all(min(self._grace_s, timeout_s))
        if signal.SIGTERM not in self._survives:
            self._signal_all(signal.SIGTERM)
        self._signal_all(signal.SIGKILL)
        self._epoll.close()
        os.close(self._has_news)
        return self._news

    def _signal_all(self, number: signal.Signals) -> None:
        for _, process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
        self._wait_for_all(_LAST_WORDS_S)

    def _wait_for_all(self, timeout_s: float) -> None:
        deadline = monotonic() + timeout_s
        while self._running and (left := deadline - monotonic()) > 0:
            self._wait(left)

    def inherited(self) -> None:
        """See `dpex.system.processes`. At its end a child sends SIGTERM to what `multiprocessing` takes for its
        children."""
        processes = {process for _, process in self._running.values()}
        multiprocessing.process._children.difference_update(processes)  # type: ignore[attr-defined]


# -- the plan ----------------------------------------------------------------------------------------------------------

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


# -- in the new process ------------------------------------------------------------------------------------------------


class _Descriptors:
    """Descriptors among the arguments of a process: a list of them when they have arrived."""

    def __init__(self, fds: list[int]) -> None:
        self._fds = fds

    def __reduce__(self) -> tuple[Callable[[list[Any]], list[int]], tuple[list[Any]]]:
        return _detached, ([DupFd(fd) for fd in self._fds],)


def _detached(fds: list[Any]) -> list[int]:
    return [fd.detach() for fd in fds]


def _run(
    plan: FrozenPlan, fds: list[int], survives: frozenset[int], trainer_pid: int, arguments: tuple[Any, ...]
) -> None:
    signals.forget(survives)
    signals.outlive_interrupts()
    _end_with(trainer_pid)
    run_worker(plan.open, fds, *arguments)


def _end_with(trainer_pid: int) -> None:
    """Have this process killed when the trainer has ended."""
    parent: Any = multiprocessing.parent_process()
    fd = pidfd(trainer_pid)
    if not parent.is_alive():  # and that number may be another process's
        os._exit(1)
    watched = parent.sentinel if fd < 0 else fd
    threading.Thread(target=_kill_after, args=(watched,), name="dpex-parent-watch", daemon=True).start()


def _kill_after(fd: int) -> None:
    readable_within(fd, None)
    os.kill(os.getpid(), signal.SIGKILL)

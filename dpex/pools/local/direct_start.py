"""Workers that the trainer itself starts by a start method of `multiprocessing`: "spawn" or "forkserver".

Each begins as that method has it: as a fresh interpreter, or as a fork of a server that has imported nothing of the
user's but what ``set_forkserver_preload`` named. It imports and unpickles for itself, so it has threads, clients and
open files of its own. With "spawn" its parent is the trainer. Processes that are asked for together start side by side:
nothing here waits for one of them.

A worker is killed when the trainer has ended. The kernel could do that (PR_SET_PDEATHSIG), but would take the end of
the thread that started the worker for the end of the trainer. So a thread of the worker watches a pidfd of the trainer.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import select
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.reduction import DupFd
from typing import Any

from dpex.pools.local import signals
from dpex.pools.local.frozen_plan import FrozenPlan
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

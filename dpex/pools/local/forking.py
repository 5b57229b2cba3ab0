"""Processes that are forked for the trainer: their start, their names, their signals, and their handles.

To `multiprocessing`, each looks like a process that it has started itself. A worker is forked by a template, but
appears as a child of the trainer (`Kinship`). As in torch's workers, ``current_process()._identity[0]``, by which a
dataset may pick a port or a GPU, is a number from the trainer's counter, and ``parent_process()`` is the trainer. Only
``os.getppid()``, which asks the kernel, returns the template.

**Signals.** The trainer's handlers stay in the trainer, and a signal that the trainer survives ends none of its
workers. Some signals are sent to every process of a job: Slurm sends SIGUSR1 before preemption, and a terminal sends
SIGHUP. A handler that writes a checkpoint must run once, in the trainer, and the workers must live on, as torch's do.
So a process that dpex starts does nothing on a signal that the trainer handles in Python or ignores. It ends with the
trainer anyway. A forked process inherits the trainer's handlers. So the trainer blocks signals while it forks, and the
child unblocks them once it has replaced the handlers.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Collection
from multiprocessing import process, util
from typing import Any, NamedTuple, TypeVar

from dpex.system.clock import monotonic
from dpex.system.processes import parent_of, pidfd

T = TypeVar("T")
UNKNOWN_EXIT = 255
"""The exit code of a child that other code has reaped, or the kernel if SIGCHLD is ignored. `asyncio` uses 255, too."""
_OF_FAULTS = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"}
"""Signals that the kernel sends for a fault of the process itself. Ignoring them would repeat the fault."""
_NOT_OURS = {"SIGKILL", "SIGSTOP", "SIGCHLD", "SIGPIPE", "SIGXFSZ", "SIGINT"}
"""Signals that cannot be handled, must keep their action, or are treated separately."""
SENT_SIGNALS = frozenset(
    number
    for number in signal.valid_signals()
    if not (isinstance(number, signal.Signals) and number.name in _OF_FAULTS | _NOT_OURS)
)
"""Signals that other processes send on purpose."""
_LOOK_S = 0.001
"""Seconds between two checks of an awaited process whose end no descriptor shows."""
_LONGEST_S = 60.0
"""Maximum seconds of one wait for a child's pidfd. The wait ends as soon as the child ends."""
_SPARE = 4
"""Minimum free descriptors for training when a worker is started. Each running worker needs one more, because it sends
the memory of its batches as descriptors."""
_MOST_SPARE = 32
"""Maximum free descriptors that `require_descriptors` requires."""
_PR_SET_PDEATHSIG = 1
"""An option of `prctl`: the signal that this process gets when its parent ends (linux/prctl.h)."""


class Kinship(NamedTuple):
    """``name`` and ``identity`` of a process, and name and pid of its parent, as `multiprocessing` has them.

    ``start_method``: the start method for its own children; None: the start method of the process that forks it.
    """

    name: str
    identity: tuple[int, ...]
    parent: str
    parent_pid: int
    start_method: str | None = None


def next_worker(kind: Any) -> Kinship:
    """Return the kinship of the next worker, named as torch names its workers. ``kind``: The class of the process."""
    here: Any = multiprocessing.current_process()
    identity = (*here._identity, next(process._process_counter))  # type: ignore[attr-defined]
    name = f"{kind.__name__}-{':'.join(map(str, identity))}"
    return Kinship(name, identity, here.name, os.getpid(), kind._start_method)


def helper(name: str) -> Kinship:
    """Return the kinship of a helper process. It takes no number from the counter that numbers the workers."""
    here: Any = multiprocessing.current_process()
    return Kinship(name, here._identity, here.name, os.getpid())


def fork_process(body: Callable[[], object], kinship: Kinship, sentinel: int | None = None) -> int:
    """Fork a process that calls ``body`` and ends; return its pid.

    An error's traceback goes to stderr, and the exit code is 1 then. ``sentinel``: a descriptor that is readable once
    the parent has ended. Raises OSError if the system has no room for a process.
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


def fork_helper(body: Callable[[], object], name: str) -> ProcessHandle:
    """Fork a process that helps this one, and has all signals blocked until it calls `forget_handlers`."""
    return with_signals_blocked(lambda: ProcessHandle(name, pid=fork_process(body, helper(name)), is_child=True))


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGKILL when the parent ends (Linux only). Exit at once if the parent has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


# -- signals -----------------------------------------------------------------------------------------------------------


def with_signals_blocked(call: Callable[[], T]) -> T:
    """Block all signals in this thread, run ``call``, and return its result.

    A process that is started meanwhile inherits the mask; see `forget_handlers`. The handler of an earlier signal may
    raise at the start of any Python function, also of `signal.pthread_sigmask`. So the old mask is set twice. With a
    context manager, or a single call, all signals would sometimes stay blocked in the trainer, Ctrl-C included.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        return call()
    finally:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def survived_signals() -> frozenset[int]:
    """Return the signals that do not end this process, because it handles them in Python or ignores them."""
    return frozenset(number for number in SENT_SIGNALS if signal.getsignal(number) not in (signal.SIG_DFL, None))


def forget_handlers(survives: Collection[int] | None = None) -> None:
    """Replace every handler of the trainer by one that does nothing, ignore SIGINT, and unblock all signals.

    Handlers that are not Python functions, such as `faulthandler`'s, stay. Ignored signals stay ignored, as in torch's
    workers. ``survives``: signals that do not end this process. None: the signals that the trainer, its parent,
    survives.
    """
    kept = survived_signals() if survives is None else survives
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if number in kept:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _outlive)
        elif callable(signal.getsignal(number)) or number == signal.SIGCHLD:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def outlive_signals(numbers: Collection[int]) -> None:
    """Make these signals do nothing. SIGINT may be among them, because the trainer decides what Ctrl-C does."""
    for number in numbers:
        signal.signal(number, _outlive)


def _outlive(_signal: int, _frame: Any) -> None:
    """Do nothing. A handler, unlike SIG_IGN, is not inherited by programs that the dataset may start."""


# -- the trainer's end -------------------------------------------------------------------------------------------------


class ProcessHandle:
    """A process that was forked for the trainer, with an interface like `multiprocessing.Process`.

    ``is_child``: True if the trainer has forked the process and must reap it. ``parent``: The pid of the parent if the
    parent is not the trainer; None if unknown. Such a parent may reap the process before the trainer learns of its end.
    The pid may then already belong to another process.
    """

    def __init__(
        self, name: str, worker: int = -1, pid: int | None = None, *, is_child: bool = False, parent: int | None = None
    ) -> None:
        self.name = name
        self.worker = worker
        self.pid = pid
        self.exitcode: int | None = None
        self.daemon = True
        self._is_child = is_child
        self._parent = parent

    def is_alive(self) -> bool:
        """Return True if the process runs, or has not started yet."""
        if self.exitcode is None and self.pid is not None:
            return self._reap() if self._is_child else self._signal(0)
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended, at most ``timeout`` seconds. Return at once if it has not started yet."""
        deadline = math.inf if timeout is None else monotonic() + timeout
        while self.pid is not None and self.is_alive() and (left := deadline - monotonic()) > 0:
            if (ended := pidfd(self.pid) if self._is_child else -1) < 0:
                time.sleep(_LOOK_S)
                continue
            try:
                readable_within(ended, min(left, _LONGEST_S))
            finally:
                os.close(ended)

    def _reap(self) -> bool:
        """Store the child's exit code if it has ended. Return True if it still runs."""
        try:
            ended, status = os.waitpid(self.pid or 0, os.WNOHANG)
        except ChildProcessError:
            self.exitcode = UNKNOWN_EXIT
        else:
            self.exitcode = os.waitstatus_to_exitcode(status) if ended else None
        return self.exitcode is None

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> bool:
        """Send a signal; return False if the process has ended, even if another one has its pid now."""
        if self.pid is None or self.exitcode is not None:
            return False
        held = pidfd(self.pid)  # refers to the present process, even if another one gets its pid
        try:
            if self._parent is not None and parent_of(self.pid) != self._parent:
                return False
            if held >= 0:
                signal.pidfd_send_signal(held, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        finally:
            if held >= 0:
                os.close(held)
        return True


def readable_within(fd: int, timeout_s: float) -> bool:
    """Return True if a descriptor turns readable within ``timeout_s``. Unlike `select`, it allows any descriptor."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(max(0.0, timeout_s) * 1000))


def require_descriptors(workers: int, fd: int) -> None:
    """Raise OSError if too few descriptors are free to start a worker beside ``workers`` running workers.

    The test duplicates ``fd`` and closes the duplicates at once.
    """
    opened: list[int] = []
    try:
        opened.extend(map(os.dup, [fd] * min(_MOST_SPARE, _SPARE + workers)))
    finally:
        for number in opened:
            os.close(number)

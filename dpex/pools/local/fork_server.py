"""The prepared process: forked once from the trainer, it forks every worker from then on.

Why it exists: forking the trainer itself again and again is slow (page tables) and, once it has threads, unsafe. The
template is made when the epoch begins, so it holds the dataset as it is then; it has a single thread; a further worker
costs one fork of it.

It is the parent of all local workers, sees how each of them ends, and tells the trainer. It ends when the trainer says
so or dies (watched through a pidfd, as other forked processes may hold the trainer's end of the socket open). Workers
are killed by the kernel when the template dies (PR_SET_PDEATHSIG).

A worker is forked by the template, but belongs to the trainer (`Kinship`). A dataset that picks a port or a GPU by
``current_process()._identity[0]``, or watches ``parent_process()``, must find the values that it finds in torch's
workers: numbers that the trainer counts, and the trainer. ``os.getppid()`` is the kernel's, and stays the template.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import pickle
import signal
import socket
import sys
import time
import weakref
from abc import ABC, abstractmethod
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

from dpex.pools.local import signals
from dpex.pools.local.handles import ended_within, readable_within
from dpex.pools.local.worker_process import WorkerPlan, run_worker
from dpex.system.clock import monotonic
from dpex.system.processes import pidfd, watch
from dpex.transport import descendants

MESSAGE_BYTES = 1 << 18
"""The longest message of the control socket."""
START_LIMIT_S = 120.0
"""Importing torch from a slow disk can take a minute; a template that is not there after this never will be."""
_LONGEST_REASON = 4000
"""Characters of a reason. A message of the control socket must hold it."""
_PR_SET_PDEATHSIG = 1
"""An option of `prctl`: the signal that this process gets when its parent ends (linux/prctl.h)."""
_trainers_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def keep_from_templates(sock: socket.socket) -> None:
    """No template that is forked keeps this socket open."""
    _trainers_sockets.add(sock)


def private_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets; the first, which does not block, is the trainer's own: no forked template keeps it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    keep_from_templates(ours)
    return ours, theirs


@runtime_checkable
class PackedPlan(Protocol):
    """A plan that is still to be unpacked."""

    def opened(self) -> WorkerPlan:
        """Unpack it; may raise anything."""


class Parcel:
    """A plan that the template inherited, or the bytes of one, which each worker unpickles."""

    def __init__(self, plan: WorkerPlan | PackedPlan | None, data: bytes | memoryview = b"") -> None:
        self._plan: Any = plan
        self._data = data

    def open_early(self) -> None:
        """Unpack a plan that knows how, in the process that forks the workers, so that no worker has to do it."""
        if isinstance(self._plan, PackedPlan):
            self._plan = self._plan.opened()

    def open(self) -> WorkerPlan:
        """The plan, in a worker."""
        plan: WorkerPlan = self._plan if self._plan is not None else pickle.loads(self._data)
        return plan


class Kinship(NamedTuple):
    """``name`` and ``identity`` of a process, and the name of its ``parent``, as `multiprocessing` has them."""

    name: str
    identity: tuple[int, ...]
    parent: str


class Names:
    """Gives the next names in this process.

    Args:
        kind: Name of the class of processes, such as ``"ForkProcess"``.
        template: The process that forks the workers, if `multiprocessing` has given it an identity. The first worker
            takes that over, so that the numbers of workers begin where torch's do.
    """

    def __init__(self, kind: str, template: Any) -> None:
        self._kind = kind
        self._free: tuple[int, ...] = getattr(template, "_identity", ())

    def next(self) -> Kinship:
        """Return the kinship of a further worker."""
        here: Any = multiprocessing.current_process()
        identity, self._free = self._free, ()
        identity = identity or (*here._identity, next(multiprocessing.process._process_counter))  # type: ignore[attr-defined]
        return Kinship(f"{self._kind}-{':'.join(map(str, identity))}", identity, here.name)


def take_on(kinship: Kinship, parent_pid: int, parent_fd: int) -> None:
    """Have `multiprocessing` say so in this process from now on.

    Args:
        kinship: Of this process.
        parent_pid: The trainer.
        parent_fd: A pidfd of the trainer, which must stay open. Negative: the system has no pidfds, and the parent of
            this process stays the template, as nothing shows whether the trainer lives.
    """
    here: Any = multiprocessing.current_process()
    here._name, here._identity = kinship.name, kinship.identity
    if parent_fd >= 0:
        process: Any = multiprocessing.process
        here._parent_pid = parent_pid
        here._parent_name = kinship.parent
        process._parent_process = process._ParentProcess(kinship.parent, parent_pid, parent_fd)


def template_main(
    control: socket.socket,
    trainer_pid: int,
    parcel: Parcel,
    inherited: list[socket.socket],
    survives: frozenset[int],
) -> None:
    """Run the template process: fork workers on request until the trainer asks it to end.

    Args:
        control: Connected to the trainer.
        trainer_pid: The process whose end ends this one.
        parcel: The plan of the workers.
        inherited: Sockets of the trainer that this process has if it was forked.
        survives: Signals that end neither this process nor its workers.
    """
    signals.forget(survives)
    for foreign in inherited:
        foreign.close()
    descendants.forget_inherited()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    try:
        parcel.open_early()
    except Exception as error:
        control.send(pickle.dumps(("unfit", f"{type(error).__name__}: {error}"[:_LONGEST_REASON])))
        return
    gc.freeze()
    _Template(control, trainer_pid, parcel).run()


class _Template:
    def __init__(self, control: socket.socket, trainer_pid: int, parcel: Parcel) -> None:
        self._control = control
        self._parcel = parcel
        self._children: dict[int, tuple[int, Any]] = {}
        self._trainer_pid = trainer_pid
        self._trainer_fd = pidfd(trainer_pid)
        self._method = multiprocessing.get_start_method()
        self._is_child = os.getppid() == trainer_pid
        self._spare = os.open(os.devnull, os.O_RDONLY)
        self._context = multiprocessing.get_context("fork")

    def run(self) -> None:
        self._tell("ready", os.getpid())
        grace_s = 0.0
        while True:
            watched: list[Any] = [self._control, *(child.sentinel for _, child in self._children.values())]
            if self._trainer_fd >= 0:
                watched.append(self._trainer_fd)
            ready = multiprocessing.connection.wait(watched, timeout=5.0)
            if self._trainer_fd in ready or (self._is_child and os.getppid() != self._trainer_pid):
                break
            self._reap()
            if self._control in ready:
                grace = self._obey()
                if grace is not None:
                    grace_s = grace
                    break
        self._end(grace_s)

    def _obey(self) -> float | None:
        """Carry out one request of the trainer; return the seconds within which to end, if it is to end."""
        try:
            data, fds, flags, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 4)
        except ConnectionResetError:  # the trainer is gone, and had not read everything
            return 0.0
        if not data:
            return 0.0
        message = pickle.loads(data)
        if message[0] == "end":
            return float(message[1])
        _, number, arguments, kinship = message
        if flags & socket.MSG_CTRUNC:  # no descriptor was left to receive its own
            for fd in fds:
                os.close(fd)
            self._tell("refused", number, os.strerror(errno.EMFILE))
        else:
            self._fork(number, fds, arguments, kinship)
        return None

    def _fork(self, number: int, fds: list[int], arguments: tuple[Any, ...], kinship: Kinship) -> None:
        enter = partial(_enter_worker, self._parcel, self._control, os.getpid(), self._method, fds, arguments)
        child = self._context.Process(
            target=enter, args=(kinship, self._trainer_pid, self._trainer_fd), name=kinship.name, daemon=True
        )
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        why_not = self._start(child)
        for fd in fds:
            os.close(fd)
        if why_not:
            self._tell("refused", number, why_not)
        else:
            self._children[child.pid or 0] = (number, child)
            self._tell("up", number, child.pid)

    def _start(self, child: Any) -> str:
        """Start a worker's process; returns why there can be none, or "". Nothing is left open of a failed start."""
        before: set[int] | None = None
        try:
            before = _descriptors()
            child.start()
            return ""
        except OSError as error:
            os.close(self._spare)
            for fd in _descriptors() - before if before is not None else ():
                os.close(fd)
            self._spare = os.open(os.devnull, os.O_RDONLY)
            return str(error)

    def _reap(self) -> None:
        for pid, (number, child) in list(self._children.items()):
            if child.exitcode is not None:
                del self._children[pid]
                self._tell("exit", number, pid, child.exitcode)
                child.close()

    def _tell(self, *message: Any) -> None:
        with contextlib.suppress(OSError):
            self._control.send(pickle.dumps(message))

    def _end(self, grace_s: float) -> None:
        """Let workers leave by themselves for a while, then make them."""
        deadline = time.monotonic() + grace_s
        does_term_end = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        for action in (None, *((signal.SIGTERM,) if does_term_end else ()), signal.SIGKILL):
            if action is not None:
                for pid in self._children:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, action)
                deadline = time.monotonic() + 1.0
            while self._children and time.monotonic() < deadline:
                sentinels = [child.sentinel for _, child in self._children.values()]
                multiprocessing.connection.wait(sentinels, timeout=max(0.0, deadline - time.monotonic()))
                self._reap()


def _descriptors() -> set[int]:
    """All that are open; not those that listing them took."""
    return {number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)}  # noqa: PTH208  (of names)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _enter_worker(
    parcel: Parcel,
    control: socket.socket,
    template_pid: int,
    start_method: str,
    fds: list[int],
    arguments: Any,
    kinship: Kinship,
    trainer_pid: int,
    trainer_fd: int,
) -> None:
    """First steps of a forked worker: drop what is the template's, die with it, ignore Ctrl-C."""
    control.close()
    multiprocessing.context._force_start_method(start_method)
    take_on(kinship, trainer_pid, trainer_fd)
    die_with_parent(template_pid)
    signals.outlive_interrupts()
    with contextlib.suppress(KeyboardInterrupt):
        run_worker(parcel.open, fds, *arguments)


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL for this process when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


class TemplateStarter(ABC):
    """A way to start templates; a `dpex.pools.local.starter.Starter`."""

    is_quick = False
    """See `Starter.is_quick`."""
    kind = "Process"
    """Name of the class of `multiprocessing` that the workers are processes of."""

    def open(self) -> TemplateHandle:
        """See `Starter.open`."""
        return TemplateHandle(self)

    @abstractmethod
    def start(self, theirs: socket.socket) -> Any:
        """Start a template with ``theirs`` as its control socket; return it as a process-like object.

        A template without a ``pid`` is still being started. It then has `came_up` and `why_not`.
        """

    def close(self) -> None:  # noqa: B027  (most have nothing to close)
        """See `Starter.close`."""


class ForkStarter(TemplateStarter):
    """Forks templates from this process, by a context of `multiprocessing` whose start method is "fork"."""

    is_quick = True

    def __init__(self, context: Any, plan: WorkerPlan | PackedPlan) -> None:
        self._context = context
        self.kind = context.Process.__name__
        self._parcel = Parcel(plan)
        self._processes: list[Any] = []
        watch(self)

    def start(self, theirs: socket.socket) -> Any:
        """See `TemplateStarter.start`."""
        process = self._context.Process(
            target=template_main,
            args=(theirs, os.getpid(), self._parcel, list(_trainers_sockets), signals.survived()),
            name="dpex-template",
            daemon=True,
        )
        with signals.blocked():
            process.start()
        self._processes.append(process)
        return process

    def inherited(self) -> None:
        """See `dpex.system.processes`. At its end a child sends SIGTERM to what `multiprocessing` takes for its
        children."""
        multiprocessing.process._children.difference_update(self._processes)  # type: ignore[attr-defined]


class TemplateHandle:
    """The trainer's side of a template; a `dpex.pools.local.starter.ProcessSource`."""

    def __init__(self, starter: TemplateStarter) -> None:
        self._control, theirs = private_pair()
        try:
            self._process = starter.start(theirs)
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()
        self._names = Names(starter.kind, self._process)
        self.ready = self._process.pid is not None
        self._owner = os.getpid()
        self._closed = False
        self._started_at = monotonic()

    def fileno(self) -> int:
        """See `ProcessSource.fileno`."""
        return self._control.fileno()

    @property
    def overdue(self) -> bool:
        """See `ProcessSource.overdue`."""
        return not (self.ready or self._closed) and monotonic() - self._started_at > START_LIMIT_S

    def why_not(self) -> str:
        """See `ProcessSource.why_not`."""
        return f"was not ready within {START_LIMIT_S:.0f} s" if self.overdue else str(self._process.why_not())

    def start_process(self, number: int, fds: list[int], arguments: tuple[Any, ...]) -> str:
        """See `ProcessSource.start_process`.

        Some hundred requests find room in the socket. (When it was a blocking socket, trainer and template waited for
        each other to read: four workers, resized every 2 ms.)
        """
        kinship = self._names.next()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._control, [pickle.dumps(("fork", number, arguments, kinship))], fds)
        return kinship.name

    def news(self) -> list[tuple[Any, ...]]:
        """See `ProcessSource.news`."""
        found: list[tuple[Any, ...]] = []
        while not self._closed:
            try:
                data = self._control.recv(MESSAGE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                found.append(("dead",))
                break
            found.append(pickle.loads(data))
            if found[-1][0] == "ready" and not self.ready:
                self._process.came_up(found[-1][1])
                self.ready = True
        return found

    def end(self, grace_s: float) -> None:
        """See `ProcessSource.end`."""
        with contextlib.suppress(OSError):
            self._control.send(pickle.dumps(("end", grace_s)))

    def join(self, timeout_s: float) -> list[tuple[Any, ...]]:
        """See `ProcessSource.join`. A template that overstays is killed.

        One that is not ready yet is not waited for: it has no workers, and ends when it finds its socket closed.
        """
        news: list[tuple[Any, ...]] = []
        if self._owner != os.getpid() or self._closed:
            return news
        deadline = monotonic() + timeout_s
        while self.ready and ("dead",) not in news and (left := deadline - monotonic()) > 0:
            if readable_within(self._control.fileno(), left):
                news += self.news()
        self._closed = True
        self._control.close()
        if not ended_within(self._process, max(0.1, deadline - monotonic())):
            self._process.kill()
            ended_within(self._process, 5.0)
        with contextlib.suppress(ValueError):
            self._process.close()
        return news

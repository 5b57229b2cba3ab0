"""The template: a process that forks all workers of one pool.

Forking the trainer for each worker is slow (page tables) and, once the trainer has threads, unsafe. The template starts
when the epoch begins, so it has the dataset of that moment. It has a single thread, and each worker costs one fork. It
is a fork of the trainer (`ForkStarter`) or, if the trainer must not be forked, of the clean server
(`dpex.pools.local.clean_server`).

The template is the parent of all local workers, and reports to the trainer how each worker ends. It ends at the
trainer's request or with the trainer. It watches the trainer through a pidfd, because other forked processes may keep
the trainer's end of the socket open. The kernel kills the workers when the template dies (PR_SET_PDEATHSIG).

Before the first fork the template makes the plain objects of the dataset immortal (`dpex.pools.local.immortal`).
"""

from __future__ import annotations

import contextlib
import errno
import gc
import multiprocessing
import os
import pickle
import select
import signal
import socket
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from dpex.pools.local import forking
from dpex.pools.local.immortal import share_plain_objects
from dpex.pools.local.worker_process import WorkerPlan, run_worker
from dpex.system.clock import monotonic
from dpex.system.processes import pidfd
from dpex.transport.arena import forget_inherited

MESSAGE_BYTES = 1 << 18
"""Maximum bytes of a message on the control socket."""
_LONGEST_REASON = 4000
"""Maximum characters of a reason, which must fit in a message on the control socket."""
_LOOK_S = 5.0
"""Seconds between two checks of the parent on a system without pidfds."""
_trainers_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def keep_from_templates(sock: socket.socket) -> None:
    """Register a socket that forked templates must close."""
    _trainers_sockets.add(sock)


def private_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets. The first does not block and belongs to the trainer: forked templates close it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    keep_from_templates(ours)
    return ours, theirs


# -- the template's side -----------------------------------------------------------------------------------------------


Prepare = Callable[[], tuple[Callable[[], WorkerPlan], str]]
"""Prepares a template; returns the function that gives each worker its plan, and a notice to the user, or ""."""


def in_common(plan: WorkerPlan) -> tuple[Callable[[], WorkerPlan], str]:
    """Prepare a template whose workers share this plan and the plain objects of its dataset."""
    why = share_plain_objects(plan.setup.dataset) if plan.setup.shares_objects else ""
    return lambda: plan, f"each worker copies the Python objects of the dataset that it reads: {why}" if why else ""


def template_main(control: socket.socket, trainer_pid: int, prepare: Prepare, survives: frozenset[int]) -> None:
    """Run the template process: fork workers on request until the trainer asks it to end, or ends.

    The template calls ``prepare`` once, which may raise anything. ``survives``: signals that end neither this process
    nor its workers.
    """
    forking.forget_handlers(survives)
    forget_inherited()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    try:
        open_plan, notice = prepare()
    except Exception as error:
        control.send(pickle.dumps(("unfit", f"{type(error).__name__}: {error}"[:_LONGEST_REASON])))
        return
    gc.freeze()
    _Template(control, trainer_pid, open_plan).run(notice)


class _Template:
    def __init__(self, control: socket.socket, trainer_pid: int, open_plan: Callable[[], WorkerPlan]) -> None:
        self._control, self._open_plan = control, open_plan
        self._children: dict[int, int] = {}
        """The number of each worker, by its pid."""
        self._trainer_pid = trainer_pid
        self._is_child = os.getppid() == trainer_pid
        self._lives, self._life = os.pipe()
        """A pipe. ``_lives`` turns readable when this process ends, because only this process has ``_life``."""
        self._child_ended, wakeup = socket.socketpair()
        for end in (self._child_ended, wakeup):
            end.setblocking(False)
        self._wakeup = wakeup
        self._poller = select.poll()
        trainer_fd = pidfd(trainer_pid)
        for fd in (control.fileno(), self._child_ended.fileno(), *((trainer_fd,) if trainer_fd >= 0 else ())):
            self._poller.register(fd, select.POLLIN)
        self._trainer_fd = trainer_fd

    def run(self, notice: str) -> None:
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only a signal with a Python handler writes to the descriptor
        self._tell("ready", os.getpid())
        if notice:
            self._tell("notice", notice)
        grace_s: float | None = None
        while grace_s is None:
            ready = {fd for fd, _ in self._poller.poll(_LOOK_S * 1000)}
            if self._trainer_fd in ready or (self._is_child and os.getppid() != self._trainer_pid):
                grace_s = 0.0
            else:
                self._reap()
                grace_s = self._obey() if self._control.fileno() in ready else None
        self._end(grace_s)

    def _obey(self) -> float | None:
        """Carry out one request of the trainer; return the seconds that it gives the template to end, or None."""
        try:
            data, fds, flags, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 4)
        except ConnectionResetError:  # the trainer is gone, and had not read everything
            return 0.0
        if not data:
            return 0.0
        message = pickle.loads(data)
        if message[0] == "end":
            return float(message[1])
        if flags & socket.MSG_CTRUNC:  # this process had too few free descriptors for those in the message
            for fd in fds:
                os.close(fd)
            self._tell("refused", message[1], os.strerror(errno.EMFILE))
        else:
            self._start_worker(message, fds)
        return None

    def _start_worker(self, message: tuple[Any, ...], fds: list[int]) -> None:
        _, number, arguments, kinship = message
        body = partial(self._enter_worker, os.getpid(), fds, arguments)
        answer: tuple[Any, ...]
        try:
            if _is_hung_up(fds[0]):  # the trainer is closing: it hangs up workers' sockets before it sends "end"
                answer = ("exit", number, 0, 0)
            else:
                pid = forking.fork_process(body, kinship, self._lives)
                self._children[pid] = number
                answer = ("up", number, pid)
        except OSError as error:
            answer = ("refused", number, str(error))
        for fd in fds:
            os.close(fd)
        self._tell(*answer)

    def _enter_worker(self, template_pid: int, fds: list[int], arguments: tuple[Any, ...]) -> None:
        """Take the first steps of a forked worker: close the template's descriptors, die with it, ignore Ctrl-C."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._control, self._child_ended, self._wakeup):
            end.close()
        os.close(self._life)
        if self._trainer_fd >= 0:
            os.close(self._trainer_fd)
        forking.die_with_parent(template_pid)
        forking.outlive_signals({signal.SIGINT})
        with contextlib.suppress(KeyboardInterrupt):
            run_worker(self._open_plan, fds, *arguments)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._child_ended.recv(MESSAGE_BYTES)
        for pid, number in list(self._children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._children[pid]
                self._tell("exit", number, pid, os.waitstatus_to_exitcode(status))

    def _tell(self, *message: Any) -> None:
        with contextlib.suppress(OSError):
            self._control.send(pickle.dumps(message))

    def _end(self, grace_s: float) -> None:
        """Give workers ``grace_s`` seconds to leave. Then send SIGTERM, unless workers survive it, and SIGKILL."""
        deadline = monotonic() + grace_s
        does_term_end = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        for action in (None, *((signal.SIGTERM,) if does_term_end else ()), signal.SIGKILL):
            if action is not None:
                for pid in self._children:
                    os.kill(pid, action)
                deadline = monotonic() + 1.0
            self._reap()
            while self._children and (left := deadline - monotonic()) > 0:
                forking.readable_within(self._child_ended.fileno(), left)
                self._reap()
        signal.set_wakeup_fd(-1)
        for end in (self._child_ended, self._wakeup):
            end.close()


def _is_hung_up(fd: int) -> bool:
    """Return True if the other end of this socket is shut down or closed."""
    poller = select.poll()
    poller.register(fd, 0)
    return any(what & select.POLLHUP for _, what in poller.poll(0))


# -- the trainer's side ------------------------------------------------------------------------------------------------


class TemplateStarter(ABC):
    """Starts templates, and keeps the plan of their workers."""

    is_quick = False
    """True if a worker serves milliseconds after it was requested, because it inherits the dataset and unpickles
    nothing."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        """The process class of `multiprocessing` that gives workers their name and start method."""

    @abstractmethod
    def start(self, theirs: socket.socket) -> forking.ProcessHandle:
        """Start a template with ``theirs`` as its control socket. If the handle has no pid, the start is under way."""

    def why_not(self) -> str:
        """Return why the template has not become ready, as the end of a sentence whose subject is the template."""
        return "ended before it was ready"

    def close(self) -> None:  # noqa: B027  (most have nothing to close)
        """Free the starter's resources. No template is started afterwards. Idempotent."""


class ForkStarter(TemplateStarter):
    """Forks templates from this process. Each template calls ``prepare``, so that no worker has to unpack the plan."""

    is_quick = True

    def __init__(self, prepare: Prepare, kind: Any = multiprocessing.Process) -> None:
        super().__init__(kind)
        self._prepare = prepare

    def start(self, theirs: socket.socket) -> forking.ProcessHandle:
        body = partial(self._enter_template, theirs, os.getpid(), forking.survived_signals())
        return forking.fork_helper(body, "dpex-template")

    def _enter_template(self, control: socket.socket, trainer_pid: int, survives: frozenset[int]) -> None:
        for foreign in list(_trainers_sockets):
            foreign.close()
        self._serve(control, trainer_pid, survives)

    def _serve(self, control: socket.socket, trainer_pid: int, survives: frozenset[int]) -> None:
        template_main(control, trainer_pid, self._prepare, survives)


class TemplateHandle:
    """The trainer's side of a template: requests worker processes, and receives reports of their ends.

    The constructor starts the template. Make a new handle after the template has ended.
    """

    def __init__(self, starter: TemplateStarter) -> None:
        self._control, theirs = private_pair()
        try:
            self._process = starter.start(theirs)
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()
        self._kind = starter.kind
        self.ready: bool = self._process.pid is not None
        """True if the template accepts requests."""
        self._owner = os.getpid()
        self._closed = False
        self.unheard: deque[tuple[Any, ...]] = deque()
        """News that the caller has not removed."""

    def fileno(self) -> int:
        return self._control.fileno()

    def start_process(self, number: int, fds: list[int], arguments: tuple[Any, ...]) -> forking.ProcessHandle:
        """Request a process with these descriptors, which the caller may close afterwards.

        `news` reports the process's end. The socket holds some hundred requests. Raises BlockingIOError if it is full.
        (With a blocking socket, trainer and template deadlocked, each waiting for the other to read: four workers,
        resized every 2 ms.)
        """
        kinship = forking.next_worker(self._kind)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._control, [pickle.dumps(("fork", number, arguments, kinship))], fds)
        return forking.ProcessHandle(kinship.name, number, parent=self._process.pid)

    def news(self) -> deque[tuple[Any, ...]]:
        """Return what happened, in the handle's deque. The caller removes the entries that it has handled.

        The template reports ``("ready", pid)`` or ``("unfit", why)``, then perhaps ``("notice", text)``, and
        ``("dead",)`` once it has ended. For each process it reports ``("up", number, pid)`` or ``("refused", number,
        why)``, then ``("exit", number, pid, code)``. If the socket of a process was hung up before its fork, there is
        only an exit, with 0 as pid and code.
        """
        while not self._closed:
            try:
                data = self._control.recv(MESSAGE_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:  # the template ended with requests unread; its messages can still be read
                continue
            told: tuple[Any, ...] = pickle.loads(data) if data else ("dead",)
            if told[0] == "ready":
                self._process.pid, self.ready = told[1], True
            self.unheard.append(told)
            if not data:
                break
        return self.unheard

    def end(self, grace_s: float) -> None:
        with contextlib.suppress(OSError):
            self._control.send(pickle.dumps(("end", grace_s)))

    def join(self, timeout_s: float) -> list[tuple[Any, ...]]:
        """Wait at most ``timeout_s`` seconds until all processes have ended; return the last news.

        A template that overstays is killed. A template that is not ready yet is not awaited, because it has no workers
        and ends when it finds its socket closed.
        """
        if self._owner != os.getpid():
            return []
        if self._closed:
            return list(self.unheard)
        deadline = monotonic() + timeout_s
        while self.ready and ("dead",) not in self.unheard and (left := deadline - monotonic()) > 0:
            if forking.readable_within(self._control.fileno(), left):
                self.news()
        self._closed = True
        self._control.close()
        self._process.join(max(0.1, deadline - monotonic()))
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5.0)
        return list(self.unheard)

"""The clean server: a process without the trainer's threads and state, from which templates are forked.

It is used if the user's start method is "spawn" or "forkserver". It is also used if Ray is connected, because locks
that Ray's threads hold would stay locked in a fork of the trainer. The trainer has one server for all its loaders.
The server takes seconds to start, because it imports torch. `iter()` does not wait for it: requests lie in its socket
until it reads them. Once the server runs, it starts a template within milliseconds.

Neither the server nor a template imports the user's script or unpickles the dataset. Each worker does both, so it has
its own threads, clients, CUDA contexts and open files. If Ray is the reason for the server, no process imports the
script, because it might start training. Its classes and functions are then pickled by value.

A request carries the template's control socket, a file in memory that is written once for each pool (`Parcel`), and the
descriptors of the dataset's shared memory. Another kind of request starts a process that outlives the trainer and has
its own templates (`start_apart`). The server ends with the trainer. Any thread of the trainer may send requests.
"""

from __future__ import annotations

import contextlib
import gc
import io
import mmap
import multiprocessing
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing import resource_tracker, spawn
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch.multiprocessing

from dpex.pools.local import forking
from dpex.pools.local.fork_server import ForkStarter, TemplateStarter, in_common, private_pair, template_main
from dpex.pools.local.worker_process import WorkerPlan
from dpex.system.processes import pidfd
from dpex.system.ray_package import is_ray_connected
from dpex.system.user_warnings import warn
from dpex.transport.memory import memory_file
from dpex.transport.pickling import cloud_dumps

_BOOTSTRAP = """
import gc, signal, sys
gc.disable()
for number in {sent}:
    signal.signal(number, signal.SIG_IGN)
sys.path[:] = {path!r}
from dpex.pools.local.clean_server import serve
serve({fd}, {pid})
"""
_FDS_AT_ONCE = 128
"""Maximum descriptors of one message. The kernel's limit is 253."""
_TEMPLATE, _APART, _MORE = b"t", b"a", b"+"
"""Messages to the server: start a template, or a process that outlives the trainer; further descriptors follow."""
_SCRIPT = ("init_main_from_name", "init_main_from_path")
"""Keys of the preparation data of `multiprocessing` that name the user's script."""


def starter_for(context: Any, plan: WorkerPlan) -> TemplateStarter:
    """Return a starter for the user's start method, or else torch's. If Ray's threads make forking unsafe, the starter
    uses the clean server.

    Under the start methods "spawn" and "forkserver" it raises the errors of pickling, after a warning that begins with
    torch's words. Raises AssertionError if this process may not have children.
    """
    context = usable_context(context)
    daemonic = multiprocessing.current_process()._config.get("daemon")  # type: ignore[attr-defined]
    assert not daemonic, (  # begins as the error of `multiprocessing`
        "daemonic processes are not allowed to have children: this one is a worker of another loader or of a Pool. "
        "Give num_workers=0 here, or num_workers='auto', which then makes the batches in this process"
    )
    kind, method = context.Process, context.get_start_method()
    if method == "fork" and not is_ray_connected():
        return ForkStarter(lambda: in_common(plan), kind)
    try:
        return CleanStarter(kind, plan, imports_script=method != "fork")
    except Exception as error:
        if method != "fork" and isinstance(error, (TypeError, AttributeError, pickle.PicklingError)):
            from dpex.transport.unpicklable import explain_spawn

            warn(
                "Got pickle error when attempting to start a worker Process. The start method "
                f"{method!r} sends the dataset and its functions to workers by pickle, and "
                f"{explain_spawn(plan.setup, error)}, or use the start method 'fork'.",
                UserWarning,
            )
        if method != "fork":
            raise
        warn(
            "Ray is connected in this process, whose threads make forking it unsafe, but the dataset cannot be "
            f"pickled ({error!r}); its workers are forked in spite of that"
        )
        return ForkStarter(lambda: in_common(plan), kind)


def start_early(context: Any) -> None:
    """Start the server early if it will replace forks of the trainer, because importing torch takes seconds."""
    if usable_context(context).get_start_method() == "fork":
        _begin()


def _begin() -> None:
    with contextlib.suppress(OSError):  # a request will try again, and report the error
        _request([])


def usable_context(context: Any) -> Any:
    """The `multiprocessing` context that workers are started with: the user's, or torch's."""
    return context if hasattr(context, "get_start_method") else torch.multiprocessing


# -- the server as the trainer sees it ---------------------------------------------------------------------------------


class CleanStarter(TemplateStarter):
    """Starts templates from the clean server. Raises the errors of pickling.

    The constructor pickles the plan, once, so a worker that starts later gets the dataset as it was when the epoch
    began. Unless ``imports_script``, the classes and functions of the user's script are pickled by value.
    """

    def __init__(self, kind: Any, plan: WorkerPlan, *, imports_script: bool) -> None:
        super().__init__(kind)
        _begin()  # the server imports torch while this process pickles the plan
        self._parcel = Parcel(plan, imports_script=imports_script)
        self._server: _CleanServer | None = None
        self._why_not = ""

    def start(self, theirs: socket.socket) -> forking.ProcessHandle:
        """See `TemplateStarter.start`; does not wait. If no server can be started, the template counts as ended."""
        try:
            self._server = _request([theirs.fileno(), *self._parcel.fds])
        except OSError as error:
            self._server, self._why_not = None, f"cannot be started: {error}"
        return forking.ProcessHandle("dpex-template", parent=None if self._server is None else self._server.pid)

    def why_not(self) -> str:
        return self._why_not if self._server is None else self._server.how_it_ended()

    def close(self) -> None:
        self._parcel.close()

    def start_apart(self, sock: socket.socket, body: Callable[[socket.socket, TemplateStarter], None]) -> None:
        """Start a process that outlives this one, without waiting for it.

        ``body`` is pickled. The new process calls it with the socket and with a starter of templates for this plan.
        Raises OSError if the server cannot be started.
        """
        order = memory_file("dpex-order")
        try:
            os.write(order, pickle.dumps((body, self.kind)))
            _request([sock.fileno(), order, *self._parcel.fds], what=_APART)
        finally:
            os.close(order)


class _CleanServer:
    """The server's process and the socket for requests to it."""

    def __init__(self) -> None:
        self._socket, theirs = private_pair()
        path = [entry for entry in sys.path if isinstance(entry, str)]
        sent = [int(number) for number in (*forking.SENT_SIGNALS, signal.SIGINT)]
        code = _BOOTSTRAP.format(path=path, fd=theirs.fileno(), pid=os.getpid(), sent=sent)
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        command = [spawn.get_executable(), *flags, "-c", code]
        try:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self.owner, self.pid = os.getpid(), self._process.pid
        self._finalizer = weakref.finalize(self, _end, self._process, self._socket, self.owner)

    def is_there(self) -> bool:
        return self.owner == os.getpid() and self._process.poll() is None

    def request(self, what: bytes, fds: list[int]) -> None:
        """Ask for a process that gets these descriptors. Raises OSError if the server has ended."""
        for first in range(0, len(fds), _FDS_AT_ONCE):
            is_last = first + _FDS_AT_ONCE >= len(fds)
            socket.send_fds(self._socket, [what if is_last else _MORE], fds[first : first + _FDS_AT_ONCE])

    def how_it_ended(self) -> str:
        """Return why no template became ready, as the end of a sentence for the user."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(0.2)
            how = f"exit code {code}" if code >= 0 else (signal.strsignal(-code) or f"signal {-code}")
            return f"ended before it was ready ({how}; its output says more)"
        return "forked a process that ended before it was ready (its output says more)"


_server: _CleanServer | None = None
_lock = threading.Lock()


def _request(fds: list[int], what: bytes = _TEMPLATE) -> _CleanServer:
    """Ask the server for a process, and start a server if none runs. Without ``fds``, only start the server."""
    global _server
    with _lock:
        if _server is None or not _server.is_there():
            _server = _CleanServer()
        with contextlib.suppress(ConnectionError):  # the server has ended, which the control socket shows
            _server.request(what, fds)
        return _server


def _end(process: subprocess.Popen[bytes], sock: socket.socket, owner: int) -> None:
    sock.close()
    if os.getpid() != owner:
        return
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# -- the parcel --------------------------------------------------------------------------------------------------------

_arrived: list[int] = []
"""Descriptors of the plan that is being unpickled in this process, in the order in which they were packed."""


class _PackedFd:
    """A descriptor in the pickle, given by its index among the descriptors that are sent with the pickle."""

    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        """Return the descriptor, which the caller then owns; see `multiprocessing.reduction.DupFd`."""
        return _arrived[self._place]


class Parcel:
    """The plan that the trainer sends to a template, pickled once.

    ``fds``: Descriptors of a file in memory, of the trainer's stdout and stderr, and of objects that the plan shares.

    While `multiprocessing` pickles the arguments of a process, it passes the descriptors of connections and shared
    tensors to the ``Popen`` of the process. A parcel takes the place of the ``Popen``, and keeps duplicates of them.
    """

    DupFd = _PackedFd

    def __init__(self, plan: WorkerPlan, *, imports_script: bool) -> None:
        self.fds: list[int] = [memory_file("dpex-plan")]
        try:
            with os.fdopen(self.fds[0], "wb", closefd=False) as file:
                pickle.dump(self._surroundings(plan, imports_script=imports_script), file)
                set_spawning_popen(self)  # type: ignore[arg-type]
                file.write(_pickled(plan, imports_script=imports_script))
        except BaseException:
            self.close()
            raise
        finally:
            set_spawning_popen(None)

    def duplicate_for_child(self, fd: int) -> int:
        """Keep a duplicate of a descriptor, and return its index in ``fds``. Pickling calls this."""
        self.fds.append(os.dup(fd))
        return len(self.fds) - 1

    def _surroundings(self, plan: WorkerPlan, *, imports_script: bool) -> dict[str, Any]:
        found: dict[str, Any] = spawn.get_preparation_data("dpex-template")
        found["authkey"] = bytes(found["authkey"])
        script = {name: found.pop(name) for name in _SCRIPT if name in found}
        for number in (1, 2):
            try:
                self.fds.append(os.dup(number))
            except OSError:  # stdout or stderr is closed
                self.fds.append(os.open(os.devnull, os.O_WRONLY))
        tracker = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]
        if tracker is not None:
            self.fds.append(os.dup(tracker))
        return {
            "preparation": found,
            "environment": dict(os.environ),
            "survives": forking.survived_signals(),
            "ignored": [one for one in forking.SENT_SIGNALS if signal.getsignal(one) is signal.SIG_IGN],
            "script": script if imports_script else {},
            "has_tracker": tracker is not None,
        }

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


def _pickled(plan: WorkerPlan, *, imports_script: bool) -> bytes:
    """Pickle the plan. Definitions in the script are pickled by value if no worker imports it, as in a notebook."""
    main = sys.modules["__main__"]
    has_script = getattr(main, "__spec__", None) is not None or hasattr(main, "__file__")
    if not imports_script or not has_script:
        return cloud_dumps(plan)
    stream = io.BytesIO()
    ForkingPickler(stream).dump(plan)
    return stream.getvalue()


# -- in the server, a template and a worker ----------------------------------------------------------------------------


def serve(fd: int, trainer_pid: int) -> None:
    """Body of the server: fork templates on request; never returns.

    No signal of `SENT_SIGNALS` ends the server, however the trainer handles it. The server ends with the trainer.
    """
    forking.outlive_signals(forking.SENT_SIGNALS)
    forking.forget_handlers(forking.SENT_SIGNALS)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the templates
    requests = socket.socket(fileno=fd)
    gc.enable()  # off during the imports, which saves a twelfth of their time
    gc.freeze()
    trainer = pidfd(trainer_pid)
    poller = select.poll()
    for watched in (fd, trainer) if trainer >= 0 else (fd,):
        poller.register(watched, select.POLLIN)
    received: list[int] = []
    while trainer not in {ready for ready, _ in poller.poll()}:
        data, fds, _, _ = socket.recv_fds(requests, 1, _FDS_AT_ONCE)
        if not data:
            break
        received += fds
        if data != _MORE:
            enter = _enter_template if data == _TEMPLATE else _enter_apart
            body = partial(_enter, requests, trainer, partial(enter, received, trainer_pid))
            forking.fork_process(body, forking.helper("dpex-template"))
            for number in received:
                os.close(number)
            received = []
    os._exit(0)  # the templates live on: they watch the trainer themselves


def _enter(requests: socket.socket, trainer: int, body: Callable[[], None]) -> None:
    """Take the first steps of a forked process: close the server's descriptors."""
    requests.close()
    if trainer >= 0:
        os.close(trainer)
    body()


def _enter_template(fds: list[int], trainer_pid: int) -> None:
    control, *fds = fds
    parcel = _ReceivedParcel(fds)
    with socket.socket(fileno=control) as connection:
        parcel.serve(connection, trainer_pid)


def _enter_apart(fds: list[int], _: int) -> None:
    sock, order, *fds = fds
    parcel = _ReceivedParcel(fds)
    forking.forget_handlers(parcel.survives)
    os.setsid()
    with os.fdopen(order, "rb") as file:
        file.seek(0)
        body, kind = pickle.load(file)
    body(socket.socket(fileno=sock), _ReceivedStarter(kind, parcel))


class _ReceivedParcel:
    """A parcel in the process that received it. It sets up the process like the trainer, and runs templates."""

    def __init__(self, fds: list[int]) -> None:
        os.dup2(fds[1], 1)
        os.dup2(fds[2], 2)
        file = mmap.mmap(fds[0], 0, prot=mmap.PROT_READ)
        surroundings = pickle.load(file)
        for name in os.environ.keys() - surroundings["environment"].keys():
            del os.environ[name]
        os.environ.update(surroundings["environment"])
        spawn.prepare(surroundings["preparation"])
        if surroundings["has_tracker"]:
            resource_tracker._resource_tracker._fd = fds[3]  # type: ignore[attr-defined]
        for number in surroundings["ignored"]:  # so that programs that workers start ignore them, too
            signal.signal(number, signal.SIG_IGN)
        self.survives: frozenset[int] = surroundings["survives"]
        self._file, self._fds, self._surroundings = file, fds, surroundings

    def serve(self, control: socket.socket, trainer_pid: int) -> None:
        template_main(control, trainer_pid, self.prepared, self.survives)

    def prepared(self) -> tuple[Callable[[], WorkerPlan], str]:
        """Let each worker unpickle the plan for itself."""
        return partial(_unpacked, self._file, self._fds, self._surroundings["script"]), ""


class _ReceivedStarter(ForkStarter):
    """Forks templates from this process. Their plan is the plan of ``parcel``."""

    is_quick = False

    def __init__(self, kind: Any, parcel: _ReceivedParcel) -> None:
        super().__init__(parcel.prepared, kind)
        self._parcel = parcel

    def _serve(self, control: socket.socket, trainer_pid: int, survives: frozenset[int]) -> None:
        self._parcel.serve(control, trainer_pid)


def _unpacked(file: mmap.mmap, fds: list[int], script: dict[str, Any]) -> WorkerPlan:
    """Import the user's script and unpickle the plan, in a worker."""
    _arrived[:] = fds
    here: Any = multiprocessing.current_process()
    here._inheriting = True  # `dpex.loader.passes` and `multiprocessing` then reject a training without a main guard
    try:
        np.random.seed()  # as in a new interpreter; Python's `random` is seeded by the fork
        spawn.prepare(script)
        plan: WorkerPlan = pickle.load(file)
        return plan
    finally:
        del here._inheriting

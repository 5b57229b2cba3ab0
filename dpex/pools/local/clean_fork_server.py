"""The clean server: a process without the trainer's threads, from which templates are forked.

It is used where Ray is connected, whose threads may hold locks that a fork of the trainer would never see released.
The trainer has one for all its loaders. It takes seconds to start, as it imports torch, and `iter()` does not wait for
it: requests lie in its socket until it reads them. From then on a template comes within milliseconds.

A request carries two descriptors: the template's control socket, and the parcel, a file in memory that is written once
for each pool. The server ends with the trainer.

The trainer's side may be used from several threads.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from multiprocessing import spawn
from typing import Any

import torch.multiprocessing

from dpex.pools.local import signals
from dpex.pools.local.fork_server import (
    ForkStarter,
    Parcel,
    TemplateStarter,
    private_pair,
    template_main,
)
from dpex.pools.local.handles import ProcessHandle
from dpex.pools.local.starter import Starter
from dpex.pools.local.worker_process import WorkerPlan
from dpex.system.processes import pidfd
from dpex.system.ray_package import is_ray_connected
from dpex.system.user_warnings import warn

_BOOTSTRAP = """
import signal, sys
for number in {sent}:
    signal.signal(number, signal.SIG_IGN)
sys.path[:] = {path!r}
from dpex.pools.local.clean_fork_server import serve
serve({fd}, {pid})
"""
_LENGTH_BYTES = 8
"""A message begins with its length."""
_SURVIVES = "survives"
"""Among a template's surroundings: the signals that the trainer survives when the template is asked for."""
_ENVIRONMENT = "environment"
"""Among a template's surroundings: the trainer's environment variables as they are when it is asked for."""


# -- the trainer's side ------------------------------------------------------------------------------------------------


class CleanStarter(TemplateStarter):
    """Starts templates from the clean server.

    Raises what pickling raises: the plan is pickled here, once, by value where the trainer's script defines things.
    """

    def __init__(self, context: Any, plan: WorkerPlan) -> None:
        from dpex.transport.pickling import cloud_dumps

        self.kind = context.Process.__name__
        surroundings = pickle.dumps(_surroundings())
        self._parcel = os.memfd_create("dpex-plan")
        try:
            with os.fdopen(self._parcel, "wb", closefd=False) as file:
                file.write(len(surroundings).to_bytes(_LENGTH_BYTES, "little"))
                file.write(surroundings)
                file.write(cloud_dumps(plan))
        except BaseException:
            self.close()
            raise

    def start(self, theirs: socket.socket) -> BorrowedProcess:
        """See `TemplateStarter.start`; does not wait. A server that cannot be begun shows as one that has ended."""
        try:
            return BorrowedProcess(_request(theirs, self._parcel))
        except OSError as error:
            return BorrowedProcess(None, f"cannot be started: {error}")

    def close(self) -> None:
        """See `Starter.close`."""
        if self._parcel >= 0:
            os.close(self._parcel)
            self._parcel = -1


def starter_for(context: Any, plan: WorkerPlan) -> Starter:
    """The user's start method, or torch's; the clean server where Ray's threads make forking unsafe."""
    context = usable_context(context)
    if _is_needed(context):
        try:
            return CleanStarter(context, plan)
        except Exception as error:
            warn(
                "Ray is connected in this process, whose threads make forking it unsafe, but the dataset cannot be "
                f"pickled ({error!r}); its workers are forked in spite of that"
            )
    if context.get_start_method() != "fork":
        from dpex.pools.local.direct_start import DirectStarter

        return DirectStarter(context, plan)
    return ForkStarter(context, plan)


def start_early(context: Any) -> None:
    """Start the server, unless it runs or workers of that context do without it: importing torch takes seconds."""
    global _server
    if not _is_needed(usable_context(context)):
        return
    with _lock, contextlib.suppress(OSError):  # the pool will try again, and report the error
        if _server is None or not _server.is_there():
            _server = _CleanServer()


def usable_context(context: Any) -> Any:
    """The `multiprocessing` context that workers are started with: the user's, or torch's."""
    return context if hasattr(context, "get_start_method") else torch.multiprocessing


def _is_needed(context: Any) -> bool:
    return context.get_start_method() == "fork" and is_ray_connected()


class BorrowedProcess(ProcessHandle):
    """A template that is the server's child. It has a ``pid`` once it reports that it came up."""

    def __init__(self, server: _CleanServer | None, why_not: str = "") -> None:
        super().__init__("dpex-template")
        self._server = server
        self._why_not = why_not

    def came_up(self, pid: int) -> None:
        """Note that it came up."""
        self.pid = pid

    def why_not(self) -> str:
        """Return why it will not come up: the end of a sentence."""
        return self._server.how_it_ended() if self._server is not None else self._why_not

    def close(self) -> None:
        """Do nothing: the server reaps it."""


class _CleanServer:
    """The server's process and the socket for requests to it."""

    def __init__(self) -> None:
        self._socket, theirs = private_pair()
        path = [entry for entry in sys.path if isinstance(entry, str)]
        sent = [int(number) for number in (*signals.SENT, signal.SIGINT)]
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
        self.owner = os.getpid()
        self._finalizer = weakref.finalize(self, _end, self._process, self._socket, self.owner)

    def is_there(self) -> bool:
        """Return True if the server is this process's, and has not ended."""
        return self.owner == os.getpid() and self._process.poll() is None

    def request(self, control: socket.socket, parcel: int) -> None:
        """Ask for a template; OSError if the server has ended."""
        socket.send_fds(self._socket, [b"t"], [control.fileno(), parcel])

    def how_it_ended(self) -> str:
        """The end of a sentence, for people."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(0.2)
            how = f"exit code {code}" if code >= 0 else (signal.strsignal(-code) or f"signal {-code}")
            return f"ended before it was ready ({how}; what it printed says more)"
        return "forked a process that ended before it was ready (what it printed says more)"


_server: _CleanServer | None = None
_lock = threading.Lock()


def _request(control: socket.socket, parcel: int) -> _CleanServer:
    """Ask the server for a template; start a server if none runs."""
    global _server
    with _lock:
        if _server is not None and _server.owner == os.getpid():
            with contextlib.suppress(OSError):
                _server.request(control, parcel)
                return _server
        _server = _CleanServer()
        with contextlib.suppress(BrokenPipeError):  # it has ended already: `control` hangs up, and tells so
            _server.request(control, parcel)
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


def _surroundings() -> dict[str, Any]:
    """Return the preparation data of `multiprocessing`, without the script: run again, it might start training."""
    found: dict[str, Any] = spawn.get_preparation_data("dpex-template")
    for name in ("init_main_from_name", "init_main_from_path"):
        found.pop(name, None)
    found["authkey"] = bytes(found["authkey"])
    return {**found, _ENVIRONMENT: dict(os.environ), _SURVIVES: signals.survived()}


# -- the server's side -------------------------------------------------------------------------------------------------


def serve(fd: int, trainer_pid: int) -> None:
    """Body of the server: fork templates on request; never returns.

    No signal that others send ends it, whatever the trainer does with that. It ends with the trainer.
    """
    signals.forget(signals.SENT)
    requests = socket.socket(fileno=fd)
    gc.freeze()
    trainer = pidfd(trainer_pid)
    watched: list[Any] = [requests] if trainer < 0 else [requests, trainer]
    context = multiprocessing.get_context("fork")
    templates: list[Any] = []
    while True:
        sentinels = [template.sentinel for template in templates]
        ready = multiprocessing.connection.wait([*watched, *sentinels])
        templates = [template for template in templates if template.exitcode is None]
        if trainer in ready:
            break
        if requests in ready:
            data, fds, _, _ = socket.recv_fds(requests, 1, 2)
            if not data:
                break
            template = context.Process(
                target=_enter_template, args=(requests, trainer, fds, trainer_pid), name="dpex-template", daemon=True
            )
            template.start()
            for received in fds:
                os.close(received)
            templates.append(template)
    os._exit(0)  # without ending the templates: they watch the trainer for themselves


def _enter_template(requests: socket.socket, trainer: int, fds: list[int], trainer_pid: int) -> None:
    """First steps of a forked template: drop what is the server's, take on the trainer's surroundings."""
    requests.close()
    if trainer >= 0:
        os.close(trainer)
    control, parcel = fds
    memory = memoryview(mmap.mmap(parcel, 0, prot=mmap.PROT_READ))
    os.close(parcel)
    start = _LENGTH_BYTES + int.from_bytes(memory[:_LENGTH_BYTES], "little")
    surroundings = pickle.loads(memory[_LENGTH_BYTES:start])
    _replace_environment(surroundings.pop(_ENVIRONMENT))
    survives = surroundings.pop(_SURVIVES)
    spawn.prepare(surroundings)
    template_main(socket.socket(fileno=control), trainer_pid, Parcel(None, memory[start:]), [], survives)


def _replace_environment(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)

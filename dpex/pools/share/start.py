"""Starts a producer: a process of its own, forked from the training that finds none.

It inherits the dataset, as workers do, and nothing else of use. It must outlive its training, so it is nobody's child,
has a session of its own (Ctrl-C reaches the trainings, and the producer ends after them), and keeps nothing open that
others take for the training: sockets, pipes and devices that it inherits become ``/dev/null``. So a port is free once
the training has ended, a GPU's memory too, and whoever reads the training's output sees its end. A terminal or a file
as output stays.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import resource
import socket
import stat
import traceback
from collections.abc import Callable
from pathlib import Path

from dpex.errors import ShareError
from dpex.pools.local import signals
from dpex.pools.local.handles import UNKNOWN_EXIT, ended_within
from dpex.transport import descendants

_HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/pts/")
START_LIMIT_S = 60.0
"""Forking a large training takes a second; one that takes that long never will."""


def start_producer(listener: socket.socket, serve: Callable[[], None]) -> None:
    """Have ``serve`` called in a process of its own, which keeps the listener. Raises ShareError."""
    process = multiprocessing.get_context("fork").Process(target=_fork_again, args=(listener, serve), name="dpex-share")
    with signals.blocked():
        process.start()
    if not ended_within(process, START_LIMIT_S) or process.exitcode not in (0, UNKNOWN_EXIT):
        process.kill()
        raise ShareError(
            f"share: the process that makes the batches could not be started (exit code {process.exitcode})"
        )
    process.close()


def _fork_again(listener: socket.socket, serve: Callable[[], None]) -> None:
    """In a child, whose own child is nobody's once this one has ended."""
    signals.forget()
    os.setsid()
    if os.fork():
        os._exit(0)
    code = 1
    try:
        _prepare(listener)
        serve()
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def _prepare(listener: socket.socket) -> None:
    descendants.forget_inherited()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    _let_go({listener.fileno()})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a descriptor for each segment that is kept
    listener.setblocking(False)
    gc.freeze()


def _let_go(keep: set[int]) -> None:
    """Put ``/dev/null`` in place of what others wait for the end of; the numbers stay taken, as objects have them."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208  (of names)
        if number not in keep and number != null and _is_waited_for(number):
            os.dup2(null, number, inheritable=number <= 2)
    os.close(null)


def _is_waited_for(descriptor: int) -> bool:
    try:
        mode = os.fstat(descriptor).st_mode
        is_device = stat.S_ISCHR(mode) and not _path(descriptor).startswith(_HARMLESS_DEVICES)
    except OSError:
        return False
    return stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode) or is_device


def _path(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())

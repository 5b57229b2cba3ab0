"""Open the pool of a training that shares batches, and start a producer where none runs.

The producer is started as workers are (`starter_for`). It is forked from the training, and inherits the dataset, or it
is forked from the training's clean server, and its workers unpickle the dataset. It must outlive its training, so it
has a session of its own: Ctrl-C reaches only the trainings, and the producer ends after them. Sockets, pipes and
devices that it inherits become ``/dev/null``. So a port and the memory of a GPU are free once the training has ended,
and a reader of the training's output sees its end. A terminal or a file as output stays.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import stat
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpex.errors import ShareError
from dpex.measure.settings import LOCAL
from dpex.pools.local.forking import UNKNOWN_EXIT, forget_handlers, fork_helper
from dpex.pools.share.meeting import Facts, MeetingPlace, facts_of
from dpex.system.cpus import rank, ranks
from dpex.transport.arena import forget_inherited

if TYPE_CHECKING:
    from dpex.pools.agent.pool import RemotePool
    from dpex.pools.local.fork_server import TemplateStarter
    from dpex.pools.local.worker_process import WorkerPlan

_HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/pts/")
START_LIMIT_S = 60.0
"""Seconds until a fork counts as hanging. Forking a large training takes a second."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """A loader's use of a share after ``passes_before`` passes. ``rank``: data-parallel rank if ranks of a job share.

    ``kept_bytes``: bytes of batches that are kept for slower trainings.
    """

    name: str
    kept_bytes: int
    passes_before: int
    rank: int | None = None

    def key(self, environment: Mapping[str, str]) -> str:
        """Return the key that trainings must have in common to meet: name, pass, and the rank's part of the data."""
        of_job = str(rank(environment)), str(ranks(environment))
        part = of_job if self.rank is None else ("group", str(self.rank))
        return "\n".join((self.name, str(self.passes_before), *part))

    def open(self, plan: WorkerPlan, first_workers: int, context: Any) -> RemotePool:
        """Return the pool of one pass. Raises ShareError, OSError if the system refuses, and the errors of pickling."""
        from dpex.pools.agent.pool import RemotePool
        from dpex.pools.share.nodes import SharedNodes

        facts = facts_of(self.name, plan.setup)
        place, order = MeetingPlace(self.key(os.environ)), (facts, self.kept_bytes, rank(os.environ))
        nodes = SharedNodes(place, partial(_start, facts, plan, context), self.name)
        return RemotePool(nodes, lambda _: order, first_workers=first_workers, name=LOCAL)


def _start(facts: Facts, plan: WorkerPlan, context: Any, listener: socket.socket) -> None:
    """Start a producer, which keeps the listener."""
    from dpex.pools.local.clean_server import CleanStarter, starter_for

    starter = starter_for(context, plan)
    try:
        if isinstance(starter, CleanStarter):
            starter.start_apart(listener, partial(_produce, facts))
        else:
            start_producer(listener, partial(_produce, facts, listener, starter))
    finally:
        starter.close()


def _produce(facts: Facts, listener: socket.socket, starter: TemplateStarter) -> None:
    from dpex.pools.local.fork_server import keep_from_templates
    from dpex.pools.share.producer import Producer, ProducerPool

    _prepare(listener)
    keep_from_templates(listener)
    Producer(listener, facts, ProducerPool(starter)).run()


def start_producer(listener: socket.socket, serve: Callable[[], None]) -> None:
    """Have ``serve`` called in a process that is forked from this one and is a child of init. Raises ShareError."""
    process = fork_helper(partial(_fork_again, serve), "dpex-share")
    process.join(START_LIMIT_S)
    if process.exitcode not in (0, UNKNOWN_EXIT):
        process.kill()
        raise ShareError(
            f"share: the process that makes the batches could not be started (exit code {process.exitcode})"
        )


def _fork_again(serve: Callable[[], None]) -> None:
    """Fork again in a child, so that init is the parent of the producer once this child has ended."""
    forget_handlers()
    os.setsid()
    if os.fork():
        os._exit(0)
    code = 1
    try:
        serve()
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def _prepare(listener: socket.socket) -> None:
    forget_inherited()
    _let_go({listener.fileno()})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each kept segment needs a descriptor
    listener.setblocking(False)
    gc.freeze()


def _let_go(keep: set[int]) -> None:
    """Replace inherited pipes, sockets and devices by ``/dev/null``, because another process may wait until they are
    closed. The descriptor numbers stay in use, because Python objects hold them."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208  (of names)
        if number not in keep and number != null and _is_waited_for(number):
            os.dup2(null, number, inheritable=number <= 2)
    os.close(null)


def _is_waited_for(descriptor: int) -> bool:
    try:
        mode = os.fstat(descriptor).st_mode
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        is_device = stat.S_ISCHR(mode) and not path.startswith(_HARMLESS_DEVICES)
    except OSError:
        return False
    return stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode) or is_device

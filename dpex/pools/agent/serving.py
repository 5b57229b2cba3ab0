"""An agent: a process on a node that keeps a pool of local workers for a trainer on another node.

An agent drives a `LocalPool` as an engine does. Tickets, requests, results and events travel as frames over the agent's
connection, which sends large buffers directly from the workers' slots. A slot is free again once its bytes are sent.
The process imports torch once, has one thread, and does not use Ray. The process that forks the workers unpickles the
dataset once, and the workers share it. The agent ends when its connection or its guardian ends.

While more than `MOST_UNSENT_BYTES` are unsent, the agent does not read results, so the workers wait for the network.

An agent receives ``("open", pool, order)`` (see `PoolOrder`), ``("resize", wanted)``, ``("tickets", worker, epoch,
queue, pickle)`` with a pickle of numbers and indices, ``("adopt", worker, logical, state)``, ``("ask_state", worker,
logical)``, ``("epoch", number)`` and ``("close", grace_s)``. It sends reports, ``("report", pool, results, events,
failed, delay, traffic)``; see `AgentReport`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dpex._torch import WorkerInfo, set_worker_info
from dpex._torch import collate as torch_collate
from dpex.cache.files import hold_all_stores
from dpex.cache.within import caches_in
from dpex.errors import DpexError
from dpex.measure.pool_reading import LINK, PoolReading
from dpex.pools.local.fork_server import ForkStarter, in_common, keep_from_templates
from dpex.pools.local.handles import LocalWorkerHandle
from dpex.pools.local.pool import LocalPool
from dpex.pools.local.worker_process import WorkerPlan
from dpex.schedule.events import WorkerGone, plain
from dpex.schedule.schedule import Ticket
from dpex.system.clock import Clock, monotonic
from dpex.system.meter import DelayMeter
from dpex.transport.codec import codec_signature, slots_of
from dpex.transport.frames import FrameReader, FrameWriter
from dpex.transport.memory import map_parts
from dpex.transport.pickling import unpack
from dpex.worker.setup import WorkerSetup

MOST_UNSENT_BYTES = 64 << 20
"""Unsent bytes at which the agent stops reading results: two large batches, one being sent and one queued."""
TRY_AGAIN_MS = 10
"""Milliseconds until the next attempt to send to a worker whose socket is full. An event ends the wait."""
_OF_A_WORKER = ("adopt", "ask_state")
"""Requests for one worker, which keep their order relative to the tickets of that worker."""
SLEEP_MS = 1000
"""Maximum milliseconds until the pool checks for overdue starts."""
LOOK_EVERY_S = 0.25
"""Minimum seconds between two readings of a meter, which take microseconds each. A tuner's window is rarely shorter."""
_INFO_BYTES = 256
"""Size of the buffer for ``TCP_INFO``, the kernel's counts of a connection. The counts take fewer bytes."""
_AT_RTT, _AT_ACKED, _AT_LEAST_RTT, _AT_BUSY, _AT_RESENT = 68, 120, 148, 168, 208
"""Offsets in ``struct tcp_info`` of <linux/tcp.h>, to which fields are only ever appended. The last of these fields,
``tcpi_bytes_retrans``, came with Linux 4.19."""
_UNKNOWN_RTT = 0xFFFFFFFF
_PER_S = 1_000_000
"""The kernel counts microseconds."""


class Agent:
    """Serves a trainer, one pool after the other, until the connection or the guardian ends. ``guardian``: the pidfd of
    the guardian, or -1."""

    def __init__(self, connection: socket.socket, guardian: int) -> None:
        self._connection = connection
        self._guardian = guardian
        self._reader = FrameReader(connection)
        self._writer = FrameWriter(connection)
        self._traffic = TrafficMeter(connection)
        self._delay = DelayMeter()
        self._pool: LocalPool | None = None
        self._number = 0
        self._wanted = 0
        self._results: list[tuple[Any, ...]] = []
        self._buffers: list[Any] = []
        self._reported: tuple[Any, ...] = ()
        self._backlog: dict[int | None, deque[tuple[Any, ...]]] = {}
        """Requests that the pool has not accepted yet, in order, by worker. None: requests for any worker."""
        self._caches: list[Any] = []
        """References to the sample caches of this node, so that they outlive the last worker of a pool."""
        self._came_at: dict[tuple[int, int], float] = {}
        """Time of each ticket's arrival at the agent, by epoch and number."""
        keep_from_templates(connection)

    def run(self) -> None:
        while not self._reader.ended:
            for what, *about in self._reader.read():
                if what in _OF_A_WORKER:
                    self._submit(about[0], what, *about)
                else:
                    getattr(self, f"_do_{what}")(*about)
            self._work_off()
            try:
                is_sent = self._writer.flush()
            except OSError:
                break
            if self._wait(is_sent):
                break
        self._do_close(0.0)

    def _wait(self, is_sent: bool) -> bool:
        """Sleep until there is something to do; return True if the guardian has ended."""
        poller = select.poll()
        poller.register(self._connection, select.POLLIN | (0 if is_sent else select.POLLOUT))
        if self._guardian >= 0:
            poller.register(self._guardian, select.POLLIN)
        pool, soon = self._pool, bool(self._backlog)
        if pool is not None and self._may_listen():
            soon = soon or pool.is_unsettled
            for fd in pool.descriptors():
                poller.register(fd, select.POLLIN)
        return any(fd == self._guardian for fd, _ in poller.poll(TRY_AGAIN_MS if soon else SLEEP_MS))

    # -- requests ------------------------------------------------------------------------------------------------

    def _do_open(self, number: int, order: tuple[Any, ...]) -> None:
        self._do_close(0.0)
        asked = PoolOrder(*order)
        starter = ForkStarter(lambda: in_common(open_plan(asked)))
        self._pool = LocalPool(starter, shared_queue=asked.shared_queue, first_workers=0, on_result=self._take)
        self._number = number

    def _do_close(self, grace_s: float) -> None:
        if self._pool is not None:
            self._caches = hold_all_stores()
            self._pool.close(grace_s)
        self._pool, self._reported, self._delay = None, (), DelayMeter()
        self._backlog.clear()
        self._came_at.clear()
        self._results, self._buffers = [], []

    def _do_resize(self, wanted: int) -> None:
        self._wanted = wanted
        self._open_pool.resize(wanted)

    def _do_tickets(self, worker: int | None, epoch: int, queue: int, data: bytes) -> None:
        tickets = [Ticket(number, index, queue) for number, index in pickle.loads(data)]
        self._came_at.update(dict.fromkeys([(epoch, ticket.number) for ticket in tickets], monotonic()))
        self._submit(worker, "send", tickets, epoch, worker)

    def _do_epoch(self, epoch: int) -> None:
        """Forget tickets that any worker may make. As in torch, logical workers still make the tickets that they
        hold."""
        self._backlog.pop(None, None)
        self._came_at.clear()
        self._open_pool.new_epoch(epoch)

    @property
    def _open_pool(self) -> LocalPool:
        assert self._pool is not None, "a request before the pool was opened"
        return self._pool

    def _submit(self, worker: int | None, *request: Any) -> None:
        self._backlog.setdefault(worker, deque()).append(request)
        self._send_backlog(worker)

    def _send_backlog(self, worker: int | None) -> None:
        """Pass requests for a worker to the pool, in order, until the pool refuses one. Drop the requests if the worker
        has ended, because the trainer gets a report of that end."""
        backlog, pool = self._backlog[worker], self._open_pool
        while backlog:
            if worker is None and not self._wanted:
                self._hand_back(backlog)
                break
            if worker is None or worker in pool.workers():
                what, *arguments = backlog[0]
                if getattr(pool, what)(*arguments) is False:
                    return
            backlog.popleft()
        del self._backlog[worker]

    def _hand_back(self, backlog: deque[tuple[Any, ...]]) -> None:
        """Report tickets as lost, so that other nodes make them, because no worker is wanted on this node any more."""
        for _, tickets, epoch, _ in backlog:
            numbers = tuple(ticket.number for ticket in tickets)
            gone = WorkerGone("", -1, epoch, numbers, None, expected=True, why="its node gives up its workers")
            self._put([plain(gone)])
        backlog.clear()

    # -- results and events --------------------------------------------------------------------------------------

    def _may_listen(self) -> bool:
        return self._writer.pending_bytes < MOST_UNSENT_BYTES

    def _work_off(self) -> None:
        pool = self._pool
        if pool is None or not self._may_listen():
            return
        for worker in list(self._backlog):
            self._send_backlog(worker)
        events = pool.poll()
        news = [plain(event) for event in events]
        events.clear()
        refused = f"no worker can be started there: {pool.counts.why_most}" if pool.counts.most == 0 else None
        facts = (pool.failed or refused, self._delay.delay_of(pool.pids))
        if self._results or news or facts != self._reported:
            self._reported = facts
            self._put(news)

    def _put(self, events: list[tuple[Any, ...]]) -> None:
        failed, delay = self._reported or (None, None)
        found = self._traffic.news()
        traffic = None if found is None else {name: getattr(found, name) for name in LINK}
        header = ("report", self._number, self._results, events, failed, delay, traffic)
        self._writer.add_frame(header, self._buffers)
        self._results, self._buffers = [], []

    def _take(
        self, worker: LocalWorkerHandle, epoch: int, number: int, kind: int, node: Any, times: tuple[Any, ...]
    ) -> None:
        """Keep a result, and lease its slots until they have been sent."""
        leased = slots_of(node, worker.lease) if node is not None else {}
        places = []
        for (segment, slot), base in leased.items():
            places.append((segment, slot, len(self._buffers)))
            self._buffers.append(base)
        here_s = monotonic() - self._came_at.pop((epoch, number), 0.0)
        self._results.append((worker.number, epoch, number, kind, node, times, places, here_s))


# -- the shipped setup -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ShippedContents:
    """The setup, and the trainer's ``default_collate_fn_map`` of torch, which the user may have changed."""

    setup: WorkerSetup
    collate_entries: dict[Any, Any] = field(default_factory=lambda: dict(torch_collate.default_collate_fn_map))


class PoolOrder(NamedTuple):
    """The pool that an agent is to open. ``path``: The file with the setup. ``probes``: Whether to test index 0 first.

    ``codec``: See `dpex.transport.codec.codec_signature`.
    """

    shared_queue: bool
    path: str
    codec: str
    probes: bool


class UnfitError(DpexError):
    """A node lacks a module or a file that the dataset needs."""


def open_plan(order: PoolOrder) -> WorkerPlan:
    """Return the plan of the workers. The template process, which forks the workers, runs this function, so that they
    share the plan. Raises UnfitError, and the errors of unpacking."""
    if order.codec != codec_signature():
        raise UnfitError("torch there has other number types than the trainer's torch")
    with Path(order.path).open("rb") as file:
        header, *buffers = map_parts(file.fileno())
    contents: ShippedContents = unpack(header, buffers)
    torch_collate.default_collate_fn_map.update(contents.collate_entries)
    if order.probes and not contents.setup.iterable:
        _probe(contents.setup)
    return WorkerPlan(contents.setup, order.shared_queue, remote=True)


def _probe(setup: WorkerSetup) -> None:
    """Get one sample in a process of its own, so that it changes nothing in this process. Raises UnfitError."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            os.write(write, _what_lacks(setup)[: os.fpathconf(write, "PC_PIPE_BUF")])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        lacks = pipe.read()
    os.waitpid(pid, 0)
    if lacks:
        raise UnfitError(f"a sample cannot be fetched there: {lacks.decode(errors='replace')}")


def _what_lacks(setup: WorkerSetup) -> bytes:
    """Return the error of a missing module or file, or b"". Any other failure is an error of the dataset, and is raised
    when training asks for the sample."""
    set_worker_info(WorkerInfo(id=0, num_workers=setup.num_workers, seed=setup.base_seed, dataset=setup.dataset))
    for cache in caches_in(setup.dataset):
        cache.stop_caching()  # worker_init_fn may change samples, and does not run in this process
    try:
        setup.dataset[0]
    except (ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}".encode()
    except Exception:
        return b""
    return b""


# -- the network -------------------------------------------------------------------------------------------------------


def tcp_counts(connection: socket.socket) -> PoolReading | None:
    """Return the counts of a connection; None if it is no TCP connection, or the kernel does not count them."""
    try:
        found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except (OSError, AttributeError):
        return None
    return counts_in(found)


def counts_in(found: bytes) -> PoolReading | None:
    """Return the counts in a ``struct tcp_info``; None if the struct is too short."""
    if len(found) < _AT_RESENT + 8:
        return None
    acked, busy, resent = (struct.unpack_from("@Q", found, at)[0] for at in (_AT_ACKED, _AT_BUSY, _AT_RESENT))
    latest, least = (struct.unpack_from("@I", found, at)[0] for at in (_AT_RTT, _AT_LEAST_RTT))
    round_trip = latest if least == _UNKNOWN_RTT else least
    return PoolReading(
        links=1, sent_bytes=acked, resent_bytes=resent, sending_s=busy / _PER_S, round_trip_s=round_trip / _PER_S
    )


class TrafficMeter:
    def __init__(self, connection: socket.socket, clock: Clock = monotonic) -> None:
        self._connection = connection
        self._clock = clock
        self._looked_at = 0.0
        self._counts = PoolReading()

    def news(self) -> PoolReading | None:
        """Return the traffic since the last reading; None if it is too early, or the kernel does not count it."""
        now = self._clock()
        if now - self._looked_at < LOOK_EVERY_S:
            return None
        self._looked_at = now
        found = tcp_counts(self._connection)
        if found is None:
            return None
        before, self._counts = self._counts, found
        return found.since(before)

"""An agent: a process on a node that keeps a pool of local workers for a trainer elsewhere.

It is a `LocalPool` with a connection in place of an engine. Tickets and requests come as frames, and what the pool
tells goes back as frames; large buffers go straight from the workers' slots to the connection, and a slot is given back
when its bytes have been sent, or compressed where that pays (see `compressing`). The process imports torch once, has
one thread, and knows nothing of Ray. The dataset is unpacked once, in the process that forks the workers, which share
it.

It ends with its connection and with its guardian. While more than `MOST_UNSENT_BYTES` wait to be sent, workers are not
listened to: they wait with their results until the network has taken what there is. These are bytes as they travel:
what is compressed counts for what it is compressed to, as that is what is kept and what the network has to take.

Frames to an agent: ``("open", pool, order)`` (see `PoolOrder`), ``("resize", wanted)``, ``("tickets", worker, epoch,
queue, pickle, again)`` where the pickle is of numbers and indices, and ``again`` says that the trainer has their
batches, ``("adopt", worker, logical, state, streams)``, ``("ask_state", worker, logical)``, ``("epoch",
number)``, ``("close", grace_s)``. From a trainer on the same machine there is only ``("lend", order)``, with a
descriptor: see `dpex.pools.agent.near`.

Frames from an agent: ``("told", pool, results, events, failed, delay, traffic)``: what the workers made and what else
happened, why the pool cannot work if so, how long workers wait for a CPU, and what the connection carried, if that is
news; see `dpex.pools.agent.pool`. An event ``("uncompressed", here)`` comes first where Zstandard is installed at one
end only: at this one if ``here``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import select
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import torch.multiprocessing

from dpex.core.events import Notice, WorkerGone
from dpex.core.schedule import Ticket
from dpex.pools.agent.compressing import BufferCompressor
from dpex.pools.agent.connection import TrainerAddress
from dpex.pools.agent.connections import Connections
from dpex.pools.agent.delay import DelayMeter
from dpex.pools.agent.events import plain
from dpex.pools.agent.frames import FrameReader, FrameWriter
from dpex.pools.agent.shipped import PoolOrder, ShippedPlan
from dpex.pools.agent.traffic import TrafficMeter
from dpex.pools.local.fork_server import ForkStarter, keep_from_templates
from dpex.pools.local.handles import LocalWorkerHandle
from dpex.pools.local.pool import LocalPool
from dpex.system.clock import monotonic
from dpex.system.cpus import usable_cpus
from dpex.transport.codec import slots_of
from dpex.transport.compression import can_compress

MOST_UNSENT_BYTES = 64 << 20
"""Two large batches: one on the wire and one behind it."""
TRY_AGAIN_MS = 10
"""A worker whose socket is full is tried again after so long, or when anything happens."""
SLEEP_MS = 1000
"""The pool looks at least so often whether what it started is overdue."""


class AgentPool(LocalPool):
    """A local pool whose results are handed on undecoded, as the workers sent them."""

    def __init__(self, forward: Callable[..., None], order: PoolOrder) -> None:
        self._forward = forward
        super().__init__(_starter(order), shared_queue=order.shared_queue, first_workers=0)

    def _result(self, worker: LocalWorkerHandle, epoch: int, number: int, *rest: Any) -> None:
        self._taken_in += 1
        self._forward(worker, epoch, number, *rest, is_wanted=epoch == self._epoch)


def _starter(order: PoolOrder) -> ForkStarter:
    return ForkStarter(torch.multiprocessing.get_context("fork"), ShippedPlan(order))


class Agent:
    """Serves a trainer, one pool after the other, until the connection ends, or the process behind the descriptor
    ``guardian`` (-1: there is none to watch). ``trainer``: where it is reached, if over a network."""

    def __init__(self, connection: socket.socket, guardian: int, trainer: TrainerAddress | None = None) -> None:
        self._connection = connection
        self._connections = Connections(connection, trainer)
        self._guardian = guardian
        self._reader = FrameReader(connection)
        self._writer = FrameWriter(connection)
        self._pool: AgentPool | None = None
        self._number = 0
        self._wanted = 0
        self._results: list[tuple[Any, ...]] = []
        self._buffers: list[Any] = []
        self._told: tuple[Any, ...] = ()
        self._backlog: dict[int | None, deque[tuple[Any, ...]]] = {}
        """Requests that the pool does not take yet, in order, by worker; None: of any worker."""
        self._came_at: dict[tuple[int, int], float] = {}
        """When each ticket came here, by epoch and number."""
        self._replays: set[tuple[int, int]] = set()
        """Tickets whose batches the trainer has, by epoch and number: what is made of them is not sent."""
        self._delay = DelayMeter()
        self._traffic = TrafficMeter()
        self._compressor: BufferCompressor | None = None
        keep_from_templates(connection)

    def run(self) -> None:
        """The loop."""
        while not self._reader.ended:
            for header in self._reader.read():
                getattr(self, f"_do_{header[0]}")(*header[1:])
            self._work_off()
            try:
                is_sent = self._writer.flush()
            except OSError:
                break
            if self._wait(is_sent):
                break
        self._do_close(0.0)

    def _wait(self, is_sent: bool) -> bool:
        """Sleep until there is something to do; True if the guardian has ended."""
        poller = select.poll()
        blocked = [] if is_sent else self._writer.blocked()
        for connection in blocked:
            poller.register(connection, select.POLLOUT)
        poller.register(self._connection, select.POLLIN | (select.POLLOUT if self._connection in blocked else 0))
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
        self._pool, self._number = AgentPool(self._take, asked), number
        can = can_compress()
        self._compressor = BufferCompressor(usable_cpus(), self._flush) if asked.decompresses and can else None
        if asked.decompresses != can:
            self._put([("uncompressed", can)])

    def _do_lend(self, order: tuple[Any, ...]) -> None:
        """Fork the process that forks workers, for a trainer on this machine, which serves them by itself.

        Without a descriptor, as this process had none left for it, the trainer sees its own end closed.
        """
        multiprocessing.active_children()  # reaps those that have ended
        if self._reader.descriptors:
            with socket.socket(fileno=self._reader.descriptors.popleft()) as control:
                _starter(PoolOrder(*order)).start(control)

    def _do_close(self, grace_s: float) -> None:
        if self._pool is not None:
            self._pool.close(grace_s)
        self._pool, self._told, self._delay = None, (), DelayMeter()
        self._backlog.clear()
        self._came_at.clear()
        self._replays.clear()
        self._results, self._buffers = [], []

    def _do_resize(self, wanted: int) -> None:
        self._wanted = wanted
        self._open_pool.resize(wanted)

    def _do_tickets(self, worker: int | None, epoch: int, queue: int, data: bytes, again: bool) -> None:
        tickets = [Ticket(number, index, queue) for number, index in pickle.loads(data)]
        now = monotonic()
        keys = [(epoch, ticket.number) for ticket in tickets]
        if again:
            self._replays.update(keys)
        else:
            self._replays.difference_update(keys)
            self._came_at.update(dict.fromkeys(keys, now))
        self._submit(worker, "send", tickets, epoch, worker)

    def _do_adopt(self, worker: int, logical: int, state: bytes | None, streams: int) -> None:
        self._submit(worker, "adopt", worker, logical, state, streams)

    def _do_ask_state(self, worker: int, logical: int) -> None:
        self._submit(worker, "ask_state", worker, logical)

    def _do_epoch(self, epoch: int) -> None:
        """Forget what any worker might make; logical workers still make what they hold, as in torch."""
        self._backlog.pop(None, None)
        self._came_at.clear()
        self._replays.clear()
        self._open_pool.new_epoch(epoch)

    @property
    def _open_pool(self) -> AgentPool:
        assert self._pool is not None, "a request before the pool was opened"
        return self._pool

    def _submit(self, worker: int | None, *request: Any) -> None:
        self._backlog.setdefault(worker, deque()).append(request)
        self._send_backlog(worker)

    def _send_backlog(self, worker: int | None) -> None:
        """Hand on requests of a worker as far as the pool takes them, in order; those of one that has gone are
        dropped, as the trainer hears of its end."""
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
        """No worker is wanted here any more: others make these tickets."""
        for _, tickets, epoch, _ in backlog:
            numbers = tuple(ticket.number for ticket in tickets)
            gone = WorkerGone("", -1, epoch, numbers, None, expected=True, why="its node gives up its workers")
            self._put([plain(gone)])
        backlog.clear()

    # -- what happened -------------------------------------------------------------------------------------------

    def _may_listen(self) -> bool:
        return self._writer.pending_bytes < MOST_UNSENT_BYTES

    def _work_off(self) -> None:
        pool = self._pool
        if pool is None or not self._may_listen():
            return
        for worker in list(self._backlog):
            self._send_backlog(worker)
        events = pool.poll()
        told = [plain(event) for event in events if not (isinstance(event, Notice) and event.text == pool.failed)]
        told.sort(key=lambda event: event[0] != "splitting")  # before the results
        events.clear()
        facts = (pool.failed, self._delay.of(pool.handles))
        if self._results or told or facts != self._told:
            self._told = facts
            self._put(told)

    def _put(self, events: list[tuple[Any, ...]]) -> None:
        failed, delay = self._told or (None, None)
        traffic = self._traffic.news(self._connections.all)
        if traffic is not None and (told := self._connections.look(traffic, self._writer)) is not None:
            events.append(plain(Notice(told)))
        if traffic is not None and self._compressor is not None:
            waiting_bytes = self._traffic.unsent_bytes + self._writer.pending_bytes
            self._compressor.look(traffic, waiting_bytes, len(self._open_pool.workers()))
        header = ("told", self._number, self._results, events, failed, delay, None if traffic is None else (*traffic,))
        self._writer.put(header, self._buffers)
        self._results, self._buffers = [], []

    def _flush(self) -> None:
        """Send what waits, while a large buffer is compressed; that the connection has ended shows in `run`."""
        with contextlib.suppress(OSError):
            self._writer.flush()

    def _take(self, worker: LocalWorkerHandle, *result: Any, is_wanted: bool) -> None:
        """A result, and the slots that it lies in, which are lent until they have been sent."""
        epoch, number, kind, node, stages, cpu_s, encode_s, nbytes = result
        leased = slots_of(node, worker.lease) if node is not None else {}
        worker.leased = {}
        if (epoch, number) in self._replays:
            self._replays.discard((epoch, number))
            is_wanted = False
        if not is_wanted:
            return
        compressor = self._compressor
        if compressor is not None:
            compressor.made(nbytes, stages[0] + stages[1] + encode_s, cpu_s)
        places = []
        for which, ((segment, slot), base) in enumerate(leased.items()):
            places.append((segment, slot, len(self._buffers)))
            self._buffers.append(base if compressor is None else compressor.compress(which, base))
        here_s = monotonic() - self._came_at.pop((epoch, number), 0.0)
        self._results.append(
            (worker.number, epoch, number, kind, node, tuple(stages), cpu_s, encode_s, nbytes, places, here_s)
        )

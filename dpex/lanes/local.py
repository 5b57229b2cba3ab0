"""Worker processes on this machine, without a thread in the trainer. See `template` and `localworker`.

The trainer owns one socket per worker (results, and tickets when there are logical workers), the shared ticket socket,
and the board. What a dead worker held is known from the messages sent to it, or from the board when the queue is
shared; the moment between taking a message and writing it down is covered by `recount`.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import logging
import marshal
import mmap
import os
import pickle
import select
import signal
import socket
import sys
import termios
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch.multiprocessing

from dpex.alerts import warn
from dpex.lanes.base import CRASHES_IN_A_ROW, Event, Gone, LaneCounts, LaneTimes, Made, Note, Released, Snapshot, Up
from dpex.lanes.localworker import BATCH, BOARD_ROW, CONTROL_ROW, END, IDLE, TICKET_BYTES, WorkerPlan, receive
from dpex.lanes.template import Parcel, TemplateHandle
from dpex.schedule import Ticket
from dpex.transport.arena import Segment, SegmentSpec, open_segment
from dpex.transport.codec import Decoder
from dpex.worker import Failure, RngState, StreamEnd, WorkerSetup

logger = logging.getLogger("dpex")

BOARD_ROWS = 4096
_LONGEST_MESSAGE = 100 << 10
_live_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class WorkerHandle:
    """A local worker as the trainer sees it; offers what `multiprocessing.Process` offers to onlookers."""

    def __init__(self, host: int) -> None:
        self.host = host
        self.pid: int | None = None
        self.exitcode: int | None = None
        self.name = f"dpex-worker-{host}"
        self.daemon = True

    def is_alive(self) -> bool:
        """Whether the process still runs."""
        if self.exitcode is not None or self.pid is None:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended, at most ``timeout`` seconds."""
        if self.pid is None or not self.is_alive():
            return
        with contextlib.suppress(OSError):
            fd = os.pidfd_open(self.pid)
            try:
                select.select([fd], [], [], timeout)
            finally:
                os.close(fd)

    def terminate(self) -> None:
        """SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.pid is not None and self.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class _Host:
    """One worker process: its socket, its segments, and what it was sent."""

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number = number
        self.socket = sock
        self.handle = WorkerHandle(number)
        self.segments: dict[int, Segment] = {}
        self.decoder = Decoder(self._lease)
        self.held: dict[tuple[int, int], Ticket] = {}
        self.leaving = False
        self.started = False
        self.ended = False
        self.exit: tuple[int, int] | None = None

    def _lease(self, segment: int, slot: int, nbytes: int) -> Any:
        return self.segments[segment].view(slot, nbytes)


class LocalLane:
    """See the module; implements `dpex.lanes.base.Lane`."""

    name = "local"

    def __init__(self, setup: WorkerSetup, context: Any, *, shared_queue: bool, first_hosts: int) -> None:
        self.counts = LaneCounts()
        self.times = LaneTimes()
        self.failed: str | None = None
        self._setup = setup
        self._shared = shared_queue
        self._hosts: dict[int, _Host] = {}
        self._by_fd: dict[int, _Host] = {}
        self._groups: dict[int, list[Ticket]] = {}
        self._group = 0
        self._next_host = 0
        self._epoch = 0
        self._leaves_queued = 0
        self._events: list[Event] = []
        self._closed = False
        self._suspicious = False
        self._crashes = 0
        self._buffer = memoryview(bytearray(TICKET_BYTES))
        self._epoll = select.epoll()
        self._board_fd = os.memfd_create("dpex-board")
        os.ftruncate(self._board_fd, BOARD_ROWS * BOARD_ROW.size)
        self._board = mmap.mmap(self._board_fd, BOARD_ROWS * BOARD_ROW.size)
        self._queue: socket.socket | None = None
        self._queue_theirs: socket.socket | None = None
        if shared_queue:
            self._queue, self._queue_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._queue.setblocking(False)
            _live_sockets.add(self._queue)
        self.handles: list[WorkerHandle] = []
        self._start(context, first_hosts)

    # -- starting ------------------------------------------------------------------------------------------------

    def _start(self, context: Any, first_hosts: int) -> None:
        plan = WorkerPlan(self._setup, self._shared)
        self._context, pickler = _safe_context(context, plan)
        self._parcel = Parcel(plan, pickler)
        self._clean = pickler is not None
        self._quick = self._context.get_start_method() == "fork"
        try:
            self._start_template()
            self.resize(first_hosts)
        except BaseException:
            self._release_resources()
            raise

    def _start_template(self) -> None:
        with _without_main_module() if self._clean else contextlib.nullcontext():
            self._template = TemplateHandle(self._context, self._parcel, list(_live_sockets))
        _live_sockets.add(self._template.socket)
        self._epoll.register(self._template.socket.fileno(), select.EPOLLIN)

    def _add_host(self) -> None:
        number, self._next_host = self._next_host, self._next_host + 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        _live_sockets.add(ours)
        host = self._hosts[number] = _Host(number, ours)
        self._by_fd[ours.fileno()] = host
        self.handles.append(host.handle)
        self._epoll.register(ours.fileno(), select.EPOLLIN)
        row = _row(number)
        BOARD_ROW.pack_into(self._board, row, 0, 0)
        fds = [theirs.fileno(), self._board_fd]
        if self._queue_theirs is not None:
            fds.append(self._queue_theirs.fileno())
        try:
            self._template.fork(number, fds, (BOARD_ROWS * BOARD_ROW.size, row))
        finally:
            theirs.close()
        self.counts.requested += 1

    # -- size ----------------------------------------------------------------------------------------------------

    def resize(self, wanted: int) -> None:
        """See `Lane.resize`."""
        self.counts.wanted = wanted
        staying = [host for host in self._hosts.values() if not host.leaving]
        surplus = len(staying) - self._leaves_queued - wanted
        for _ in range(-surplus):
            self._add_host()
        if surplus > 0 and self._shared:
            self._leaves_queued += surplus
            self._send_leaves(surplus)

    def _send_leaves(self, count: int) -> None:
        assert self._queue is not None
        for _ in range(count):
            self._write(self._queue, pickle.dumps(("leave",)))

    def dismiss(self, number: int) -> None:
        """Let one host leave after what it was sent so far (logical workers must have been released before)."""
        host = self._hosts[number]
        if not host.leaving:
            host.leaving = True
            self._write(host.socket, pickle.dumps(("leave",)))

    def hosts(self) -> list[int]:
        """See `Lane.hosts`; a host that is being forked counts, as its messages wait for it in the socket.

        From a clean server the first host takes seconds, so there only those count that have started. Somebody will
        take each "leave" that is queued: nothing may be queued behind the last of them.
        """
        staying = [h.number for h in self._hosts.values() if not (h.leaving or h.ended) and (h.started or self._quick)]
        return staying[: max(0, len(staying) - self._leaves_queued)]

    # -- tickets -------------------------------------------------------------------------------------------------

    def send(self, tickets: list[Ticket], epoch: int, host: int | None = None) -> bool:
        """See `Lane.send`; all tickets of a message belong to one logical worker."""
        group = self._group + 1
        message = ("tickets", group, epoch, tickets[0].queue, [(t.number, t.index) for t in tickets])
        if host is None:
            assert self._queue is not None
            sent = self._write(self._queue, _dumps(message))
        else:
            place = self._hosts[host]
            sent = self._write(place.socket, _dumps(message))
            if sent:
                place.held.update(((epoch, t.number), t) for t in tickets)
        if sent:
            self._group = group
            if host is None:
                self._groups[group] = tickets
        return sent

    def adopt(self, host: int, logical: int, state: RngState | None) -> None:
        """See `Lane.adopt`."""
        self._write(self._hosts[host].socket, pickle.dumps(("adopt", logical, state)), must=True)

    def release(self, host: int, logical: int) -> None:
        """See `Lane.release`."""
        self._write(self._hosts[host].socket, pickle.dumps(("release", logical)), must=True)

    def new_epoch(self, epoch: int) -> None:
        """See `Lane.new_epoch`."""
        self._epoch = epoch
        self._groups.clear()
        BOARD_ROW.pack_into(self._board, CONTROL_ROW, 0, epoch)

    def _write(self, sock: socket.socket, data: bytes, must: bool = False) -> bool:
        """Send one message without blocking; False if the socket is full (``must``: wait for room)."""
        if sock.fileno() < 0:
            return True  # hung up, and soon reported: its tickets come back as lost
        if must:
            sock.setblocking(True)
        try:
            if len(data) <= _LONGEST_MESSAGE:
                sock.send(data)
            else:
                _send_as_file(sock, data)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            return True  # its reader is gone: its tickets come back as lost
        finally:
            if must:
                sock.setblocking(False)
        return True

    # -- what happened -------------------------------------------------------------------------------------------

    def descriptors(self) -> list[int]:
        """See `Lane.descriptors`: the lane's own epoll."""
        return [self._epoll.fileno()]

    def poll(self) -> list[Event]:
        """See `Lane.poll`."""
        for fd, _ in self._epoll.poll(0):
            if fd in self._by_fd:
                self._drain(self._by_fd[fd])
            else:
                self._hear_template()
        if self._suspicious:
            self._recount()
        events, self._events = self._events, []
        return events

    def _drain(self, host: _Host) -> None:
        while True:
            try:
                received = receive(host.socket, self._buffer)
            except BlockingIOError:
                return
            except ConnectionResetError:
                received = None
            if received is None:
                self._hang_up(host)
                return
            self._read(host, *received)

    def _read(self, host: _Host, view: memoryview, fds: list[int]) -> None:
        message, segments, retired = marshal.loads(view)
        for spec, fd in zip(segments, fds, strict=True):
            host.segments[spec[0]] = open_segment(SegmentSpec(*spec), fd)
        kind = message[0]
        if kind == "made":
            self._made(host, message[1], message[2])
        elif kind == "released":
            self._events.append(Released(message[1], host.number, message[2]))
        elif kind == "snapshot":
            self._events.append(Snapshot(*message[1:]))
        elif kind == "bye":
            if self._shared and not host.leaving:
                self._leaves_queued -= 1
            host.leaving = True
        for number in retired:
            host.segments.pop(number, None)

    def _made(self, host: _Host, group: int, results: list[tuple[Any, ...]]) -> None:
        times, epoch_now = self.times, self._epoch
        for epoch, number, kind, node, fetch_s, collate_s, cpu_s, encode_s, nbytes in results:
            host.held.pop((epoch, number), None)
            times.tickets += 1
            times.fetch_s += fetch_s
            times.collate_s += collate_s
            times.encode_s += encode_s
            times.cpu_s += cpu_s
            self._crashes = 0
            if epoch == epoch_now:
                value = _Result(host, kind, node)
                service_s = fetch_s + collate_s + encode_s
                self._events.append(Made(epoch, number, host.number, value, kind == END, service_s, nbytes))
            elif kind == BATCH:
                host.decoder.decode(node)  # nobody wants it: its slots go back at once
        if group:
            self._groups.pop(group, None)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _hear_template(self) -> None:
        for news in self._template.news():
            self._note(news)

    def _note(self, news: tuple[Any, ...]) -> None:
        if news[0] == "dead":
            self._template_died()
            return
        host = self._hosts.get(news[1])
        if host is None:
            return
        if news[0] == "up":
            host.handle.pid = news[2]
            host.started = True
            self.counts.running += 1
            self._events.append(Up(host.number))
        else:
            host.handle.exitcode = news[3]
            host.exit = (news[2], news[3])
            if not host.ended:
                self._drain(host)
            self._hang_up(host)
            self._buried(host)

    def _template_died(self) -> None:
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._epoll.unregister(self._template.socket.fileno())
        if self._closed:
            return
        self._template.join(1.0)
        self._crashes += 1
        self._events.append(Note("the process that starts dpex's local workers ended, and they with it; starting anew"))
        self._start_template()
        for host in list(self._hosts.values()):
            host.exit = host.exit or (host.handle.pid or 0, -signal.SIGKILL)
            self._hang_up(host)
            self._buried(host)

    def _hang_up(self, host: _Host) -> None:
        """The worker's end of the socket is closed; how it ended comes from the template."""
        if not host.ended:
            host.ended = True
            fd = host.socket.fileno()
            self._epoll.unregister(fd)
            del self._by_fd[fd]
            host.socket.close()

    def _buried(self, host: _Host) -> None:
        del self._hosts[host.number]
        self.counts.requested -= 1
        self.counts.running -= host.started
        pid, code = host.exit or (host.handle.pid or 0, 0)
        lost, guilty = self._what_it_held(host)
        expected = host.leaving and code == 0
        self._events.append(Gone(host.number, lost, guilty, expected, _how_it_ended(pid, code), pid))
        if self._shared and not self._hosts and not self._closed:
            self._reclaim()
        if expected or self._closed:
            return
        self._crashes += 1
        if self._crashes > CRASHES_IN_A_ROW + self.counts.wanted:
            return  # the engine says so
        if self._shared:
            self._suspicious = True
        if len([h for h in self._hosts.values() if not h.leaving]) - self._leaves_queued < self.counts.wanted:
            self._add_host()

    def _what_it_held(self, host: _Host) -> tuple[tuple[int, ...], int | None]:
        row = _row(host.number)
        group, working_on = BOARD_ROW.unpack_from(self._board, row)
        guilty = working_on - 1 if working_on else None
        tickets = (
            self._groups.pop(group, [])
            if self._shared
            else [ticket for (epoch, _), ticket in host.held.items() if epoch == self._epoch]
        )
        return tuple(t.number for t in tickets), guilty

    @property
    def crashes(self) -> int:
        """Unexpected ends since the last result of any worker."""
        return self._crashes

    def _recount(self) -> None:
        """After a death: when the queue is empty and every worker idle, whatever is still out was lost unseen."""
        assert self._queue is not None
        if _unread(self._queue) or any(self._busy(host) for host in self._hosts.values()):
            return
        for fd in list(self._by_fd):
            self._drain_fd(fd)
        if _unread(self._queue) or any(self._busy(host) for host in self._hosts.values()):
            return
        self._suspicious = False
        self._leaves_queued = 0  # one may have died as it took its leave
        self._lose_the_rest()
        self.resize(self.counts.wanted)

    def _reclaim(self) -> None:
        """Nobody is left to read the queue: take its messages back."""
        assert self._queue_theirs is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                received = receive(self._queue_theirs, self._buffer, socket.MSG_DONTWAIT)
                if received is None:
                    break
                for fd in received[1]:
                    os.close(fd)
        self._leaves_queued = 0
        self._lose_the_rest()

    def _lose_the_rest(self) -> None:
        lost = tuple(t.number for tickets in self._groups.values() for t in tickets)
        self._groups.clear()
        if lost:
            self._events.append(Gone(-1, lost, None, True, "a worker died as it took them"))

    def _drain_fd(self, fd: int) -> None:
        host = self._by_fd.get(fd)
        if host is not None:
            self._drain(host)

    def _busy(self, host: _Host) -> bool:
        if not host.started:
            return False
        return BOARD_ROW.unpack_from(self._board, _row(host.number)) != IDLE

    # -- closing -------------------------------------------------------------------------------------------------

    def ask_to_end(self, grace_s: float) -> None:
        """Tell everybody to end; idle workers do so at once."""
        if self._closed:
            return
        self._closed = True
        BOARD_ROW.pack_into(self._board, CONTROL_ROW, 1, self._epoch)
        self._hear_template()
        if self._queue is not None:
            with contextlib.suppress(OSError):
                self._queue.shutdown(socket.SHUT_RDWR)
        for host in self._hosts.values():
            if not host.ended:
                with contextlib.suppress(OSError):
                    host.socket.shutdown(socket.SHUT_RDWR)
        self._template.end(grace_s)

    def close(self, grace_s: float = 5.0) -> None:
        """See `Lane.close`."""
        if self._closed:
            return
        self.ask_to_end(grace_s)
        for news in self._template.join(grace_s + 3.0):
            host = self._hosts.get(news[1]) if len(news) > 1 else None
            if host is not None and news[0] == "exit":
                host.handle.exitcode = news[3]
        self.counts = LaneCounts()
        self._release_resources()

    def _release_resources(self) -> None:
        for host in self._hosts.values():
            host.socket.close()
        self._hosts.clear()
        self._by_fd.clear()
        for sock in (self._queue, self._queue_theirs):
            if sock is not None:
                sock.close()
        self._epoll.close()
        with contextlib.suppress(OSError):
            os.close(self._board_fd)
        self._events.clear()


def _row(host: int) -> int:
    """Where a host writes on the board; the first row is the trainer's."""
    return (1 + host % (BOARD_ROWS - 1)) * BOARD_ROW.size


class _Result:
    """An undecoded result; calling it decodes."""

    __slots__ = ("_host", "_kind", "_node")

    def __init__(self, host: _Host, kind: int, node: Any) -> None:
        self._host, self._kind, self._node = host, kind, node

    def __call__(self) -> Any:
        if self._kind == BATCH:
            return self._host.decoder.decode(self._node)
        return StreamEnd() if self._kind == END else Failure(pickle.loads(self._node))


def _dumps(message: Any) -> bytes:
    try:
        return pickle.dumps(message, 5)
    except Exception:
        return bytes(ForkingPickler.dumps(message, 5))


def _send_as_file(sock: socket.socket, data: bytes) -> None:
    fd = os.memfd_create("dpex-tickets")
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(data)
        socket.send_fds(sock, [b"f"], [fd])
    finally:
        os.close(fd)


def _unread(sock: socket.socket) -> int:
    """Bytes that were sent and not yet taken by the other end (SIOCOUTQ)."""
    number = array.array("i", [0])
    fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, number)
    return number[0]


def _how_it_ended(pid: int, code: int) -> str:
    """A sentence for people; the wording of PyTorch where it has one."""
    if code >= 0:
        return f"DataLoader worker (pid(s) {pid}) exited unexpectedly with exit code {code}"
    try:
        description = signal.strsignal(-code) or signal.Signals(-code).name
    except ValueError:
        description = f"signal {-code}"
    hint = " (the kernel's out-of-memory killer sends this signal too)" if -code == signal.SIGKILL else ""
    return f"DataLoader worker (pid {pid}) is killed by signal: {description}{hint}"


def _safe_context(context: Any, plan: WorkerPlan) -> tuple[Any, Callable[[Any], bytes] | None]:
    """The template's start method: torch's or the user's; a clean server where Ray's threads make forking unsafe."""
    if context is None:
        context = torch.multiprocessing.get_context()
    elif not hasattr(context, "get_start_method"):
        context = torch.multiprocessing
    if context.get_start_method() != "fork" or not _ray_is_connected():
        return context, None
    pickler = _cloud_pickler()
    try:
        pickler(plan)
    except Exception as error:
        warn(
            "Ray is connected in this process, whose threads make forking it unsafe, but the dataset cannot be "
            f"pickled ({error!r}); its workers are forked all the same"
        )
        return context, None
    server = torch.multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch", "dpex.lanes.template"])
    return server, pickler


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """Keep multiprocessing from running the user's script in the clean server.

    What the script defines travels by value (cloudpickle); run without a ``__main__`` guard, it would start training.
    """
    main = sys.modules["__main__"]
    hidden = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    for name in hidden:
        setattr(main, name, None)
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)


def _ray_is_connected() -> bool:
    ray = sys.modules.get("ray")
    return bool(getattr(ray, "is_initialized", bool)())


def _cloud_pickler() -> Callable[[Any], bytes]:
    from dpex.transport.parcel import cloud_dumps

    return cloud_dumps

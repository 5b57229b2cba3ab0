"""A small HTTP server for the endpoint: one daemon thread ("dpex-metrics"), one loop, requests without a body.

The training loop pays for every microsecond in which this thread has the interpreter. The standard library's server
takes 0.45 ms of CPU for a request, so that a hundred a second would cost training some percent; this one takes a tenth.
No socket ever blocks the loop, TLS included. A request and an answer have a deadline each, however many bytes drip in
between; when there are too many connections an idle one goes (see `dpex.system.listening`), so nobody can keep others
out.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from dpex.system.clock import monotonic
from dpex.system.listening import Listener, one_to_drop, peer_of

logger = logging.getLogger("dpex")

LONGEST_HEAD = 16384
"""Bytes of a request's head; those of browsers, cookies included, have a few thousand."""
MOST_CONNECTIONS = 64
"""Open at a time; beyond that, an idle one makes room."""
BACKLOG = 128
"""Connections that the kernel keeps while nobody accepts them."""
IDLE_S = 30.0
"""How long a connection may ask for nothing."""
REQUEST_S = 10.0
"""How long a request may take to come, from its first byte on."""
ANSWER_S = 30.0
"""How long a client may take to read an answer: the largest have some hundred kilobytes."""
TICK_S = 5.0
"""How often deadlines are looked at where nothing else happens."""
STOP_S = 2.0
"""What hangs is not waited for."""
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Request(NamedTuple):
    """Header names are in lower case."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]


class Answer(NamedTuple):
    """What goes back; ``Content-Length`` and ``Connection`` are the server's."""

    status: str
    headers: list[tuple[str, str]]
    body: bytes


App = Callable[[Request], Answer]


def parsed(head: bytes) -> tuple[Request, bool] | None:
    """A request without its empty line, and whether the connection may be kept; None: it is none."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0") or not words[1].startswith("/"):
        return None
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or " " in name or "\t" in name or (name == "host" and name in headers):
            return None
        headers[name] = value.strip()
    path, _, query = words[1].partition("?")
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    kept = words[2] == "HTTP/1.1" and not has_body and "close" not in headers.get("connection", "").lower()
    return Request(words[0], path, query, headers), kept


def rendered(answer: Answer, *, kept: bool, with_body: bool) -> bytes:
    """As bytes for the wire."""
    status, headers, body = answer
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers)]
    if not status.startswith("304"):
        lines.append(f"Content-Length: {len(body)}")
    lines += [f"Connection: {'keep-alive' if kept else 'close'}", "\r\n"]
    head = "\r\n".join(lines).encode("latin-1")
    return head + body if with_body else head


class _Connection:
    """One client: what came and is no whole request yet, and what is still to be sent.

    rank: whether it is being served, and since when it has been, or has been idle (see `dpex.system.listening.Client`).
    """

    __slots__ = ("ends", "late_at", "peer", "rank", "received", "socket", "to_send", "waits_for")

    def __init__(self, found: socket.socket) -> None:
        self.socket = found
        self.peer = peer_of(found)
        self.received = b""
        self.to_send = memoryview(b"")
        self.ends = False
        self.waits_for = 0
        self.is_idle()

    @property
    def has_request(self) -> bool:
        """Whether the head of a request is here."""
        return b"\r\n\r\n" in self.received

    def is_idle(self) -> None:
        """Nothing is asked for now."""
        self._begin(False, IDLE_S)

    def is_asking(self) -> None:
        """A request has begun to come."""
        if not self.rank[0]:
            self._begin(True, REQUEST_S)

    def is_told(self, answer: bytes) -> None:
        """An answer is to be sent."""
        self.to_send = memoryview(answer)
        self._begin(True, ANSWER_S)

    def _begin(self, busy: bool, seconds: float) -> None:
        now = monotonic()
        self.rank = (busy, now)
        self.late_at = now + seconds


class Server:
    """See the module. Listens from the start; `start` begins to answer."""

    def __init__(self, host: str, port: int, app: App, context: ssl.SSLContext | None = None) -> None:
        """Raises OSError where it cannot listen."""
        family, _, _, _, address = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
        both = host == "::" and socket.has_dualstack_ipv6()
        self._app = app
        self._context = context
        self._socket = socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=both)
        self._socket.setblocking(False)
        if hasattr(socket, "TCP_DEFER_ACCEPT"):  # wakes the loop once per request, not twice
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 1)
        self.address, self.port = self._socket.getsockname()[:2]
        self._wakeup, self._ear = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._ear, READ)
        self._listener = Listener(self._socket, self._selector)
        self._connections: set[_Connection] = set()
        self._stopping = False
        self.thread = threading.Thread(target=self._run, name="dpex-metrics", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self.thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """Idempotent; from any thread, and within `STOP_S` if it is to wait."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._wakeup.send(b"!")
        if wait and threading.current_thread() is not self.thread:
            self.thread.join(STOP_S)

    def abandon(self) -> None:
        """In a forked process: give up what is the parent's."""
        self._listener.close()
        for one in (self._wakeup, self._ear, *(found.socket for found in self._connections)):
            one.close()
        self._selector.close()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                for key, _ in self._selector.select(self._wait_s()):
                    if isinstance(key.data, _Connection):
                        self._go_on(key.data)
                    elif key.data is self._listener:
                        self._accept()
                if self._connections:
                    self._drop_late()
                self._listener.go_on()
        except Exception:
            if not self._stopping:
                logger.exception("metrics are served no more; this is an error in dpex")
        finally:
            self.abandon()

    def _wait_s(self) -> float | None:
        rest_s = self._listener.wait_s()
        if rest_s is not None:
            return rest_s
        return TICK_S if self._connections else None

    def _accept(self) -> None:
        found = self._listener.accept(self._make_room)
        if found is None:
            return
        if len(self._connections) >= MOST_CONNECTIONS:
            self._make_room()
        if self._context is not None:
            try:
                found = self._context.wrap_socket(found, server_side=True, do_handshake_on_connect=False)
            except OSError:  # it has gone already
                found.close()
                return
        connection = _Connection(found)
        self._connections.add(connection)
        self._go_on(connection)

    def _make_room(self) -> bool:
        found = one_to_drop(self._connections)
        if found is not None:
            self._drop(found)
        return found is not None

    def _drop_late(self) -> None:
        now = monotonic()
        for connection in [one for one in self._connections if one.late_at < now]:
            self._drop(connection)

    def _go_on(self, connection: _Connection) -> None:
        """Send and read as far as it goes without waiting."""
        try:
            while connection in self._connections:
                if not connection.to_send:
                    self._read(connection)
                elif self._send(connection):
                    break
        except (BlockingIOError, ssl.SSLWantReadError):
            self._wait(connection, WRITE if connection.to_send and self._context is None else READ)
        except ssl.SSLWantWriteError:
            self._wait(connection, WRITE)
        except OSError:  # it has gone, or speaks no TLS
            self._drop(connection)

    def _send(self, connection: _Connection) -> bool:
        """Whether another request is here already: it waits for its turn, as somebody may send them without end."""
        sent = connection.socket.send(connection.to_send)
        connection.to_send = connection.to_send[sent:]
        if connection.to_send:
            return False
        if connection.ends:
            self._drop(connection)
            return False
        connection.is_idle()
        if connection.has_request:
            self._wait(connection, WRITE)
        return connection.has_request

    def _wait(self, connection: _Connection, event: int) -> None:
        if not connection.waits_for:
            self._selector.register(connection.socket, event, connection)
        elif connection.waits_for != event:
            self._selector.modify(connection.socket, event, connection)
        connection.waits_for = event

    def _drop(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        if connection.waits_for:
            self._selector.unregister(connection.socket)
        connection.socket.close()

    def _read(self, connection: _Connection) -> None:
        if not connection.has_request:
            found = connection.socket.recv(LONGEST_HEAD)
            if not found:
                self._drop(connection)
                return
            connection.received += found
        connection.is_asking()
        head, end, rest = connection.received.partition(b"\r\n\r\n")
        if end:
            connection.received = rest
            self._answer(connection, head)
        elif len(connection.received) > LONGEST_HEAD:
            self._refuse(connection, "431 Request Header Fields Too Large")

    def _answer(self, connection: _Connection, head: bytes) -> None:
        found = parsed(head)
        if found is None:
            self._refuse(connection, "400 Bad Request")
            return
        request, kept = found
        try:
            answer = self._app(request)
        except Exception:
            logger.exception("%s could not be answered; this is an error in dpex", request.path)
            self._refuse(connection, "500 Internal Server Error")
            return
        connection.ends = not kept
        connection.is_told(rendered(answer, kept=kept, with_body=request.method != "HEAD"))

    def _refuse(self, connection: _Connection, status: str) -> None:
        connection.ends = True
        connection.is_told(rendered(Answer(status, [], b""), kept=False, with_body=True))


def tls(certfile: str, keyfile: str | None, client_cafile: str | None) -> ssl.SSLContext:
    """With ``client_cafile`` only clients with a certificate of that authority are served. Raises OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certfile, keyfile)
    if client_cafile is not None:
        context.load_verify_locations(client_cafile)
        context.verify_mode = ssl.CERT_REQUIRED
    return context

"""A small HTTP server for the endpoint: one daemon thread ("dpex-metrics"), one loop, requests without a body.

The training loop pays for every microsecond in which this thread has the interpreter. The standard library's server
takes 0.45 ms of CPU for a request, so that a hundred a second would cost training some percent; this one takes a tenth.
No socket ever blocks the loop, TLS included: who connects and says nothing holds up nobody, and is dropped in the end.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from dpex.clock import monotonic

logger = logging.getLogger("dpex")

LONGEST_HEAD = 16384
MOST_CONNECTIONS = 64
PATIENCE_S = 30.0
"""A connection on which nothing moves for so long is dropped."""
TICK_S = 5.0
FULL_S = 0.1
STOP_S = 2.0
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
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            return None
        headers[name.lower()] = value.strip()
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
    """One client: what came and is no whole request yet, and what is still to be sent."""

    __slots__ = ("ends", "moved_at", "received", "socket", "to_send", "waits_for")

    def __init__(self, found: socket.socket, now: float) -> None:
        self.socket = found
        self.received = b""
        self.to_send = memoryview(b"")
        self.ends = False
        self.moved_at = now
        self.waits_for = 0


class Server:
    """See the module. Listens from the start; `start` begins to answer."""

    def __init__(self, host: str, port: int, app: App, context: ssl.SSLContext | None = None) -> None:
        """Raises OSError where it cannot listen."""
        family, _, _, _, address = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
        both = host == "::" and socket.has_dualstack_ipv6()
        self._app = app
        self._context = context
        self._listener = socket.create_server(address[:2], family=family, backlog=128, dualstack_ipv6=both)
        self._listener.setblocking(False)
        if hasattr(socket, "TCP_DEFER_ACCEPT"):  # wakes the loop once per request, not twice
            self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 1)
        self.port = int(self._listener.getsockname()[1])
        self._bell, self._ear = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, READ)
        self._selector.register(self._ear, READ)
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
            self._bell.send(b"!")
        if wait and threading.current_thread() is not self.thread:
            self.thread.join(STOP_S)

    def abandon(self) -> None:
        """In a forked process: give up what is the parent's."""
        for one in (self._listener, self._bell, self._ear, *(found.socket for found in self._connections)):
            one.close()
        self._selector.close()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                for key, _ in self._selector.select(TICK_S if self._connections else None):
                    if isinstance(key.data, _Connection):
                        self._go_on(key.data)
                    elif key.fileobj is self._listener:
                        self._accept()
                if self._connections:
                    self._drop_late()
        except Exception:
            if not self._stopping:
                logger.exception("metrics are served no more; this is an error in dpex")
        finally:
            self.abandon()

    def _accept(self) -> None:
        try:
            found, _ = self._listener.accept()
            found.setblocking(False)
            if self._context is not None:
                found = self._context.wrap_socket(found, server_side=True, do_handshake_on_connect=False)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # else the loop would spin until a descriptor is free
                time.sleep(FULL_S)
            return
        if len(self._connections) >= MOST_CONNECTIONS:
            found.close()
            return
        connection = _Connection(found, monotonic())
        self._connections.add(connection)
        self._go_on(connection)

    def _drop_late(self) -> None:
        late = monotonic() - PATIENCE_S
        for connection in [one for one in self._connections if one.moved_at < late]:
            self._drop(connection)

    def _go_on(self, connection: _Connection) -> None:
        """Send and read as far as it goes without waiting."""
        try:
            while connection in self._connections:
                if connection.to_send:
                    sent = connection.socket.send(connection.to_send)
                    connection.to_send = connection.to_send[sent:]
                    connection.moved_at = monotonic()
                elif connection.ends:
                    self._drop(connection)
                else:
                    self._read(connection)
        except (BlockingIOError, ssl.SSLWantReadError):
            self._wait(connection, WRITE if connection.to_send and self._context is None else READ)
        except ssl.SSLWantWriteError:
            self._wait(connection, WRITE)
        except OSError:  # it has gone, or speaks no TLS
            self._drop(connection)

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
        if b"\r\n\r\n" not in connection.received:
            found = connection.socket.recv(LONGEST_HEAD)
            if not found:
                self._drop(connection)
                return
            connection.received += found
            connection.moved_at = monotonic()
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
        connection.to_send = memoryview(rendered(answer, kept=kept, with_body=request.method != "HEAD"))

    def _refuse(self, connection: _Connection, status: str) -> None:
        connection.ends = True
        connection.to_send = memoryview(rendered(Answer(status, [], b""), kept=False, with_body=True))


def tls(certfile: str, keyfile: str | None, client_cafile: str | None) -> ssl.SSLContext:
    """With ``client_cafile`` only clients with a certificate of that authority are served. Raises OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certfile, keyfile)
    if client_cafile is not None:
        context.load_verify_locations(client_cafile)
        context.verify_mode = ssl.CERT_REQUIRED
    return context

"""The endpoint's HTTP server: `http.server` with a limit on connections, deadlines, and TLS.

One daemon thread ("dpex-metrics") accepts connections. Each connection carries one request and has a daemon thread
("dpex-metrics-request") that ends with it. The training loop never waits for a client. A request must arrive
within `TIMEOUT_S`, and its answer must be read within `TIMEOUT_S`. While `MOST_CONNECTIONS` are open, a new connection
closes the oldest one.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

logger: logging.Logger = logging.getLogger("dpex")

MOST_CONNECTIONS = 32
"""Maximum number of open connections, and so of threads for requests."""
TIMEOUT_S = 30.0
"""Seconds that a client may take to send its request, and again to read the answer."""
REST_S = 0.2
"""Seconds between attempts to accept a connection while the process has no free file descriptor."""
STOP_S = 2.0
"""Seconds that `Server.stop` waits for each thread; they usually end within milliseconds."""


class Request(NamedTuple):
    """A GET or HEAD request. Names in ``headers`` are case-insensitive."""

    path: str
    query: str = ""
    headers: Mapping[str, str] = {}


class Answer(NamedTuple):
    """A response; the server adds ``Content-Length``, and leaves the body out for HEAD."""

    status: HTTPStatus
    headers: list[tuple[str, str]]
    body: bytes


App = Callable[[Request], Answer]


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = TIMEOUT_S
    disable_nagle_algorithm = True  # the body is a second packet, which Nagle's algorithm would delay
    server_version, sys_version = "dpex", ""

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        try:
            answer = self.server.app(Request(path, query, self.headers))  # type: ignore[arg-type]
        except Exception:
            logger.exception("metrics: %s could not be answered; this is an error in dpex", path)
            answer = Answer(HTTPStatus.INTERNAL_SERVER_ERROR, [], b"")
        self.send_response(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        logger.debug(f"metrics: {format}", *arguments)


class Server(ThreadingHTTPServer):
    """A server that listens once constructed, and answers from `start` to `stop`. Raises OSError if it cannot listen.

    Args:
        host: Address or name to listen on; "": all IPv4 addresses, "::": all.
        port: Port to listen on; 0: a free port.
        app: Answers requests, in several threads.
        context: TLS; None for plain HTTP.
    """

    def __init__(self, host: str, port: int, app: App, context: ssl.SSLContext | None = None) -> None:
        family, _, _, _, address = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
        super().__init__((host, port), _Handler, bind_and_activate=False)
        self.socket.close()  # HTTPServer.server_bind would look up this machine's name in the DNS
        both = host == "::" and socket.has_dualstack_ipv6()
        self.socket: socket.socket = socket.create_server(address[:2], family=family, backlog=128, dualstack_ipv6=both)
        self.address: str
        self.port: int
        self.address, self.port = self.socket.getsockname()[:2]
        self.app = app
        self._context = context
        self._stopping = threading.Event()
        self._open: dict[Any, threading.Thread] = {}
        self.thread: threading.Thread = threading.Thread(target=self._run, name="dpex-metrics", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.handle_request()  # not serve_forever, which wakes up twice a second
        self.socket.close()
        for connection in list(self._open):  # a connection may have been accepted while `stop` ran
            _hang_up(connection)

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. The TLS handshake takes place in the connection's own thread, at its first read."""
        try:
            connection, client = self.socket.accept()
        except OSError:
            self._stopping.wait(REST_S)  # without a free descriptor accept fails again at once
            raise
        if self._context is not None:
            connection = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, client

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a new thread. If `MOST_CONNECTIONS` are open, close the oldest first."""
        while len(held := list(self._open.items())) >= MOST_CONNECTIONS:
            oldest, thread = held[0]
            _hang_up(oldest)
            thread.join()
        self._open[request] = threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            name="dpex-metrics-request",
            daemon=True,
        )
        self._open[request].start()

    def shutdown_request(self, request: Any) -> None:
        """Close a connection at the end of its thread."""
        super().shutdown_request(request)
        self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log why a client was not served: usually the client left, or does not speak TLS."""
        logger.debug("metrics: %s was not served: %s", client_address, sys.exc_info()[1])

    def stop(self, *, wait: bool = True) -> None:
        """Close the port and all connections; with ``wait``, wait for their threads to end. Idempotent."""
        self._stopping.set()
        threads = [self.thread, *list(self._open.values())]
        for connection in [self.socket, *list(self._open)]:
            _hang_up(connection)  # which wakes up the thread that waits for it
        for thread in threads if wait else ():
            if thread is not threading.current_thread():
                thread.join(STOP_S)

    def abandon(self) -> None:
        """Close the parent's sockets in a forked process."""
        for connection in (self.socket, *self._open):
            connection.close()


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # SSLSocket.shutdown would drop the encryption first


def tls(certfile: str, keyfile: str | None, client_cafile: str | None) -> ssl.SSLContext:
    """Return the TLS context of these files. Raises OSError.

    If ``client_cafile`` is given, only clients with a certificate of that authority are served.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client_cafile)
    context.load_cert_chain(certfile, keyfile)
    context.verify_mode = ssl.CERT_NONE if client_cafile is None else ssl.CERT_REQUIRED
    return context

"""Accept agents that know the run's secret, and drop all other clients.

A thread of its own greets each client, for `GREETING_S` seconds at most. At most `MOST_GREETINGS` clients are greeted
at a time: when one more comes, the oldest is dropped. So a flood of clients costs the trainer a bounded number of
threads and descriptors, and an agent, whose greeting takes milliseconds, still gets in.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable

from dpex.pools.agent.connection import SECRET_BYTES, TrainerAddress, challenge, reader
from dpex.system.clock import monotonic

GREETING_S = 5.0
"""More than an agent on a busy machine needs."""
MOST_GREETINGS = 64
"""As many agents may come at the same moment without any having to try again; few among 1024 descriptors."""
REST_S = 0.2
"""Pause before the next client is accepted where there are no descriptors left for one."""
_BACKLOG = 128
"""Connections that the kernel keeps until they are accepted: twice `MOST_GREETINGS`."""


class AdmissionServer:
    """See the module.

    Args:
        address: Where agents reach this process.
        admit: Called with each accepted connection and the agent's number, in the thread that greeted it.

    Raises:
        OSError: Nothing can listen on ``address``.
    """

    def __init__(self, address: str, admit: Callable[[socket.socket, int], None]) -> None:
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._admit = admit
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self.address, self.port = self._listener.getsockname()[:2]
        self._greeted: dict[socket.socket, None] = {}
        """Clients that are greeted, the oldest first."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="dpex-receive", daemon=True).start()

    def address_of(self, agent: int) -> TrainerAddress:
        """Return where the agent of that number finds this process, and how it introduces itself."""
        return TrainerAddress(self.address, self.port, self.secret, agent)

    def close(self) -> None:
        """Accept no further client. Idempotent; from any thread; the server's threads end soon after."""
        self._closed.set()
        with self._lock:
            for one in (self._listener, *self._greeted):
                _shut_down(one)

    def _accept(self) -> None:
        """Body of the listening socket's thread."""
        with self._listener:
            while not self._closed.is_set():
                try:
                    self._begin(self._listener.accept()[0])
                except (OSError, RuntimeError):  # no descriptor, memory or thread is to be had
                    self._drop_oldest()
                    self._closed.wait(REST_S)

    def _begin(self, client: socket.socket) -> None:
        if len(self._greeted) >= MOST_GREETINGS:
            self._drop_oldest()
        with self._lock:
            self._greeted[client] = None
        try:
            threading.Thread(target=self._greet, args=(client,), name="dpex-greet", daemon=True).start()
        except RuntimeError:
            self._forget(client)
            client.close()
            raise

    def _greet(self, client: socket.socket) -> None:
        """Body of a client's thread."""
        number = None
        with contextlib.suppress(OSError):
            number = challenge(self.secret, client.sendall, reader(client, monotonic() + GREETING_S))
        if self._forget(client) and number is not None and not self._closed.is_set():
            self._admit(client, number)
        else:
            client.close()

    def _forget(self, client: socket.socket) -> bool:
        """Return False if it was dropped."""
        with self._lock:
            return self._greeted.pop(client, self) is None

    def _drop_oldest(self) -> None:
        """Have the client's thread see the end of its connection, and close that."""
        with self._lock:
            if self._greeted:
                oldest = next(iter(self._greeted))
                del self._greeted[oldest]
                _shut_down(oldest)


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

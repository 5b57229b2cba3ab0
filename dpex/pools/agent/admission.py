"""Accepts agents that know the run's secret, and nobody else: one thread, however many clients come.

A client has `GREETING_S` for its whole greeting. At most `MOST_PENDING` clients are greeting; when one more comes, an
old one is dropped (see `dpex.system.listening`). So a flood of clients costs the trainer a fixed number of descriptors
and no threads, and an agent, whose greeting takes milliseconds, still gets in.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import threading
from collections.abc import Callable

from dpex.pools.agent.connection import TrainerAddress, listen_here
from dpex.pools.agent.handshake import SECRET_BYTES, Challenge
from dpex.system.clock import monotonic
from dpex.system.listening import Listener, one_to_drop, peer_of

logger = logging.getLogger("dpex")

GREETING_S = 5.0
"""More than an agent on a busy machine needs."""
MOST_PENDING = 64
"""As many agents may come at the same moment without any having to try again; few among 1024 descriptors."""
_BACKLOG = 128
"""Connections that the kernel keeps until they are accepted: twice `MOST_PENDING`."""


class _PendingClient:
    """A client whose greeting is not over."""

    def __init__(self, connection: socket.socket, secret: bytes, now: float) -> None:
        self.connection = connection
        self.peer = peer_of(connection)
        self.rank = (False, now)
        self.late_at = now + GREETING_S
        self.challenge = Challenge(secret)


class AdmissionServer:
    """See the module.

    Args:
        address: Where agents reach this process.
        admit: Called in the server's thread with each accepted connection and the agent's number.

    Attributes:
        local: Where agents of this machine reach this process, or None.

    Raises:
        OSError: Nothing can listen on ``address``.
    """

    def __init__(self, address: str, admit: Callable[[socket.socket, int], None]) -> None:
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._admit = admit
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sockets = [socket.create_server((address, 0), family=family, backlog=_BACKLOG)]
        self.address, self.port = sockets[0].getsockname()[:2]
        here = listen_here(_BACKLOG)
        self.local = here and here[1]
        sockets += [here[0]] if here else []
        self._selector = selectors.PollSelector()  # needs no descriptor of its own
        self._listeners = [self._listener(one) for one in sockets]
        self._wakeup, self._ear = socket.socketpair()
        self._selector.register(self._ear, selectors.EVENT_READ)
        self._pending: set[_PendingClient] = set()
        self._closed = False
        self.thread = threading.Thread(target=self._run, name="dpex-receive", daemon=True)
        self.thread.start()

    def _listener(self, found: socket.socket) -> Listener:
        found.setblocking(False)
        return Listener(found, self._selector)

    def address_of(self, agent: int) -> TrainerAddress:
        """Return where the agent of that number finds this process, and how it introduces itself."""
        return TrainerAddress(self.address, self.port, self.secret, agent, self.local)

    def close(self) -> None:
        """Accept nobody any more. Idempotent; from any thread; the server's thread ends soon after."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._wakeup.send(b"!")

    def _run(self) -> None:
        try:
            while not self._closed:
                for key, _ in self._selector.select(self._wait_s()):
                    if isinstance(key.data, _PendingClient):
                        self._listen_to(key.data)
                    elif isinstance(key.data, Listener) and not self._closed:
                        self._accept(key.data)
                now = monotonic()
                for client in [one for one in self._pending if one.late_at <= now]:
                    self._drop(client)
                for listener in self._listeners:
                    listener.go_on()
        except Exception:
            if not self._closed:
                logger.exception("no further agent can connect; this is an error in dpex")
        finally:
            for listener in self._listeners:
                listener.close()
            for client in list(self._pending):
                self._drop(client)
            self._wakeup.close()
            self._ear.close()

    def _wait_s(self) -> float | None:
        waits = [client.late_at - monotonic() for client in self._pending]
        waits += [rest_s for listener in self._listeners if (rest_s := listener.wait_s()) is not None]
        return max(0.0, min(waits)) if waits else None

    def _accept(self, listener: Listener) -> None:
        connection = listener.accept(self._make_room)
        if connection is None:
            return
        if len(self._pending) >= MOST_PENDING:
            self._make_room()
        client = _PendingClient(connection, self.secret, monotonic())
        self._pending.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _make_room(self) -> bool:
        found = one_to_drop(self._pending)
        if found is not None:
            self._drop(found)
        return found is not None

    def _drop(self, client: _PendingClient) -> None:
        self._forget(client)
        client.connection.close()

    def _forget(self, client: _PendingClient) -> None:
        self._pending.discard(client)
        self._selector.unregister(client.connection)

    def _listen_to(self, client: _PendingClient) -> None:
        """Receive as much of a message as came, and answer."""
        if client not in self._pending:  # dropped in this turn of the loop
            return
        challenge = client.challenge
        try:
            data = client.connection.recv(challenge.wanted)
            answer = challenge.take(data) if data else b""
            if answer and client.connection.send(answer) != len(answer):
                data = b""
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or challenge.failed:
            self._drop(client)
        elif challenge.number is not None:
            self._forget(client)
            self._admit(client.connection, challenge.number)

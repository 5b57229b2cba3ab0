"""Lets workers in that know the secret, and nobody else: one thread, however many come.

A connection has `GREETING_S` for its whole greeting. At most `MOST_PENDING` are at it; when one more comes, an old one
goes (see `listening`). So a flood of pending clients costs the trainer a fixed number of descriptors and no threads,
and a worker, whose greeting takes milliseconds, still gets in.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import threading
from collections.abc import Callable

from dpex.pools.agent.handshake import SECRET_BYTES, Challenge
from dpex.pools.agent.same_machine import listen
from dpex.system.clock import monotonic
from dpex.system.listening import Listener, one_to_drop, peer_of

logger = logging.getLogger("dpex")

GREETING_S = 5.0
"""More than a worker on a busy machine needs."""
MOST_PENDING = 64
"""As many workers as may come at the same moment without any having to try again; few among 1024 descriptors."""
_BACKLOG = 128
"""Connections that the system keeps until they are accepted: twice as many as are let in at once."""


class _PendingClient:
    """A connection whose greeting is not over."""

    def __init__(self, connection: socket.socket, secret: bytes, now: float) -> None:
        self.connection = connection
        self.peer = peer_of(connection)
        self.rank = (False, now)
        self.late_at = now + GREETING_S
        self.challenge = Challenge(secret)


class AdmissionServer:
    """See the module. ``admit`` gets each worker's connection and number, in the server's thread.

    Raises OSError if nothing can listen on ``address``. secret: what workers must know. local: where those on this
    machine find it, or None.
    """

    def __init__(self, address: str, admit: Callable[[socket.socket, int], None]) -> None:
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._admit = admit
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sockets = [socket.create_server((address, 0), family=family, backlog=_BACKLOG)]
        self.address, self.port = sockets[0].getsockname()[:2]
        here = listen(_BACKLOG)
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

    def close(self) -> None:
        """Let nobody in any more. Idempotent; from any thread; the thread ends soon after."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._wakeup.send(b"!")

    def _run(self) -> None:
        try:
            while not self._closed:
                for key, _ in self._selector.select(self._wait_s()):
                    self._turn(key.data)
                self._drop_late()
                for listener in self._listeners:
                    listener.go_on()
        except Exception:
            if not self._closed:
                logger.exception("no further worker can connect; this is an error in dpex")
        finally:
            self._end()

    def _turn(self, whom: object) -> None:
        if isinstance(whom, _PendingClient):
            self._listen_to(whom)
        elif isinstance(whom, Listener) and not self._closed:
            self._accept(whom)

    def _end(self) -> None:
        for listener in self._listeners:
            listener.close()
        for pending in list(self._pending):
            self._drop(pending)
        self._wakeup.close()
        self._ear.close()

    def _wait_s(self) -> float | None:
        waits = [pending.late_at - monotonic() for pending in self._pending]
        waits += [rest_s for listener in self._listeners if (rest_s := listener.wait_s()) is not None]
        return max(0.0, min(waits)) if waits else None

    def _accept(self, listener: Listener) -> None:
        connection = listener.accept(self._make_room)
        if connection is None:
            return
        if len(self._pending) >= MOST_PENDING:
            self._make_room()
        pending = _PendingClient(connection, self.secret, monotonic())
        self._pending.add(pending)
        self._selector.register(connection, selectors.EVENT_READ, pending)

    def _make_room(self) -> bool:
        found = one_to_drop(self._pending)
        if found is not None:
            self._drop(found)
        return found is not None

    def _drop_late(self) -> None:
        now = monotonic()
        for pending in [one for one in self._pending if one.late_at <= now]:
            self._drop(pending)

    def _drop(self, pending: _PendingClient) -> None:
        self._forget(pending)
        pending.connection.close()

    def _forget(self, pending: _PendingClient) -> None:
        self._pending.discard(pending)
        self._selector.unregister(pending.connection)

    def _listen_to(self, pending: _PendingClient) -> None:
        """Take one message in, as far as it came, and answer."""
        if pending not in self._pending:  # dropped in this turn of the loop
            return
        challenge = pending.challenge
        try:
            data = pending.connection.recv(challenge.wanted)
            answer = challenge.take(data) if data else b""
            if answer and pending.connection.send(answer) != len(answer):
                data = b""
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or challenge.failed:
            self._drop(pending)
        elif challenge.number is not None:
            self._forget(pending)
            self._admit(pending.connection, challenge.number)

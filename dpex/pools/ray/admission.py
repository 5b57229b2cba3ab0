"""Lets workers in that know the secret, and nobody else: one thread, however many come.

A connection has `GREETING_S` for its whole greeting. At most `MOST_STRANGERS` are at it; when one more comes, an old
one goes (see `listening`). So a flood of strangers costs the trainer a fixed number of descriptors and no threads, and
a worker, whose greeting takes milliseconds, still gets in.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import threading
from collections.abc import Callable

from dpex.pools.ray.handshake import SECRET_BYTES, Examination
from dpex.system.clock import monotonic
from dpex.system.listening import Listener, one_to_drop, peer_of

logger = logging.getLogger("dpex")

GREETING_S = 5.0
"""More than a worker on a busy machine needs."""
MOST_STRANGERS = 64
"""As many workers as may come at the same moment without any having to try again; few among 1024 descriptors."""
_BACKLOG = 128


class _Stranger:
    """A connection whose greeting is not over."""

    def __init__(self, connection: socket.socket, secret: bytes, now: float) -> None:
        self.connection = connection
        self.peer = peer_of(connection)
        self.rank = (False, now)
        self.late_at = now + GREETING_S
        self.examination = Examination(secret)


class Door:
    """See the module. ``admit`` gets each worker's connection and number, in the door's thread.

    Raises OSError if nothing can listen on ``address``. secret: what workers must know.
    """

    def __init__(self, address: str, admit: Callable[[socket.socket, int], None]) -> None:
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._admit = admit
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.address, self.port = self._socket.getsockname()[:2]
        self._selector = selectors.PollSelector()  # needs no descriptor of its own
        self._listener = Listener(self._socket, self._selector)
        self._bell, self._ear = socket.socketpair()
        self._selector.register(self._ear, selectors.EVENT_READ)
        self._strangers: set[_Stranger] = set()
        self._closed = False
        self.thread = threading.Thread(target=self._run, name="dpex-receive", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Let nobody in any more. Idempotent; from any thread; the thread ends soon after."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    def _run(self) -> None:
        try:
            while not self._closed:
                for key, _ in self._selector.select(self._wait_s()):
                    self._turn(key.data)
                self._drop_late()
                self._listener.go_on()
        except Exception:
            if not self._closed:
                logger.exception("no further worker can connect; this is an error in dpex")
        finally:
            self._end()

    def _turn(self, whom: object) -> None:
        if isinstance(whom, _Stranger):
            self._listen_to(whom)
        elif whom is self._listener and not self._closed:
            self._accept()

    def _end(self) -> None:
        self._listener.close()
        for stranger in list(self._strangers):
            self._drop(stranger)
        self._bell.close()
        self._ear.close()

    def _wait_s(self) -> float | None:
        waits = [stranger.late_at - monotonic() for stranger in self._strangers]
        if (rest_s := self._listener.wait_s()) is not None:
            waits.append(rest_s)
        return max(0.0, min(waits)) if waits else None

    def _accept(self) -> None:
        connection = self._listener.accept(self._make_room)
        if connection is None:
            return
        if len(self._strangers) >= MOST_STRANGERS:
            self._make_room()
        stranger = _Stranger(connection, self.secret, monotonic())
        self._strangers.add(stranger)
        self._selector.register(connection, selectors.EVENT_READ, stranger)

    def _make_room(self) -> bool:
        found = one_to_drop(self._strangers)
        if found is not None:
            self._drop(found)
        return found is not None

    def _drop_late(self) -> None:
        now = monotonic()
        for stranger in [one for one in self._strangers if one.late_at <= now]:
            self._drop(stranger)

    def _drop(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.connection.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._strangers.discard(stranger)
        self._selector.unregister(stranger.connection)

    def _listen_to(self, stranger: _Stranger) -> None:
        """Take one message in, as far as it came, and answer."""
        if stranger not in self._strangers:  # dropped in this turn of the loop
            return
        examination = stranger.examination
        try:
            data = stranger.connection.recv(examination.wanted)
            answer = examination.take(data) if data else b""
            if answer and stranger.connection.send(answer) != len(answer):
                data = b""
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or examination.failed:
            self._drop(stranger)
        elif examination.number is not None:
            self._forget(stranger)
            self._admit(stranger.connection, examination.number)

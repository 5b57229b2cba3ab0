"""An agent's connection to its trainer: how it is made, and how both ends treat it.

It begins with a greeting (see `handshake`); the trainer listens on the one address at which the nodes reach it, and on
no other (see `admission`), or, for agents of its own machine, on a socket of that (see `same_machine`). This module
imports no torch: an agent is connected before it begins to import that.
"""

from __future__ import annotations

import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from dpex.pools.agent.handshake import ACCEPTED, CHALLENGE_BYTES, HEAD_BYTES, GreetingError, WorkerCredentials
from dpex.pools.agent.same_machine import LocalAddress, reach
from dpex.system.clock import monotonic

CONNECT_S = 10.0
"""How long an agent tries to connect before its frames go another way."""
FURTHER_S = 3.0
"""The same for further connections, while which it sends nothing: many round trips, and no more."""
_TRY_AGAIN_S = (0.02, 0.2)
"""One that was dropped for want of room waits so long, by chance, lest all come again at once."""
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3))
_GIVE_UP = ("TCP_USER_TIMEOUT", 15_000)
"""For how many milliseconds a machine may leave unacknowledged what was sent to it. Keepalive asks only while nothing
is under way; else the kernel tries for a quarter of an hour, while the training waits for that machine's batches."""


_EXTRA_SHIFT = 32
"""In the number that a connection greets with, where that of a further connection stands; the agent's is below."""


class TrainerAddress(NamedTuple):
    """Where an agent finds the trainer, also if it is on the same machine (``local``), and how it introduces itself."""

    address: str
    port: int
    secret: bytes
    agent: int
    local: LocalAddress | None = None

    def __repr__(self) -> str:
        """Without the secret, which must not get into logs."""
        return f"TrainerAddress(address={self.address!r}, port={self.port}, agent={self.agent})"


def connect(target: TrainerAddress, limit_s: float = CONNECT_S) -> socket.socket:
    """Return a connection that is let in; an agent that is dropped for want of room there tries again.

    Raises:
        OSError: The trainer cannot be reached, does not answer, or is not the one that knows the secret.
    """
    deadline = monotonic() + limit_s
    while True:
        try:
            return _introduced(target, deadline)
        except (ConnectionResetError, BrokenPipeError):
            pause_s = random.Random().uniform(*_TRY_AGAIN_S)  # the dataset's own generator stays as it is
            if monotonic() + pause_s >= deadline:
                raise
            time.sleep(pause_s)


def connect_further(target: TrainerAddress, numbers: range) -> list[socket.socket]:
    """Connections of those numbers, from 1 on, beside the one that there is, all made at once.

    Raises:
        OSError: One of them cannot be made; then there is none.
    """
    made: list[socket.socket] = []
    targets = [target._replace(agent=target.agent | number << _EXTRA_SHIFT) for number in numbers]
    with ThreadPoolExecutor(len(targets), "dpex-connect") as threads:
        under_way = [threads.submit(connect, each, FURTHER_S) for each in targets]
    try:
        made += [one.result() for one in under_way if one.exception() is None]
        return [one.result() for one in under_way]
    except BaseException:
        for connection in made:
            connection.close()
        raise


def whose(number: int) -> tuple[int, int]:
    """The agent that a connection with this number is of, and its number among the further ones; 0 for the first."""
    return number & (1 << _EXTRA_SHIFT) - 1, number >> _EXTRA_SHIFT


def _introduced(target: TrainerAddress, deadline: float) -> socket.socket:
    connection = reach(LocalAddress(*target.local), _left_s(deadline)) if target.local is not None else None
    if connection is None:
        connection = socket.create_connection((target.address, target.port), _left_s(deadline))
    try:
        credentials = WorkerCredentials(target.secret, target.agent)
        connection.sendall(credentials.hello)
        head = _read(connection, HEAD_BYTES, deadline)
        credentials.check_head(head)
        connection.sendall(credentials.prove(head + _read(connection, CHALLENGE_BYTES - HEAD_BYTES, deadline)))
        if _read(connection, 1, deadline) != ACCEPTED:
            raise GreetingError("the trainer refused the connection")
        tune(connection, is_trainer=False)
        return connection
    except BaseException:
        connection.close()
        raise


def _read(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    found = b""
    while len(found) < nbytes:
        connection.settimeout(_left_s(deadline))
        data = connection.recv(nbytes - len(found))
        if not data:
            raise ConnectionResetError("the trainer ended the connection")
        found += data
    return found


def _left_s(deadline: float) -> float:
    left_s = deadline - monotonic()
    if left_s <= 0:
        raise TimeoutError("the trainer did not answer in time")
    return left_s


def tune(connection: socket.socket, *, is_trainer: bool) -> None:
    """Block without a limit, send small things at once, and notice a machine that is gone within about 15 seconds.

    An agent with something to send waits for longer, as its guardian ends it: the kernel would count a trainer that
    takes nothing for a while, as its process is stopped, among those that are gone.
    """
    connection.settimeout(None)
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (*_KEEPALIVE, _GIVE_UP) if is_trainer else _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

"""The connection between an agent and its trainer. Each end proves to the other that it has the run's secret.

The secret never travels over this connection. The agent receives it through Ray, whose traffic is encrypted only with
TLS. The handshake:

    agent   → trainer   hello: protocol, version, the agent's number, a nonce
    trainer → agent     protocol, version, a nonce, the trainer's proof
    agent   → trainer   the agent's proof
    trainer → agent     one byte: accepted

A proof is an HMAC-SHA256 of the prover's role, the hello and the trainer's nonce. So a proof is valid once, for one
role and one agent's number, and a recorded handshake grants no access. Frames after the handshake are not encrypted,
like Ray's own traffic by default. Where Ray encrypts its traffic, dpex refuses remote workers.

This module does not import torch, so that a node's guardian can test its import quickly. The trainer's end is an
`AgentLink`, whose thread receives frames into memory that is already faulted in.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from dpex.errors import DpexError
from dpex.system.clock import monotonic
from dpex.transport.frames import FrameError, FrameWriter, receive

SECRET_BYTES = 32
"""Bytes of a secret: the size of a SHA-256 digest. A longer secret would add no security."""
VERSION = 7
"""The version of the greeting and of the frames that follow it; both ends must have the same."""
ACCEPTED = b"\1"
_PROOF_BYTES = _NONCE_BYTES = 32
_HEAD = b"DPEX" + bytes([VERSION])
_ABOUT = struct.Struct(f"<Q{_NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f"<{_NONCE_BYTES}s{_PROOF_BYTES}s")
_TRAINER, _AGENT = b"trainer", b"agent"
Send = Callable[[bytes], object]
Read = Callable[[int], bytes]
CONNECT_S = 10.0
"""Seconds for which an agent tries to connect: twice `GREETING_S`, because it may have to wait for silent clients."""
GREETING_S = 5.0
"""Maximum seconds of a greeting: more than an agent on a busy machine needs."""
MOST_GREETINGS = 64
"""Maximum clients that are greeted at a time, each by a thread: few compared to the usual 1024 descriptors."""
REST_S = 0.2
"""Seconds before the next client is accepted when no descriptor is free for it."""
_BACKLOG = 128
"""Connections that the kernel keeps until they are accepted: twice `MOST_GREETINGS`."""
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3))
_GIVE_UP = ("TCP_USER_TIMEOUT", 15_000)
"""Milliseconds for which sent bytes may stay unacknowledged. Keepalive probes idle connections only. On a busy one, the
kernel would retransmit for a quarter of an hour, while the training waits for that machine's batches."""


# -- the handshake -----------------------------------------------------------------------------------------------------


class GreetingError(DpexError, ConnectionError):
    """The peer lacks the secret, or has another version."""


def _proof(secret: bytes, who: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, who + hello + nonce, "sha256")


def introduce(secret: bytes, number: int, send: Send, read: Read) -> None:
    """Greet the trainer as agent ``number``.

    Raises:
        GreetingError: The peer is not the trainer of this run, has another version, or refuses the connection.
    """
    hello = _HEAD + _ABOUT.pack(number, secrets.token_bytes(_NONCE_BYTES))
    send(hello)
    head = read(len(_HEAD))
    if head[:-1] != _HEAD[:-1]:
        raise GreetingError("the program that listens there is not the trainer")
    if head != _HEAD:
        raise GreetingError(
            f"the trainer's greeting has version {head[-1]}, this agent's {VERSION}: "
            "install one version of dpex on all machines"
        )
    nonce, proof = _CHALLENGE.unpack(read(_CHALLENGE.size))
    if not hmac.compare_digest(proof, _proof(secret, _TRAINER, hello, nonce)):
        raise GreetingError("the program that listens there does not know this training run's secret")
    send(_proof(secret, _AGENT, hello, nonce))
    if read(len(ACCEPTED)) != ACCEPTED:
        raise GreetingError("the trainer refused the connection")


def challenge(secret: bytes, send: Send, read: Read) -> int:
    """Greet a client as the trainer; return the number of the agent that it has proved to be.

    Raises:
        GreetingError: The client is no agent of this run, or has another version. An agent with another version is
            sent this version.
    """
    head = read(len(_HEAD))
    if head != _HEAD:
        if head[:-1] == _HEAD[:-1]:
            send(_HEAD)
        raise GreetingError("the client is no agent of this version")
    about, nonce = read(_ABOUT.size), secrets.token_bytes(_NONCE_BYTES)
    hello = head + about
    send(_HEAD + _CHALLENGE.pack(nonce, _proof(secret, _TRAINER, hello, nonce)))
    if not hmac.compare_digest(read(_PROOF_BYTES), _proof(secret, _AGENT, hello, nonce)):
        raise GreetingError("the client does not know this training run's secret")
    number: int = _ABOUT.unpack(about)[0]
    return number


# -- the agent's end ---------------------------------------------------------------------------------------------------


class TrainerAddress(NamedTuple):
    """The trainer's address, and the secret and the number with which an agent introduces itself."""

    address: str
    port: int
    secret: bytes
    agent: int

    def __repr__(self) -> str:
        """Return the fields except the secret, which must not get into logs."""
        return f"TrainerAddress(address={self.address!r}, port={self.port}, agent={self.agent})"


def connect(target: TrainerAddress) -> socket.socket:
    """Return a connection that the trainer has accepted. Raises OSError if no trainer of this run answers."""
    deadline = monotonic() + CONNECT_S
    connection = socket.create_connection((target.address, target.port), _left_s(deadline))
    try:
        introduce(target.secret, target.agent, connection.sendall, reader(connection, deadline))
        tune(connection, is_trainer=False)
        return connection
    except BaseException:
        connection.close()
        raise


def reader(connection: socket.socket, deadline: float) -> Callable[[int], bytes]:
    """Return a function that reads exactly ``nbytes`` bytes from a connection, before ``deadline``."""

    def read(nbytes: int) -> bytes:
        found = b""
        while len(found) < nbytes:
            connection.settimeout(_left_s(deadline))
            data = connection.recv(nbytes - len(found))
            if not data:
                raise ConnectionResetError("the other end closed the connection")
            found += data
        return found

    return read


def _left_s(deadline: float) -> float:
    left_s = deadline - monotonic()
    if left_s <= 0:
        raise TimeoutError("the other end did not answer in time")
    return left_s


def tune(connection: socket.socket, *, is_trainer: bool) -> None:
    """Make a connection block without a timeout, send small messages at once, and detect a lost machine within 15 s.

    The agent's end does not limit unacknowledged bytes, because a trainer that reads nothing may only be suspended. If
    the trainer has ended, the guardian ends the agent.
    """
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (*_KEEPALIVE, _GIVE_UP) if is_trainer else _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# -- the trainer's end -------------------------------------------------------------------------------------------------


class AdmissionServer:
    """Accepts agents, with a bounded number of threads and descriptors even in a flood of clients.

    ``admit`` is called with each accepted connection and the agent's number, in the thread that greeted the
    agent. Raises OSError if this process cannot listen on ``address``, the address that agents connect to.
    """

    def __init__(self, address: str, admit: Callable[[socket.socket, int], None]) -> None:
        self.secret: bytes = secrets.token_bytes(SECRET_BYTES)
        self._admit = admit
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self.address: str
        self.port: int
        self.address, self.port = self._listener.getsockname()[:2]
        self._free_greetings = threading.Semaphore(MOST_GREETINGS)
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="dpex-receive", daemon=True).start()

    def address_of(self, agent: int) -> TrainerAddress:
        return TrainerAddress(self.address, self.port, self.secret, agent)

    def close(self) -> None:
        """Accept no further client. Idempotent; from any thread; the server's threads end within `GREETING_S`."""
        self._closed.set()
        self._free_greetings.release()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with self._listener:
            while not self._closed.is_set():
                self._free_greetings.acquire()
                try:
                    client = self._listener.accept()[0]
                    threading.Thread(target=self._greet, args=(client,), name="dpex-greet", daemon=True).start()
                except (OSError, RuntimeError):  # descriptors, memory or threads ran out
                    self._free_greetings.release()
                    self._closed.wait(REST_S)

    def _greet(self, client: socket.socket) -> None:
        number = None
        with contextlib.suppress(OSError):
            number = challenge(self.secret, client.sendall, reader(client, monotonic() + GREETING_S))
        self._free_greetings.release()
        if number is None or self._closed.is_set():
            client.close()
        else:
            self._admit(client, number)


class Arrived(NamedTuple):
    """A frame of the agent, and the time of its last byte's arrival, in seconds."""

    header: tuple[Any, ...]
    buffers: list[Any]
    at: float


class AgentLink:
    """The link to one agent. It owns ``connection``. ``memory(nbytes)`` returns a writable buffer.

    A thread receives frames into buffers from ``memory``, and appends them to ``arrived``. It calls ``wake`` after each
    frame, and when the connection has ended. After the end, ``ended`` is True, and ``arrived`` may still hold frames.
    """

    def __init__(self, connection: socket.socket, memory: Callable[[int], Any]) -> None:
        self.arrived: deque[Arrived] = deque()
        self.wake: Callable[[], None] = wake_nobody
        self.ended: bool = False
        self.why_ended: str = "its connection ended"
        self._connection = connection
        self._writer = FrameWriter(connection)
        self._memory = memory
        threading.Thread(target=self._receive, name="dpex-receive-agent", daemon=True).start()

    @property
    def descriptor(self) -> int:
        """A descriptor that is writable when `flush` may send more; -1 once the connection has ended."""
        return self._connection.fileno()

    def put(self, *header: Any) -> bool:
        """Send a request, or queue it while the connection is full. Return True if nothing is queued."""
        self._writer.add_frame(header)
        return self.flush()

    def flush(self) -> bool:
        """Send the queued requests. Return True if all are sent. A broken connection is reported by ``ended``."""
        with contextlib.suppress(OSError):
            return self._writer.flush()
        return True

    def close(self) -> None:
        """End the connection and the thread that reads it. Idempotent."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> None:
        try:
            with self._connection:
                while (frame := receive(self._connection, self._memory)) is not None:
                    self.arrived.append(Arrived(*frame, monotonic()))
                    self.wake()
        except FrameError as error:
            self.why_ended += f", as it brought bytes that are no message: {error}"
        except (OSError, MemoryError, ValueError, EOFError):
            pass  # the connection broke, which needs no further reason
        finally:
            self.ended = True
            self.wake()


def link_over(connection: socket.socket, memory: Callable[[int], Any]) -> AgentLink | None:
    """Accept an agent that has proved its identity, and return its link. Return None if the connection broke."""
    try:
        tune(connection, is_trainer=True)
        connection.sendall(ACCEPTED)
        return AgentLink(connection, memory)
    except (OSError, RuntimeError):  # RuntimeError: the process cannot start another thread
        connection.close()
        return None


def wake_nobody() -> None:
    """Do nothing, because no pool uses the link."""

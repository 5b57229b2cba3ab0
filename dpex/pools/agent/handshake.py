"""How an agent and its trainer prove to each other that both know the run's secret, without sending it.

    agent   → trainer   hello: protocol, version, the agent's number, a nonce
    trainer → agent     protocol, version, a nonce, proof that the trainer knows the secret
    agent   → trainer   proof that the agent knows the secret
    trainer → agent     one byte: accepted

A proof is an HMAC-SHA256 of who proves, the hello and the trainer's nonce. So a proof serves once, for one end and one
agent's number, and a listener on the network learns nothing that would let it in later. What follows is not encrypted,
as Ray's own traffic is not; where Ray encrypts its traffic, no such connection is made.

Nothing here touches a socket.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable

from dpex.errors import DpexError

SECRET_BYTES = 32
"""As long as a SHA-256 digest; a longer secret would be no harder to guess."""
VERSION = 5
"""Of the greeting and of the frames that follow it; both ends must have the same."""
ACCEPTED = b"\1"
PROOF_BYTES = 32
_NONCE_BYTES = 32
_HEAD = b"DPEX" + bytes([VERSION])
_HELLO = struct.Struct(f"<{len(_HEAD)}sQ{_NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f"<{_NONCE_BYTES}s{PROOF_BYTES}s")
HELLO_BYTES, CHALLENGE_BYTES = _HELLO.size, len(_HEAD) + _CHALLENGE.size
_TRAINER, _AGENT = b"trainer", b"agent"


class GreetingError(DpexError, ConnectionError):
    """The other end does not know the secret, or speaks another version."""


def _proof(secret: bytes, who: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, who + hello + nonce, "sha256")


def introduce(secret: bytes, number: int, send: Callable[[bytes], object], read: Callable[[int], bytes]) -> None:
    """Greet the trainer as the agent of that number; ``read`` returns exactly as many bytes as it is asked for.

    Raises:
        GreetingError: The other end is not the trainer, or does not accept the agent.
    """
    hello = _HELLO.pack(_HEAD, number, secrets.token_bytes(_NONCE_BYTES))
    send(hello)
    head = read(len(_HEAD))
    if head[:-1] != _HEAD[:-1]:
        raise GreetingError("what listens there is not the trainer")
    if head != _HEAD:
        raise GreetingError(
            f"the trainer's greeting has version {head[-1]}, this agent's {VERSION}: "
            "install one version of dpex on all machines"
        )
    nonce, proof = _CHALLENGE.unpack(read(_CHALLENGE.size))
    if not hmac.compare_digest(proof, _proof(secret, _TRAINER, hello, nonce)):
        raise GreetingError("what listens there does not know this training run's secret, so it is not its trainer")
    send(_proof(secret, _AGENT, hello, nonce))
    if read(len(ACCEPTED)) != ACCEPTED:
        raise GreetingError("the trainer refused the connection")


class Challenge:
    """The trainer's part: takes the bytes that come, in any pieces, and says what to answer.

    Attributes:
        number: The agent's, once it has proved who it is.
        failed: True if the connection is to be closed after the answer.
    """

    def __init__(self, secret: bytes) -> None:
        self.number: int | None = None
        self.failed = False
        self._secret = secret
        self._received = b""
        self._hello = b""
        self._nonce = secrets.token_bytes(_NONCE_BYTES)

    @property
    def wanted(self) -> int:
        """Bytes that are missing of the message that is to come. No more must be read."""
        return (PROOF_BYTES if self._hello else HELLO_BYTES) - len(self._received)

    def take(self, data: bytes) -> bytes:
        """Return the answer, which may be empty."""
        self._received += data
        if self._hello:
            self._check()
            return b""
        if not _HEAD.startswith(self._received[: len(_HEAD)]):
            self.failed = True
            return _HEAD if self._received.startswith(_HEAD[:-1]) else b""
        if self.wanted:
            return b""
        self._hello, self._received = self._received, b""
        proof = _proof(self._secret, _TRAINER, self._hello, self._nonce)
        return _HEAD + _CHALLENGE.pack(self._nonce, proof)

    def _check(self) -> None:
        if self.wanted:
            return
        self.failed = not hmac.compare_digest(self._received, _proof(self._secret, _AGENT, self._hello, self._nonce))
        if not self.failed:
            self.number = _HELLO.unpack(self._hello)[1]

"""How a worker and its trainer prove to each other that both know the pool's secret, without sending it.

    worker  → trainer   hello: what this is, its version, the worker's number, a nonce
    trainer → worker    challenge: what this is, its version, a nonce, proof that the trainer knows the secret
    worker  → trainer   proof that the worker knows the secret
    trainer → worker    one byte: let in

A proof is an HMAC-SHA256 over who proves, the hello and the trainer's nonce, so that none serves twice, for the other
end, or for another worker's number. Whoever listens on the network learns nothing that would let them in later. What
follows is not encrypted, as Ray's own traffic is not; where that is encrypted, no such connection is made.

Nothing here touches a socket.
"""

from __future__ import annotations

import hmac
import secrets
import struct

from dpex.errors import DpexError

SECRET_BYTES = 32
"""As long as the digest that is made with it (SHA-256): a longer one would not make it any harder to guess."""
VERSION = 4
"""Of the greeting and of the frames that follow it. Number 1 began with the secret itself; 2 compressed nothing; 3 sent
what a worker made again."""
ACCEPTED = b"\1"
PROOF_BYTES = 32
"""The length of such a digest."""
_NONCE_BYTES = 32
"""No number is drawn twice."""
_MAGIC = b"DPEX"
_HELLO = struct.Struct(f"<4sBQ{_NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f"<4sB{_NONCE_BYTES}s{PROOF_BYTES}s")
HEAD_BYTES = len(_MAGIC) + 1
CHALLENGE_BYTES = _CHALLENGE.size
_TRAINER, _WORKER = b"trainer", b"worker"


class GreetingError(DpexError, ConnectionError):
    """The other end is not who it should be, or speaks another version."""


def _proof(secret: bytes, who: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, who + hello + nonce, "sha256")


class WorkerCredentials:
    """The worker's part."""

    def __init__(self, secret: bytes, number: int) -> None:
        self._secret = secret
        self.hello = _HELLO.pack(_MAGIC, VERSION, number, secrets.token_bytes(_NONCE_BYTES))

    def check_head(self, head: bytes) -> None:
        """Look at the first `HEAD_BYTES` of the challenge. Raises GreetingError."""
        if head[: len(_MAGIC)] != _MAGIC:
            raise GreetingError("what listens there is not the trainer")
        if head[len(_MAGIC)] != VERSION:
            raise GreetingError(
                f"the trainer's greeting has version {head[len(_MAGIC)]}, this worker's {VERSION}: "
                "install one version of dpex on all machines"
            )

    def prove(self, challenge: bytes) -> bytes:
        """The answer to the challenge. Raises GreetingError unless it is the trainer's."""
        _, _, nonce, proof = _CHALLENGE.unpack(challenge)
        if not hmac.compare_digest(proof, _proof(self._secret, _TRAINER, self.hello, nonce)):
            raise GreetingError("what listens there does not know this training run's secret, so it is not its trainer")
        return _proof(self._secret, _WORKER, self.hello, nonce)


class Challenge:
    """The trainer's part: takes what comes, and says what to answer.

    number: the worker's, once it is known who it is. failed: the connection is to be closed after the answer.
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
        """How many more bytes belong to the message that is to come; not one more must be read."""
        return (PROOF_BYTES if self._hello else _HELLO.size) - len(self._received)

    def take(self, data: bytes) -> bytes:
        """What to answer, which may be nothing."""
        self._received += data
        if not self._hello and not self._is_worker():
            return b""
        if not self._hello and self._is_other_version():
            return _MAGIC + bytes([VERSION])
        if self.wanted or self.failed:
            return b""
        message, self._received = self._received, b""
        if self._hello:
            self._check(message)
            return b""
        self._hello = message
        proof = _proof(self._secret, _TRAINER, self._hello, self._nonce)
        return _CHALLENGE.pack(_MAGIC, VERSION, self._nonce, proof)

    def _is_worker(self) -> bool:
        self.failed = self._received[: len(_MAGIC)] != _MAGIC[: len(self._received)]
        return not self.failed

    def _is_other_version(self) -> bool:
        version = self._received[len(_MAGIC) : HEAD_BYTES]
        self.failed = bool(version) and version[0] != VERSION
        return self.failed

    def _check(self, proof: bytes) -> None:
        _, _, number, _ = _HELLO.unpack(self._hello)
        known = hmac.compare_digest(proof, _proof(self._secret, _WORKER, self._hello, self._nonce))
        self.number, self.failed = (number, False) if known else (None, True)

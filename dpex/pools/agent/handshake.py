"""Prove to each other that agent and trainer know the run's secret, without sending it.

    agent   → trainer   hello: protocol, version, the agent's number, a nonce
    trainer → agent     protocol, version, a nonce, proof that the trainer knows the secret
    agent   → trainer   proof that the agent knows the secret
    trainer → agent     one byte: accepted

A proof is an HMAC-SHA256 of who proves, the hello and the trainer's nonce. So a proof serves once, for one end and one
agent's number, and a listener on the network learns nothing that would let it in later. What follows is not encrypted,
as Ray's own traffic is not; where Ray encrypts its traffic, no such connection is made.

Nothing here touches a socket: ``send`` sends bytes, and ``read`` returns exactly as many as it is asked for.
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
"""The version of the greeting and of the frames that follow it; both ends must have the same."""
ACCEPTED = b"\1"
_PROOF_BYTES = _NONCE_BYTES = 32
_HEAD = b"DPEX" + bytes([VERSION])
_ABOUT = struct.Struct(f"<Q{_NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f"<{_NONCE_BYTES}s{_PROOF_BYTES}s")
_TRAINER, _AGENT = b"trainer", b"agent"
Send = Callable[[bytes], object]
Read = Callable[[int], bytes]


class GreetingError(DpexError, ConnectionError):
    """The other end does not know the secret, or speaks another version."""


def _proof(secret: bytes, who: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, who + hello + nonce, "sha256")


def introduce(secret: bytes, number: int, send: Send, read: Read) -> None:
    """Greet the trainer as the agent of that number.

    Raises:
        GreetingError: The other end is not the trainer, or does not accept the agent.
    """
    hello = _HEAD + _ABOUT.pack(number, secrets.token_bytes(_NONCE_BYTES))
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


def challenge(secret: bytes, send: Send, read: Read) -> int:
    """Greet a client as the trainer; return the number of the agent that it has proved to be.

    Raises:
        GreetingError: The client is no agent of this run, or speaks another version; that gets this one's number.
    """
    head = read(len(_HEAD))
    if head != _HEAD:
        if head[:-1] == _HEAD[:-1]:
            send(_HEAD)
        raise GreetingError("what connected is no agent of this version")
    about, nonce = read(_ABOUT.size), secrets.token_bytes(_NONCE_BYTES)
    hello = head + about
    send(_HEAD + _CHALLENGE.pack(nonce, _proof(secret, _TRAINER, hello, nonce)))
    if not hmac.compare_digest(read(_PROOF_BYTES), _proof(secret, _AGENT, hello, nonce)):
        raise GreetingError("what connected does not know this training run's secret")
    number: int = _ABOUT.unpack(about)[0]
    return number

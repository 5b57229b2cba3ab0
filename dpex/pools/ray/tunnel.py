"""An agent's connection through Ray, where it has none of its own: bytes travel as calls of its guardian.

That is the way from a node that cannot reach the trainer, to a trainer that is no part of the cluster (``ray://``), and
where Ray encrypts its traffic, as nothing goes beside it then. Large batches are copied four times more than on a
connection of their own.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
import threading
from typing import Any

PIECE_BYTES = 8 << 20
"""The most that one call carries; it takes some milliseconds, as long as the call itself or longer."""


def open_tunnel(guardian: Any) -> socket.socket:
    """A socket that leads to the guardian's agent."""
    ours, theirs = socket.socketpair()
    for name, body in (("dpex-tunnel-out", _carry_out), ("dpex-tunnel-in", _carry_in)):
        threading.Thread(target=body, args=(theirs, guardian), name=name, daemon=True).start()
    return ours


def _carry_out(end: socket.socket, guardian: Any) -> None:
    """One call after the other, as Ray does not promise their order."""
    ray = importlib.import_module("ray")
    with contextlib.suppress(Exception):
        while data := end.recv(PIECE_BYTES):
            ray.get(guardian.send.remote(data))
    _shut(end)


def _carry_in(end: socket.socket, guardian: Any) -> None:
    ray = importlib.import_module("ray")
    with contextlib.suppress(Exception):
        while data := ray.get(guardian.receive.remote(PIECE_BYTES)):
            end.sendall(data)
    _shut(end)


def _shut(end: socket.socket) -> None:
    """Wake whoever reads either end; the descriptor goes with the other thread."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)

"""The trainer's end of an agent's connection. A thread receives frames, straight into memory that is faulted in."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from dpex.pools.agent.connection import tune
from dpex.pools.agent.handshake import ACCEPTED
from dpex.system.clock import monotonic
from dpex.transport.compression import CompressionError
from dpex.transport.frames import FrameError, FrameWriter, receive, send_with


class Arrived(NamedTuple):
    """A frame of the agent's, and when the last of it was here, in seconds."""

    header: tuple[Any, ...]
    buffers: list[Any]
    at: float


class AgentLink:
    """The link to one agent.

    Args:
        connection: The connection, which the link owns.
        memory: Returns a writable buffer of that many bytes to receive into; called in the link's thread.
        is_tunnel: Frames travel through Ray.

    Attributes:
        arrived: Frames that came and were not read yet.
        wake: Called in the link's thread after each frame and at the end.
        ended: The connection has ended, after all that is in ``arrived``.
        why_ended: A sentence about that, without its full stop.
        is_tunnel: Frames travel through Ray.
        is_near: The agent is on this machine, and takes descriptors.
    """

    def __init__(self, connection: socket.socket, memory: Callable[[int], Any], *, is_tunnel: bool = False) -> None:
        self.arrived: deque[Arrived] = deque()
        self.wake: Callable[[], None] = wake_nobody
        self.ended = False
        self.why_ended = "its connection ended"
        self.is_tunnel = is_tunnel
        self.is_near = connection.family == socket.AF_UNIX and not is_tunnel
        self._connection = connection
        self._writer = FrameWriter(connection)
        self._memory = memory
        threading.Thread(target=self._receive, name="dpex-receive-agent", daemon=True).start()

    @property
    def descriptor(self) -> int:
        """A descriptor that is writable when `flush` may send more; -1 once the connection has ended."""
        return self._connection.fileno()

    def put(self, *header: Any) -> bool:
        """Send a request, now or as soon as the connection takes it; return True if nothing is kept back."""
        self._writer.put(header)
        return self.flush()

    def hand_over(self, descriptor: int, *header: Any) -> None:
        """Send a request with a descriptor, now.

        Raises:
            OSError: The connection does not take it.
        """
        if not self._writer.flush():
            raise FrameError("the agent takes no requests")
        send_with(self._connection, descriptor, header)

    def flush(self) -> bool:
        """Send what is kept; return True if nothing is. A connection that broke shows in ``ended``."""
        with contextlib.suppress(OSError):
            return self._writer.flush()
        return True

    def close(self) -> None:
        """End the connection, and with it the thread. Idempotent."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> None:
        try:
            with self._connection:
                while (frame := receive(self._connection, self._memory)) is not None:
                    self.arrived.append(Arrived(*frame, monotonic()))
                    self.wake()
        except (FrameError, CompressionError) as error:
            self.why_ended += f", as what came over it was no message: {error}"
        except (OSError, MemoryError, ValueError, EOFError):
            pass  # the connection broke, which needs no further reason
        finally:
            self.ended = True
            self.wake()


def link_over(connection: socket.socket, memory: Callable[[int], Any]) -> AgentLink | None:
    """Let an agent in that has proved who it is, and return its link; None, and closed, if the connection broke."""
    try:
        tune(connection, is_trainer=True)
        connection.sendall(ACCEPTED)
        return AgentLink(connection, memory)
    except (OSError, RuntimeError):  # RuntimeError: the process can have no further thread
        connection.close()
        return None


def wake_nobody() -> None:
    """Do nothing: no pool uses the link."""

"""The protocol between a pool of remote workers and its source of nodes: a cluster, or a test.

A source of `Nodes` starts an agent on each node and reports it by `NodeNews` with an `AgentLink`, the trainer's end of
the agent's connection. A thread of the link receives frames, straight into memory that is faulted in.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

from dpex.pools.agent.connection import ACCEPTED, tune
from dpex.system.clock import monotonic
from dpex.transport.compression import CompressionError
from dpex.transport.frames import FrameError, FrameWriter, receive


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

    Attributes:
        arrived: Frames that came and were not read yet.
        wake: Called in the link's thread after each frame and at the end.
        ended: The connection has ended, after all that is in ``arrived``.
        why_ended: A sentence about that, without its full stop.
    """

    def __init__(self, connection: socket.socket, memory: Callable[[int], Any]) -> None:
        self.arrived: deque[Arrived] = deque()
        self.wake: Callable[[], None] = wake_nobody
        self.ended = False
        self.why_ended = "its connection ended"
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


class NodeNews(NamedTuple):
    """An event of an agent, or of all.

    kind: "ready": the agent can open a pool, over its ``link``, with what lies at ``path`` on its node. "room": how
    many workers it may have has changed. "lost": it has ended; ``why``. "failed": no worker can be had at present, or
    ``for_good``; ``why``, "" where they can again. "notice": a message for people; a ``warning`` or a line in the log.
    "left alone": the node at ``place`` gets no workers for a while; ``why``, "" where it may again.
    """

    kind: Literal["ready", "room", "lost", "failed", "notice", "left alone"]
    agent: int = -1
    place: str = ""
    link: AgentLink | None = None
    path: str = ""
    why: str = ""
    warning: bool = True
    for_good: bool = False


class Nodes(Protocol):
    """A source of agents. All calls come from the thread that drives the epoch, and none of them waits."""

    def begin(self, wake: Callable[[], None]) -> None:
        """Serve a pool; ``wake`` is called, from any thread, when there is news."""

    def want(self, workers: int) -> None:
        """Reserve room for that many workers in all. Of more, those without a place go at once, and others once their
        worker has left."""

    def room(self, agent: int) -> int:
        """Return how many workers that agent may have now."""

    def runs(self, agent: int, workers: int) -> None:
        """Note how many of its workers run now, those that are to leave included."""

    def set_aside(self, agent: int, why: str) -> None:
        """Have no worker on its node any more, which cannot serve this dataset."""

    def cut_off(self, agent: int) -> None:
        """Note that its connection has ended."""

    def news(self) -> list[NodeNews]:
        """Return what happened since the last call."""

    def close(self) -> None:
        """Note that the pool needs no agent any more. Idempotent."""

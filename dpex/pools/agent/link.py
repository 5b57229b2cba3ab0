"""The trainer's end of an agent's connection. A thread takes frames in, straight into memory that is faulted in."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from dpex.pools.agent.frames import FrameError, FrameWriter, receive, send_with
from dpex.pools.agent.promised import check_sizes
from dpex.system.clock import monotonic


class Arrived(NamedTuple):
    """A frame of the agent's (see `dpex.pools.agent.frames.Frame`), and when the last of it was here."""

    header: tuple[Any, ...]
    buffers: list[Any]
    saved_bytes: int
    at: float


class AgentLink:
    """``memory(nbytes)``: a writable buffer to receive into; called from the link's thread, as is ``wake`` after each
    frame and at the end. ``is_tunnel``: frames travel through Ray. ``is_near``: the agent is on this machine, and
    descriptors can be handed over. ``ended``: the connection has, after all that is in ``arrived``; ``why_ended``: a
    sentence about that, without its end.
    """

    def __init__(
        self,
        connection: socket.socket,
        memory: Callable[[int], Any],
        wake: Callable[[], None],
        *,
        is_tunnel: bool = False,
    ) -> None:
        self.arrived: deque[Arrived] = deque()
        self.ended = False
        self.why_ended = "its connection ended"
        self.is_tunnel = is_tunnel
        self.is_near = connection.family == socket.AF_UNIX and not is_tunnel
        self.wake = wake
        self._connection = connection
        self._further: dict[int, socket.socket] = {}
        self._writer = FrameWriter(connection)
        self._memory = memory
        threading.Thread(target=self._receive, name="dpex-receive-agent", daemon=True).start()

    @property
    def descriptor(self) -> int:
        """Writable when `flush` may get on; -1 once the connection has ended."""
        return self._connection.fileno()

    def put(self, *header: Any) -> bool:
        """Send a request, now or as soon as the connection takes it; True if nothing is kept back."""
        self._writer.put(header)
        return self.flush()

    def hand_over(self, descriptor: int, *header: Any) -> None:
        """Send a request with a descriptor, now. Raises OSError where that is not possible."""
        if not self._writer.flush():
            raise FrameError("the agent takes no requests")
        send_with(self._connection, descriptor, header)

    def flush(self) -> bool:
        """Send what is kept; True if nothing is. A connection that broke shows in ``ended``."""
        with contextlib.suppress(OSError):
            return self._writer.flush()
        return True

    def widen(self, number: int, connection: socket.socket) -> None:
        """Take the agent's further connection of that number, over which buffers may come from now on; from any
        thread. One that was made in vain before is closed."""
        former = self._further.pop(number, None)
        self._further[number] = connection
        if former is not None:
            former.close()
        if self.ended:
            self._close_further()

    @property
    def further(self) -> int:
        """How many further connections there are."""
        return len(self._further)

    def close(self) -> None:
        """End the connections, and with them the thread. Idempotent."""
        for connection in (self._connection, *tuple(self._further.values())):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _close_further(self) -> None:
        while self._further:
            self._further.popitem()[1].close()

    def _receive(self) -> None:
        try:
            with self._connection, contextlib.suppress(OSError, MemoryError, ValueError, EOFError):
                self._receive_frames()
        finally:
            self.ended = True
            self._close_further()
            self.wake()

    def _receive_frames(self) -> None:
        try:
            while (frame := receive(self._connection, self._memory, check_sizes, self._further)) is not None:
                self.arrived.append(Arrived(*frame, monotonic()))
                self.wake()
        except FrameError as error:
            self.why_ended += f", as what came over it was no message: {error}"

"""Frames between an agent and its trainer, and the trainer's end of the connection, over sockets of this process."""

import queue
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from waiting import until

from dpex.pools.agent.connection import AgentLink, Arrived
from dpex.transport.frames import FrameError, FrameReader, FrameWriter

SECONDS = 60


def memory(nbytes: int) -> Any:
    return np.empty(nbytes, np.uint8)


class Ends:
    """An agent's socket, and the trainer's link."""

    def __init__(self, take: Any = memory) -> None:
        self.agent, connection = socket.socketpair()
        self.agent.settimeout(SECONDS)
        self.writer = FrameWriter(self.agent)
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.link = AgentLink(connection, take)
        self.link.wake = lambda: self._woken.put(None)

    def send(self, header: Any, buffers: list[Any]) -> None:
        """Send a frame, however long the other end takes."""
        self.writer.add_frame(header, buffers)
        until(self.writer.flush)

    def next(self) -> Arrived:
        """The next frame that arrives."""
        while not self.link.arrived:
            self._woken.get(timeout=SECONDS)
        return self.link.arrived.popleft()

    def wait_for_the_end(self) -> None:
        """Until the link has ended."""
        until(lambda: self.link.ended)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.link.close()
    made.wait_for_the_end()
    made.agent.close()


def noise(*sizes: int) -> list[Any]:
    generator = np.random.default_rng(len(sizes))
    return [generator.integers(0, 256, size, np.uint8) for size in sizes]


@pytest.mark.parametrize("sizes", [(), (1,), (0, 5, 0), (40 << 20,), tuple(range(1500)), (70_000,) * 700])
def test_frames_arrive_as_they_were_sent(ends: Ends, sizes: tuple[int, ...]) -> None:
    buffers = noise(*sizes)
    for number in range(2):
        sender = threading.Thread(target=ends.send, args=(("told", number, (1.5, None, b"x")), buffers))
        sender.start()
        arrived = ends.next()
        sender.join(SECONDS)
        assert arrived.header == ("told", number, (1.5, None, b"x"))
        assert len(arrived.buffers) == len(buffers)
        assert all(map(np.array_equal, arrived.buffers, buffers))


def test_what_the_socket_does_not_take_waits_with_its_memory(ends: Ends) -> None:
    stuck, other = socket.socketpair()
    writer, (large,) = FrameWriter(stuck), noise(8 << 20)
    writer.add_frame("large", [large])
    assert not writer.flush()
    assert 0 < writer.pending_bytes <= large.nbytes + 100
    reader = AgentLink(other, memory)
    until(writer.flush)
    assert writer.pending_bytes == 0
    until(lambda: reader.arrived)
    assert np.array_equal(reader.arrived[0].buffers[0], large)
    stuck.close()
    until(lambda: reader.ended)


def test_requests_reach_the_agent_whole_from_any_pieces() -> None:
    ours, theirs = socket.socketpair()
    sink, source = socket.socketpair()
    FrameWriter(sink).add_frame("never flushed")
    writer = FrameWriter(sink)
    for header in (("tickets", 3, b"abc"), ("close", 0.5)):
        writer.add_frame(header)
    writer.flush()
    data = source.recv(1 << 16)
    reader, found = FrameReader(theirs), []
    for byte in data:
        ours.send(bytes([byte]))
        found += reader.read()
    assert found == [("tickets", 3, b"abc"), ("close", 0.5)]
    assert not reader.ended
    ours.close()
    assert reader.read() == []
    assert reader.ended
    for one in (theirs, sink, source):
        one.close()


def test_no_buffers_are_taken_where_none_are_expected() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = FrameWriter(ours)
        writer.add_frame("large", noise(1000))
        assert writer.flush()
        with pytest.raises(FrameError, match="buffers, where none are expected"):
            FrameReader(theirs).read()


def test_a_connection_cut_in_mid_frame_keeps_its_whole_frames(ends: Ends) -> None:
    ends.send("whole", noise(50))
    ends.agent.sendall(struct.pack("<II", 10, 1) + b"half")
    ends.agent.shutdown(socket.SHUT_WR)
    ends.wait_for_the_end()
    assert [arrived.header for arrived in ends.link.arrived] == ["whole"]


@pytest.mark.parametrize("head", [struct.pack("<II", 1 << 30, 0), struct.pack("<II", 10, 1 << 30)])
def test_what_is_no_frame_ends_its_connection(ends: Ends, head: bytes) -> None:
    ends.agent.sendall(head)
    ends.wait_for_the_end()


def test_memory_that_cannot_be_had_ends_the_connection() -> None:
    def none(nbytes: int) -> Any:
        raise MemoryError

    ends = Ends(none)
    ends.send("large", noise(5000))
    ends.wait_for_the_end()
    assert not ends.link.arrived
    ends.agent.close()


def test_requests_to_an_agent_that_is_gone_do_no_harm(ends: Ends) -> None:
    ends.agent.close()
    ends.wait_for_the_end()
    assert ends.link.put("tickets", b"x" * 1000)
    ends.link.close()
    ends.link.close()

"""Frames between an agent and its trainer, and the trainer's end of the connection, over sockets of this process."""

from __future__ import annotations

import contextlib
import marshal
import os
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from waiting import until

from dpex.pools.agent.frames import FrameError, FrameReader, FrameWriter
from dpex.pools.agent.link import AgentLink, Arrived
from dpex.transport.compression import Compressed, Compressor

pytestmark = pytest.mark.timeout(240)
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
        self.link = AgentLink(connection, take, lambda: self._woken.put(None))

    def send(self, header: Any, buffers: list[Any]) -> None:
        """Send a frame, however long the other end takes."""
        self.writer.put(header, buffers)
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
    writer.put("large", [large])
    assert not writer.flush()
    assert 0 < writer.pending_bytes <= large.nbytes + 100
    reader = AgentLink(other, memory, lambda: None)
    until(writer.flush)
    assert writer.pending_bytes == 0
    until(lambda: reader.arrived)
    assert np.array_equal(reader.arrived[0].buffers[0], large)
    stuck.close()
    until(lambda: reader.ended)


def test_requests_reach_the_agent_whole_whatever_pieces_they_come_in() -> None:
    ours, theirs = socket.socketpair()
    sink, source = socket.socketpair()
    FrameWriter(sink).put("never flushed")
    writer = FrameWriter(sink)
    for header in (("tickets", 3, b"abc"), ("close", 0.5)):
        writer.put(header)
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
        writer.put("large", noise(1000))
        assert writer.flush()
        with pytest.raises(FrameError, match="buffers, where none are expected"):
            FrameReader(theirs).read()


def test_a_descriptor_comes_with_its_request(ends: Ends) -> None:
    ends.agent.setblocking(False)  # Python waits for a socket with a timeout, whatever a call asks for
    reader = FrameReader(ends.agent)
    with open(os.devnull, "rb") as file:  # noqa: PTH123  (of a descriptor)
        ends.link.put("resize", 2)
        ends.link.hand_over(file.fileno(), "lend", (True, "path"))
        found: list[Any] = []
        until(lambda: found.extend(reader.read()) or len(found) == 2)
        (received,) = reader.descriptors
        assert os.path.sameopenfile(received, file.fileno())
    os.close(received)
    assert found == [("resize", 2), ("lend", (True, "path"))]


def test_nothing_is_handed_over_before_what_was_kept_back(ends: Ends) -> None:
    while ends.link.put("tickets", bytes(1 << 16)):
        pass
    with pytest.raises(FrameError, match="takes no requests"):
        ends.link.hand_over(0, "lend", ())


def test_a_connection_that_ends_in_the_middle_says_so_and_keeps_what_was_whole(ends: Ends) -> None:
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


def few_values(nbytes: int) -> Any:
    return np.random.default_rng(nbytes).integers(0, 4, nbytes, np.uint8)


def compressed(buffer: Any) -> Compressed:
    return Compressor(1).compress(memoryview(buffer), lambda: None)


def told(*sizes: int) -> tuple[Any, ...]:
    """What an agent tells of a batch with so many bytes, for each size, which has a buffer."""
    results = [
        (0, 1, number, 0, (0, None), (), 0.0, 0.0, size, [(0, 0, number)], 0.0) for number, size in enumerate(sizes)
    ]
    return ("told", 1, results, [], None, None, None)


def bytes_of(header: Any, buffers: list[Any]) -> bytes:
    """What travels."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = FrameWriter(ours)
        writer.put(header, buffers)
        data = b"".join(writer._outbox._pieces)
        assert writer.pending_bytes == len(data)
    return data


@pytest.mark.parametrize("sizes", [(), (5,), (0, 70, 1000)])
def test_a_frame_of_which_nothing_is_compressed_is_what_it_always_was(sizes: tuple[int, ...]) -> None:
    buffers, header = noise(*sizes), marshal.dumps(("told", 1))
    head = struct.pack(f"<II{len(sizes)}Q", len(header), len(sizes), *sizes)
    assert bytes_of(("told", 1), buffers) == head + header + b"".join(buffer.tobytes() for buffer in buffers)


def test_what_waits_counts_as_it_travels() -> None:
    buffer = few_values(100_000)
    packed = compressed(buffer)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = FrameWriter(ours)
        writer.put("told", [buffer])
        plain_bytes = writer.pending_bytes
        writer.put("told", [packed])
        more_bytes = writer.pending_bytes - plain_bytes
    assert plain_bytes > buffer.nbytes
    assert packed.travelling_bytes < more_bytes < packed.travelling_bytes + 100 < buffer.nbytes / 2


def test_compressed_buffers_arrive_beside_others(ends: Ends) -> None:
    buffers = [few_values(3 << 20), *noise(5000, 0), few_values(100_000), few_values(70_000), *noise(1 << 20)]
    packed = {0, 3, 4}
    sent = [compressed(buffer) if at in packed else buffer for at, buffer in enumerate(buffers)]
    saved = sum(buffers[at].nbytes - sent[at].travelling_bytes for at in packed)
    header = told(*(buffer.nbytes for buffer in buffers))
    for _ in range(2):
        sender = threading.Thread(target=ends.send, args=(header, sent))
        sender.start()
        arrived = ends.next()
        sender.join(SECONDS)
        assert (arrived.header, arrived.saved_bytes) == (header, saved)
        assert all(map(np.array_equal, arrived.buffers, buffers))
    ends.send("third", buffers[1:2])
    assert ends.next().saved_bytes == 0


@pytest.mark.parametrize("what", ["size", "length", "checksum", "content"])
def test_a_damaged_buffer_ends_its_connection_which_says_why(ends: Ends, what: str) -> None:
    """It would become other bytes, or what follows would be taken for its own."""
    size, found = 1 << 20, compressed(few_values(1 << 20))
    header = told(size, size)
    frame = bytearray(bytes_of(header, [found, *noise(size)]))
    sizes = struct.pack("<QQQQ", size, size, found.travelling_bytes, 0)
    assert frame[8 : 8 + len(sizes)] == sizes
    begin = len(frame) - size - found.travelling_bytes
    if what == "size":
        struct.pack_into("<Q", frame, 8, size - 5000)
    elif what == "length":
        struct.pack_into("<Q", frame, 8 + 16, found.travelling_bytes - 1)
    else:
        frame[begin + (found.travelling_bytes - 1 if what == "checksum" else 1000)] ^= 1
    ends.send("whole", noise(50))
    with contextlib.suppress(OSError):
        ends.agent.sendall(frame)
    ends.wait_for_the_end()
    assert [arrived.header for arrived in ends.link.arrived] == ["whole"]
    assert "it was no message: a compressed buffer is" in ends.link.why_ended


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (told(99_999), "buffers of 100000 bytes for a batch of 99999"),
        (told(), "1 buffers, of which some are no batch's"),
        (told(100_000, 100_000), "compressed buffers that are no batch's"),
        ("told", "compressed buffers that are no batch's"),
    ],
)
def test_no_memory_is_taken_for_more_than_a_batch_has(header: Any, why: str) -> None:
    asked: list[int] = []

    def count(nbytes: int) -> Any:
        asked.append(nbytes)
        return memory(nbytes)

    ends = Ends(count)
    ends.writer.put(header, [compressed(few_values(100_000))])
    with contextlib.suppress(OSError):
        until(ends.writer.flush)
    ends.wait_for_the_end()
    assert why in ends.link.why_ended
    assert not asked
    ends.agent.close()


def test_a_connection_that_ends_in_a_compressed_buffer_just_ends(ends: Ends) -> None:
    whole = b"".join(compressed(few_values(1 << 20)).pieces)
    header = marshal.dumps(told(1 << 20))
    head = struct.pack("<IIQQ", len(header), 1 << 31 | 1, 1 << 20, len(whole))
    ends.agent.sendall(head + header + whole[:1000])
    ends.agent.shutdown(socket.SHUT_WR)
    ends.wait_for_the_end()
    assert ends.link.why_ended == "its connection ended"
    assert not ends.link.arrived


# -- further connections -----------------------------------------------------------------------------------------------


@pytest.fixture
def wide(ends: Ends) -> Iterator[Ends]:
    """Ends with three further connections, which came in another order than that of their numbers."""
    with contextlib.ExitStack() as stack:
        further = [socket.socketpair() for _ in range(3)]
        for at in (2, 0, 1):
            ends.link.widen(at + 1, further[at][1])
        ends.writer.spread([stack.enter_context(ours) for ours, _ in further])
        yield ends


def test_large_buffers_travel_over_further_connections_and_small_ones_over_the_first(wide: Ends) -> None:
    large, small = noise(3_000_001, 100)
    for number, buffer in enumerate((large, small, large[:1_000_000], large)):
        sender = threading.Thread(target=wide.send, args=(("told", number), [buffer, small]))
        sender.start()
        arrived = wide.next()
        sender.join(SECONDS)
        assert arrived.header == ("told", number)
        assert all(map(np.array_equal, arrived.buffers, [buffer, small]))


def test_compressed_buffers_travel_over_further_connections(wide: Ends) -> None:
    buffers = [*noise(900_000), few_values(3 << 20), few_values(100_000)]
    header = told(*(buffer.nbytes for buffer in buffers))
    sent = [buffers[0], compressed(buffers[1]), compressed(buffers[2])]
    sender = threading.Thread(target=wide.send, args=(header, sent))
    sender.start()
    arrived = wide.next()
    sender.join(SECONDS)
    assert all(map(np.array_equal, arrived.buffers, buffers))
    assert arrived.saved_bytes > 1 << 20


@pytest.mark.parametrize("what", ["checksum", "length"])
def test_a_damaged_buffer_that_travelled_so_is_refused(wide: Ends, what: str) -> None:
    size = 3 << 20
    packed = compressed(few_values(size))
    data = bytearray(b"".join(packed.pieces))
    if what == "checksum":
        data[-1] ^= 1
    else:
        data += b"more"
    wide.writer.put(told(size), [Compressed(size, [bytes(data)])])
    until(wide.writer.flush)
    wide.wait_for_the_end()
    assert "a compressed buffer is" in wide.link.why_ended
    assert not wide.link.arrived


def test_buffers_over_connections_that_are_not_here_are_no_frame(ends: Ends) -> None:
    with contextlib.ExitStack() as stack:
        ends.writer.spread([stack.enter_context(socket.socketpair()[0]) for _ in range(2)])
        ends.writer.put(("told",), [np.zeros(1_000_000, np.uint8)])
        ends.writer._outbox.flush()
        ends.wait_for_the_end()
    assert "buffers over 2 further connections, of which 0 are here" in ends.link.why_ended


def test_the_end_of_the_first_connection_closes_the_others(wide: Ends) -> None:
    wide.agent.close()
    wide.wait_for_the_end()
    until(lambda: wide.link.further == 0)
    ours, theirs = socket.socketpair()
    with ours:
        wide.link.widen(1, theirs)
        assert ours.recv(1) == b""

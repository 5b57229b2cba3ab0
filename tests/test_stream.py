"""Large buffers on a connection of their own, between threads of this process over loopback."""

import contextlib
import queue
import socket
import struct
import threading

import numpy as np
import pytest

from dpex.pools.ray.handshake import GreetingError
from dpex.pools.ray.tcp_stream import Receiver, Sender

pytestmark = pytest.mark.timeout(60)
SECONDS = 20


@pytest.fixture
def receiver():
    made = Receiver("127.0.0.1", lambda nbytes: np.empty(nbytes, np.uint8))
    yield made
    made.close()


class Arrival(queue.SimpleQueue):
    """A `ready` that can be waited for."""

    def __init__(self, receiver, host, frame):
        super().__init__()
        receiver.when_here(host, frame, self.put)

    def wait(self):
        return self.get(timeout=SECONDS)


def noise(*sizes):
    generator = np.random.default_rng(len(sizes))
    return [generator.integers(0, 256, size, np.uint8) for size in sizes]


def same(left, right):
    return len(left) == len(right) and all(map(np.array_equal, left, right))


@pytest.mark.parametrize("sizes", [(1,), (0, 5, 0), (40 << 20,), tuple(range(1500)), (70_000,) * 700])
def test_buffers_arrive_as_they_were_sent(receiver, sizes):
    sender, buffers = Sender(receiver.target(7)), noise(*sizes)
    assert sender.send(buffers) == 0
    assert same(Arrival(receiver, 7, 0).wait(), buffers)
    sender.close()


def test_frames_can_be_asked_for_early_late_and_in_any_order(receiver):
    sender, frames = Sender(receiver.target(1)), [noise(size, 3) for size in (10, 200_000, 30)]
    early = Arrival(receiver, 1, 2)
    assert [sender.send(buffers) for buffers in frames] == [0, 1, 2]
    assert same(early.wait(), frames[2])
    assert same(Arrival(receiver, 1, 1).wait(), frames[1])
    assert same(Arrival(receiver, 1, 0).wait(), frames[0])
    sender.close()


def test_hosts_do_not_wait_for_each_other(receiver):
    slow, quick = Sender(receiver.target(1)), Sender(receiver.target(2))
    slow._socket.sendall(struct.pack("<QQQ", 0, 1, 100) + b"half")  # and then nothing
    waiting = Arrival(receiver, 1, 0)
    quick.send(noise(1000))
    assert same(Arrival(receiver, 2, 0).wait(), noise(1000))
    assert waiting.empty()
    slow._socket.sendall(bytes(96))
    assert bytes(waiting.wait()[0]) == b"half" + bytes(96)
    slow.close()
    quick.close()


def test_a_connection_that_ends_in_the_middle_says_so(receiver):
    sender = Sender(receiver.target(3))
    sender.send(noise(50))
    first = Arrival(receiver, 3, 0)
    first.wait()
    sender._socket.sendall(struct.pack("<QQQ", 1, 1, 100) + b"half")
    begun, never_sent = Arrival(receiver, 3, 1), Arrival(receiver, 3, 2)
    sender.close()
    assert begun.wait() is None
    assert never_sent.wait() is None
    assert Arrival(receiver, 3, 3).wait() is None


def test_what_arrived_whole_survives_the_connection(receiver):
    sender = Sender(receiver.target(3))
    sender.send(noise(50))
    sender.send(noise(60))
    Arrival(receiver, 3, 1).wait()
    sender.close()
    assert same(Arrival(receiver, 3, 0).wait(), noise(50))


def test_a_host_that_is_unknown_or_forgotten_has_no_frames(receiver):
    assert Arrival(receiver, 9, 0).wait() is None
    sender = Sender(receiver.target(3))
    waiting = Arrival(receiver, 3, 0)
    receiver.forget(3)
    receiver.forget(3)
    assert Arrival(receiver, 3, 0).wait() is None
    assert waiting.empty()
    sender.close()


def test_a_sender_whose_trainer_is_gone_declines_at_last_and_never_blocks(receiver):
    sender = Sender(receiver.target(3))
    receiver.forget(3)
    for _ in range(1000):
        if sender.send(noise(1 << 20)) is None:
            break
    else:
        pytest.fail("never noticed")
    sender.close()


def test_only_who_knows_the_secret_is_let_in(receiver):
    target = receiver.target(3)
    with pytest.raises(GreetingError, match="not its trainer"):
        Sender(target._replace(secret=bytes(32)))
    with socket.create_connection((target.address, target.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: trainer\r\nAccept: */*\r\n\r\n")
        stranger.settimeout(SECONDS)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    sender = Sender(target)
    sender.send(noise(5))
    assert same(Arrival(receiver, 3, 0).wait(), noise(5))
    sender.close()


def test_the_secret_is_not_shown(receiver):
    target = receiver.target(3)
    assert repr(target.secret) not in f"{target} {target!r}"


def test_a_frame_of_any_size_breaks_its_own_connection_only(receiver):
    sender = Sender(receiver.target(3))
    waiting = Arrival(receiver, 3, 0)
    sender._socket.sendall(struct.pack("<QQ", 0, 1 << 63))
    assert waiting.wait() is None
    sender.close()


def test_nobody_listening_is_an_os_error(receiver):
    target = receiver.target(3)
    receiver.close()
    with pytest.raises(OSError, match=r"\S"):
        Sender(target)


def test_closing_ends_every_thread():
    before = set(threading.enumerate())
    receiver = Receiver("127.0.0.1", lambda nbytes: np.empty(nbytes, np.uint8))
    senders = [Sender(receiver.target(host)) for host in range(3)]
    stranger = socket.create_connection(receiver.target(0)[:2])
    for sender in senders:
        sender.send(noise(30 << 20))
    started = set(threading.enumerate()) - before
    assert {thread.name for thread in started} == {"dpex-receive", "dpex-receive-host", "dpex-send"}
    receiver.close()
    receiver.close()
    for sender in senders:
        sender.close()
        sender.close()
    for thread in started:
        thread.join(SECONDS)
        assert not thread.is_alive()
    stranger.close()


def test_memory_that_cannot_be_had_breaks_the_connection():
    def none(nbytes):
        raise MemoryError

    receiver = Receiver("127.0.0.1", none)
    sender = Sender(receiver.target(0))
    waiting = Arrival(receiver, 0, 0)
    sender.send(noise(5))
    assert waiting.wait() is None
    sender.close()
    receiver.close()

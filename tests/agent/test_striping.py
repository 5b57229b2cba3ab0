"""The bytes of a frame over several connections."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from dpex.pools.agent.frames import FrameWriter
from dpex.pools.agent.striping import MOST_STRIPE_BYTES, receive_split, split

pytestmark = pytest.mark.timeout(240)


def views_of(*sizes: int, seed: int = 3) -> list[memoryview]:
    generator = np.random.default_rng(seed)
    return [memoryview(generator.integers(0, 256, size, np.uint8)).cast("B") for size in sizes]


@contextmanager
def pairs(count: int) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    with ExitStack() as stack:
        made = [socket.socketpair() for _ in range(count)]
        for both in made:
            for one in both:
                stack.enter_context(one)
        yield made


@pytest.mark.parametrize("sizes", [(1,), (5, 0, 7), (MOST_STRIPE_BYTES,), (3 * MOST_STRIPE_BYTES + 1, 10, 900_000)])
@pytest.mark.parametrize("connections", [1, 2, 5, 16])
def test_every_byte_belongs_to_one_connection_and_all_have_about_as_many(
    sizes: tuple[int, ...], connections: int
) -> None:
    pieces = views_of(*sizes)
    shares = split(pieces, connections)
    assert len(shares) == connections
    assert sum(part.nbytes for share in shares for part in share) == sum(sizes)
    each = [sum(part.nbytes for part in share) for share in shares]
    assert max(each) - min(each) <= MOST_STRIPE_BYTES
    assert all(part.nbytes for share in shares for part in share)


def test_both_ends_cut_alike_wherever_the_buffers_begin_and_end() -> None:
    whole = views_of(1_000_000)[0]
    cut = sorted(random.Random(5).sample(range(1_000_000), 9))
    pieces = [whole[a:b] for a, b in zip([0, *cut], [*cut, 1_000_000], strict=True)]
    assert [b"".join(share) for share in split(pieces, 3)] == [b"".join(share) for share in split([whole], 3)]


@pytest.mark.parametrize("connections", [1, 4])
def test_what_is_sent_arrives_in_its_place_whichever_connection_is_faster(connections: int) -> None:
    """The first connection has everything last."""
    sent = views_of(700_001, 0, 1, 2_000_000)
    took = [memoryview(bytearray(view.nbytes)) for view in sent]
    with pairs(connections) as made:
        shares = split(sent, connections)

        def send() -> None:
            for at in reversed(range(connections)):
                for part in shares[at]:
                    made[at][0].sendall(part)

        thread = threading.Thread(target=send)
        for ours, _ in made:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        thread.start()
        assert receive_split([theirs for _, theirs in made], took)
        thread.join()
    assert [bytes(view) for view in took] == [bytes(view) for view in sent]


def test_the_end_of_one_connection_ends_the_frame() -> None:
    with pairs(3) as made:
        sent = views_of(900_000)
        shares = split(sent, 3)
        for at in (0, 2):
            made[at][0].setblocking(False)
            made[at][0].send(b"".join(shares[at]))
        made[1][0].close()
        assert not receive_split([theirs for _, theirs in made], [memoryview(bytearray(900_000))])


def test_a_writer_keeps_what_a_connection_does_not_take_and_finishes_with_those_that_are_not_used_any_more() -> None:
    with pairs(4) as (first, *made):
        writer = FrameWriter(first[0])
        further = [ours for ours, _ in made]
        writer.spread(further)
        (payload,) = views_of(6_000_000)
        writer.put(("told",), [payload])
        assert not writer.flush()
        assert set(writer.blocked()) == set(further)
        kept = writer.pending_bytes
        writer.spread(further[:1])
        assert writer.pending_bytes == kept
        took = memoryview(bytearray(payload.nbytes))
        thread = threading.Thread(target=receive_split, args=([theirs for _, theirs in made], [took]))
        thread.start()
        while not writer.flush():
            pass
        thread.join()
        assert bytes(took) == bytes(payload)
        assert writer.blocked() == []

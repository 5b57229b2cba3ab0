"""What the consumer sleeps on."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from dpex.system.wakeup import Bell

FOR_EVER_S = 30.0


@pytest.fixture
def bell() -> Iterator[Bell]:
    made = Bell()
    yield made
    made.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def asleep(bell: Bell) -> threading.Thread:
    sleeper = threading.Thread(target=bell.sleep, args=(FOR_EVER_S,))
    sleeper.start()
    return sleeper


def wakes(bell: Bell) -> bool:
    """Whether a sleep ends, at once."""
    sleeper = threading.Thread(target=bell.sleep, args=(0.0,))
    sleeper.start()
    sleeper.join(5.0)
    return not sleeper.is_alive() and bool(bell._poll.poll(0))


def test_a_ring_wakes_who_sleeps(bell: Bell) -> None:
    bell.watch(())
    sleeper = asleep(bell)
    bell.ring()
    sleeper.join(5.0)
    assert not sleeper.is_alive()


def test_a_ring_before_the_sleep_is_not_lost_and_several_are_one(bell: Bell) -> None:
    bell.watch(())
    assert not wakes(bell)
    bell.ring()
    bell.ring()
    assert wakes(bell)
    bell.hush()
    assert not wakes(bell)
    bell.hush()


def test_what_is_watched_wakes_and_nothing_else_does(bell: Bell, pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    bell.watch([reading])
    sleeper = asleep(bell)
    os.write(writing, b".")
    sleeper.join(5.0)
    assert not sleeper.is_alive()
    bell.hush()
    assert wakes(bell)
    bell.watch([])
    assert not wakes(bell)
    bell.ring()
    assert wakes(bell)


def test_the_poll_is_kept_while_the_same_is_watched(bell: Bell, pipe: tuple[int, int]) -> None:
    bell.watch(iter([pipe[0]]))
    before = bell._poll
    bell.watch((pipe[0],))
    assert bell._poll is before
    bell.watch(pipe)
    assert bell._poll is not before


def test_closed_it_rings_no_stranger() -> None:
    """Its descriptor's number may be another file's by then."""
    bell = Bell()
    number = bell._descriptor
    bell.close()
    stranger = os.open("/dev/null", os.O_RDONLY)
    assert stranger == number
    bell.ring()  # would fail: not open for writing
    bell.close()
    os.fstat(stranger)
    os.close(stranger)

"""What the consumer sleeps on."""

import os
import threading
from collections.abc import Iterator

import pytest

from dpex.system.wakeup import Wakeup

FOR_EVER_S = 300.0


@pytest.fixture
def wakeup() -> Iterator[Wakeup]:
    made = Wakeup()
    yield made
    made.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def asleep(wakeup: Wakeup) -> threading.Thread:
    sleeper = threading.Thread(target=wakeup.sleep, args=(FOR_EVER_S,))
    sleeper.start()
    return sleeper


def wakes(wakeup: Wakeup) -> bool:
    """Whether a sleep ends, at once."""
    sleeper = threading.Thread(target=wakeup.sleep, args=(0.0,))
    sleeper.start()
    sleeper.join(60.0)
    return not sleeper.is_alive() and bool(wakeup._poll.poll(0))


def test_a_ring_before_the_sleep_is_not_lost_and_several_are_one(wakeup: Wakeup) -> None:
    wakeup.set_descriptors(())
    assert not wakes(wakeup)
    wakeup.ring()
    wakeup.ring()
    assert wakes(wakeup)
    wakeup.clear()
    assert not wakes(wakeup)
    wakeup.clear()


def test_what_is_watched_wakes_and_nothing_else_does(wakeup: Wakeup, pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    wakeup.set_descriptors([reading])
    sleeper = asleep(wakeup)
    os.write(writing, b".")
    sleeper.join(60.0)
    assert not sleeper.is_alive()
    wakeup.clear()
    assert wakes(wakeup)
    wakeup.set_descriptors([])
    assert not wakes(wakeup)
    wakeup.ring()
    assert wakes(wakeup)


def test_closed_it_rings_no_stranger() -> None:
    """Its descriptor's number may be another file's by then."""
    wakeup = Wakeup()
    number = wakeup._descriptor
    wakeup.close()
    stranger = os.open("/dev/null", os.O_RDONLY)
    assert stranger == number
    wakeup.ring()  # would fail: not open for writing
    wakeup.close()
    os.fstat(stranger)
    os.close(stranger)

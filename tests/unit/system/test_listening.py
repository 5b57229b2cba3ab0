"""A listening socket where descriptors run out, and who goes when there are too many clients."""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Callable, Iterator

import pytest

from dpex.system import listening
from dpex.system.clock import ManualClock
from dpex.system.listening import Listener, one_to_drop


class Deaf:
    """A listening socket whose `accept` fails with these, one after the other."""

    def __init__(self, *errors: int) -> None:
        self.errors = list(errors)
        self.found, self.other = socket.socketpair()
        self.connection = socket.socketpair()

    def accept(self) -> tuple[socket.socket, object]:
        if self.errors:
            raise OSError(self.errors.pop(0), "planted")
        return self.connection[0], ""

    def fileno(self) -> int:
        return self.found.fileno()

    def close(self) -> None:
        for one in (self.found, self.other, *self.connection):
            one.close()


@pytest.fixture
def listening_to() -> Iterator[Callable[..., tuple[Listener, selectors.BaseSelector, ManualClock, Deaf]]]:
    made: list[Listener] = []

    def listen(*errors: int) -> tuple[Listener, selectors.BaseSelector, ManualClock, Deaf]:
        deaf, selector, clock = Deaf(*errors), selectors.PollSelector(), ManualClock()
        made.append(Listener(deaf, selector, clock))
        return made[-1], selector, clock, deaf

    yield listen
    for listener in made:
        listener.close()


def is_heard(selector: selectors.BaseSelector) -> bool:
    return bool(selector.get_map())


def test_without_descriptors_the_owner_gives_one_up(listening_to: Callable[..., tuple[Listener, ...]]) -> None:
    listener, selector, _, deaf = listening_to(errno.EMFILE)  # type: ignore[misc]
    asked = []
    assert listener.accept(lambda: not asked.append(1)) is None
    assert (asked, is_heard(selector), listener.wait_s()) == ([1], True, None)
    assert listener.accept(lambda: False) is deaf.connection[0]


def test_without_anything_to_give_up_the_next_one_is_turned_away(
    listening_to: Callable[..., tuple[Listener, ...]],
) -> None:
    listener, selector, _, deaf = listening_to(errno.EMFILE)  # type: ignore[misc]
    assert listener.accept(lambda: False) is None
    assert deaf.connection[1].recv(1) == b""
    assert (is_heard(selector), listener.wait_s()) == (True, None)


@pytest.mark.parametrize("error", [errno.ENOBUFS, errno.ENOMEM])
def test_without_memory_it_rests_and_recovers(listening_to: Callable[..., tuple[Listener, ...]], error: int) -> None:
    listener, selector, clock, _ = listening_to(error)  # type: ignore[misc]
    assert listener.accept(lambda: True) is None
    assert (is_heard(selector), listener.wait_s()) == (False, listening.REST_S)
    clock.advance(0.5 * listening.REST_S)
    listener.go_on()
    assert (is_heard(selector), listener.wait_s()) == (False, 0.5 * listening.REST_S)
    clock.advance(listening.REST_S)
    listener.go_on()
    assert (is_heard(selector), listener.wait_s()) == (True, None)


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.ECONNABORTED, errno.EPERM, errno.ENETDOWN])
def test_a_client_that_has_gone_is_no_reason_to_rest(
    listening_to: Callable[..., tuple[Listener, ...]], error: int
) -> None:
    listener, selector, _, _ = listening_to(error)  # type: ignore[misc]
    assert listener.accept(lambda: False) is None
    assert is_heard(selector)


class Client:
    def __init__(self, peer: str, at: float, *, busy: bool = False) -> None:
        self.peer, self.rank = peer, (busy, at)


def test_the_oldest_idle_one_of_the_peer_with_most_goes_first() -> None:
    many = [Client("a", 3.0), Client("a", 1.0, busy=True), Client("a", 2.0)]
    few = [Client("b", 0.0), Client("b", 0.5)]
    assert one_to_drop([*few, *many]) is many[2]
    assert one_to_drop([*few, many[1]]) is few[0]
    assert one_to_drop([]) is None

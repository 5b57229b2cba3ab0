"""Who connects to the trainer's receiver: strangers, floods of them, workers of other versions, and workers."""

from __future__ import annotations

import contextlib
import errno
import random
import selectors
import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from families import no_descriptor_left, until

from dpex.pools.ray import admission
from dpex.pools.ray.handshake import ACCEPTED, CHALLENGE_BYTES, HEAD_BYTES, VERSION, Examination, GreetingError, Guest
from dpex.pools.ray.tcp_stream import Receiver, Sender, Target
from dpex.system import listening
from dpex.system.clock import ManualClock
from dpex.system.listening import Listener, one_to_drop

pytestmark = pytest.mark.timeout(60)
SECRET = bytes(range(32))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver("127.0.0.1", lambda nbytes: np.empty(nbytes, np.uint8))
    yield made
    made.close()
    made._door.thread.join(20)
    assert not made._door.thread.is_alive()


def stranger(target: Target) -> socket.socket:
    return socket.create_connection((target.address, target.port), timeout=20)


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def gets_in(target: Target) -> bool:
    Sender(target).close()
    return True


# -- the greeting, without sockets -------------------------------------------------------------------------------------


def greeted(guest: Guest, trainer: Examination) -> bytes:
    """All that goes over the wire."""
    challenge = trainer.take(guest.hello)
    guest.check_head(challenge[:HEAD_BYTES])
    proof = guest.prove(challenge)
    assert trainer.take(proof) == b""
    return guest.hello + challenge + proof


def test_both_ends_prove_that_they_know_the_secret_and_never_send_it() -> None:
    trainer = Examination(SECRET)
    sent = greeted(Guest(SECRET, 7), trainer)
    assert (trainer.number, trainer.failed) == (7, False)
    assert all(SECRET[start : start + 4] not in sent for start in range(29))


def test_messages_may_come_byte_by_byte() -> None:
    guest, trainer = Guest(SECRET, 7), Examination(SECRET)
    answers = [trainer.take(guest.hello[at : at + 1]) for at in range(len(guest.hello))]
    assert [len(answer) for answer in answers] == [0] * (len(guest.hello) - 1) + [CHALLENGE_BYTES]
    for byte in guest.prove(answers[-1]):
        assert trainer.number is None
        trainer.take(bytes([byte]))
    assert trainer.number == 7


def test_a_proof_serves_once_and_for_one_number() -> None:
    guest, other = Guest(SECRET, 7), Guest(SECRET, 8)
    first, again, swapped = (Examination(SECRET) for _ in range(3))
    proof = guest.prove(first.take(guest.hello))
    again.take(guest.hello)
    again.take(proof)
    swapped.take(other.hello)
    swapped.take(proof)
    for trainer in (again, swapped):
        assert (trainer.number, trainer.failed) == (None, True)


def test_a_trainers_proof_is_no_workers() -> None:
    trainer = Examination(SECRET)
    challenge = trainer.take(Guest(SECRET, 7).hello)
    trainer.take(challenge[-32:])
    assert (trainer.number, trainer.failed) == (None, True)


def test_a_worker_does_not_prove_itself_to_others() -> None:
    guest = Guest(SECRET, 7)
    challenge = Examination(bytes(32)).take(guest.hello)
    with pytest.raises(GreetingError, match="not its trainer"):
        guest.prove(challenge)
    with pytest.raises(GreetingError, match="not the trainer"):
        guest.check_head(b"HTTP/")


def test_another_version_is_told_of_it() -> None:
    guest, trainer = Guest(SECRET, 7), Examination(SECRET)
    head = trainer.take(guest.hello[:4] + bytes([VERSION + 1]))
    assert (head, trainer.failed) == (guest.hello[:4] + bytes([VERSION]), True)
    with pytest.raises(GreetingError, match=f"version {VERSION + 1}, this worker's {VERSION}: install one version"):
        guest.check_head(guest.hello[:4] + bytes([VERSION + 1]))


@pytest.mark.parametrize("data", [b"\0", b"GET / HTTP/1.1\r\n", b"DPE\0", b"\x16\x03\x01\x02\x00" * 20])
def test_what_is_no_hello_is_known_at_once(data: bytes) -> None:
    trainer = Examination(SECRET)
    assert (trainer.take(data), trainer.failed, trainer.number) == (b"", True, None)


# -- floods ------------------------------------------------------------------------------------------------------------


def test_a_flood_costs_no_thread_and_few_descriptors_and_a_worker_gets_in(receiver: Receiver) -> None:
    target = receiver.target(1)
    threads = threading.active_count()
    with contextlib.ExitStack() as flood:
        silent = [flood.enter_context(stranger(target)) for _ in range(3 * admission.MOST_STRANGERS)]
        until(lambda: sum(map(is_closed, silent)) == 2 * admission.MOST_STRANGERS)
        assert len(receiver._door._strangers) == admission.MOST_STRANGERS
        assert threading.active_count() == threads
        assert [is_closed(one) for one in silent] == sorted(map(is_closed, silent), reverse=True)  # the oldest went
        assert gets_in(target)


def the_stranger(receiver: Receiver) -> admission._Stranger:
    """The one that is at the door, as the door sees it."""
    until(lambda: len(receiver._door._strangers) == 1)
    return next(iter(receiver._door._strangers))


def test_a_stranger_that_drips_has_one_deadline(receiver: Receiver) -> None:
    hello = Guest(SECRET, 1).hello
    with stranger(receiver.target(1)) as slow:
        seen = the_stranger(receiver)
        late_at = seen.late_at
        for at in range(3):
            slow.send(hello[at : at + 1])
            until(lambda at=at: seen.examination._received == hello[: at + 1])  # type: ignore[misc]
            assert seen.late_at == late_at
        seen.late_at = 0.0
        slow.send(hello[3:4])
        until(lambda: is_closed(slow))


def test_a_silent_stranger_is_dropped(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "GREETING_S", 0.05)
    with stranger(receiver.target(1)) as silent:
        assert silent.recv(1) == b""


def test_a_worker_comes_again_when_it_was_dropped(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a flood: the door drops the first two that come."""
    dropped, listen_to = [], admission.Door._listen_to

    def drop(door: admission.Door, one: admission._Stranger) -> None:
        if len(dropped) < 2:
            dropped.append(one)
            door._drop(one)
        else:
            listen_to(door, one)

    monkeypatch.setattr(admission.Door, "_listen_to", drop)
    assert gets_in(receiver.target(1))
    assert len(dropped) == 2


def test_noise_and_half_closed_sockets_do_no_harm(receiver: Receiver) -> None:
    target, chance = receiver.target(1), random.Random(1)
    hello = Guest(bytes(32), 1).hello
    for _ in range(200):
        with stranger(target) as one, contextlib.suppress(OSError):
            one.sendall(hello[: chance.randrange(len(hello) + 1)] + chance.randbytes(chance.choice((0, 1, 40, 5000))))
            if chance.random() < 0.5:
                one.shutdown(socket.SHUT_WR)
    assert gets_in(target)
    until(lambda: not receiver._door._strangers)


def test_who_stops_after_the_challenge_is_dropped(receiver: Receiver) -> None:
    with stranger(receiver.target(1)) as one:
        one.sendall(Guest(bytes(32), 1).hello)
        assert len(one.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
        the_stranger(receiver).late_at = 0.0
        one.sendall(b"\0")
        until(lambda: is_closed(one))


def test_a_worker_is_let_in_only_after_its_proof(receiver: Receiver) -> None:
    target = receiver.target(1)
    guest = Guest(target.secret, 1)
    with stranger(target) as one:
        one.sendall(guest.hello)
        proof = guest.prove(one.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
        one.sendall(proof[:-1])
        assert 1 not in receiver._links
        one.sendall(proof[-1:])
        assert one.recv(1) == ACCEPTED
        assert 1 in receiver._links


# -- no descriptors ----------------------------------------------------------------------------------------------------


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


def test_the_receiver_outlives_a_want_of_descriptors(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    target, accepts = receiver.target(1), []
    accept = Listener.accept
    monkeypatch.setattr(Listener, "accept", lambda *args: accepts.append(1) or accept(*args))
    clients = [socket.socket() for _ in range(20)]
    with no_descriptor_left():
        for client in clients:
            client.connect((target.address, target.port))
        until(lambda: all(map(is_closed, clients)))
    assert len(accepts) < 100
    assert gets_in(target)
    for client in clients:
        client.close()


# -- whom to drop ------------------------------------------------------------------------------------------------------


class Client:
    def __init__(self, peer: str, at: float, *, busy: bool = False) -> None:
        self.peer, self.rank = peer, (busy, at)


def test_the_oldest_idle_one_of_the_peer_with_most_goes_first() -> None:
    many = [Client("a", 3.0), Client("a", 1.0, busy=True), Client("a", 2.0)]
    few = [Client("b", 0.0), Client("b", 0.5)]
    assert one_to_drop([*few, *many]) is many[2]
    assert one_to_drop([*few, many[1]]) is few[0]
    assert one_to_drop([]) is None

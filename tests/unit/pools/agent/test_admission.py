"""Who connects to the trainer: pending clients, floods of them, agents of other versions, and agents."""

from __future__ import annotations

import contextlib
import errno
import random
import selectors
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from families import no_descriptor_left
from waiting import until

from dpex.pools.agent import admission
from dpex.pools.agent.connection import TrainerAddress, connect, tune
from dpex.pools.agent.handshake import (
    ACCEPTED,
    CHALLENGE_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    VERSION,
    Challenge,
    GreetingError,
    introduce,
)
from dpex.system import listening
from dpex.system.clock import ManualClock
from dpex.system.listening import Listener, one_to_drop

pytestmark = pytest.mark.timeout(240)
SECRET = bytes(range(32))


class Server(admission.AdmissionServer):
    """Keeps whom it lets in, by number."""

    def __init__(self) -> None:
        self.admitted: dict[int, socket.socket] = {}
        super().__init__("127.0.0.1", self._let_in)

    def _let_in(self, connection: socket.socket, number: int) -> None:
        tune(connection, is_trainer=True)
        self.admitted[number] = connection
        connection.sendall(ACCEPTED)

    def target(self, agent: int) -> TrainerAddress:
        """What an agent on another machine must know to connect."""
        return self.address_of(agent)._replace(local=None)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()
    made.thread.join(60.0)
    assert not made.thread.is_alive()
    for connection in made.admitted.values():
        connection.close()


def pending(target: TrainerAddress) -> socket.socket:
    return socket.create_connection((target.address, target.port), timeout=60)


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def gets_in(target: TrainerAddress) -> bool:
    connect(target).close()
    return True


def test_an_agent_of_this_machine_needs_no_network(server: Server) -> None:
    target = server.target(3)._replace(port=1, local=server.local)
    with connect(target) as connection:
        assert connection.family == server.admitted[3].family == socket.AF_UNIX
    with pytest.raises(GreetingError, match="not its trainer"):
        connect(target._replace(secret=bytes(32)))


@pytest.mark.parametrize("part", ["machine", "name"])
def test_an_agent_that_is_elsewhere_comes_over_the_network(server: Server, part: str) -> None:
    assert server.local is not None
    with connect(server.target(3)._replace(local=server.local._replace(**{part: "other"}))) as connection:
        assert connection.family == server.admitted[3].family == socket.AF_INET


# -- the greeting, without sockets -------------------------------------------------------------------------------------


class Wire:
    """An agent that greets a trainer without a socket. sent, answered: all that travelled."""

    def __init__(self, trainer: Challenge) -> None:
        self.trainer = trainer
        self.sent = self.answered = self._left = b""

    def send(self, data: bytes) -> None:
        self.sent += data
        answer = self.trainer.take(data)
        self.answered += answer
        self._left += answer + (ACCEPTED if self.trainer.number is not None else b"")

    def read(self, nbytes: int) -> bytes:
        if len(self._left) < nbytes:
            raise ConnectionResetError
        found, self._left = self._left[:nbytes], self._left[nbytes:]
        return found


def greeted(trainer: Challenge, *, secret: bytes = SECRET, number: int = 7) -> Wire:
    wire = Wire(trainer)
    introduce(secret, number, wire.send, wire.read)
    return wire


def test_both_ends_prove_that_they_know_the_secret_and_never_send_it() -> None:
    trainer = Challenge(SECRET)
    wire = greeted(trainer)
    assert (trainer.number, trainer.failed) == (7, False)
    assert (len(wire.sent), len(wire.answered)) == (HELLO_BYTES + PROOF_BYTES, CHALLENGE_BYTES)
    assert all(SECRET[start : start + 4] not in wire.sent + wire.answered for start in range(29))


def test_messages_may_come_byte_by_byte() -> None:
    trainer = Challenge(SECRET)

    class Dripping(Wire):
        def send(self, data: bytes) -> None:
            for at in range(len(data)):
                assert self.trainer.number is None
                assert self.trainer.wanted == len(data) - at
                super().send(data[at : at + 1])

    wire = Dripping(trainer)
    introduce(SECRET, 7, wire.send, wire.read)
    assert trainer.number == 7


def test_a_proof_serves_once_and_for_one_number() -> None:
    first, other = greeted(Challenge(SECRET)).sent, greeted(Challenge(SECRET), number=8).sent
    for sent in (first, other[:HELLO_BYTES] + first[HELLO_BYTES:]):
        trainer = Challenge(SECRET)
        trainer.take(sent[:HELLO_BYTES])
        trainer.take(sent[HELLO_BYTES:])
        assert (trainer.number, trainer.failed) == (None, True)


def test_a_trainers_proof_is_no_agents() -> None:
    trainer = Challenge(SECRET)
    challenge = trainer.take(greeted(Challenge(SECRET)).sent[:HELLO_BYTES])
    trainer.take(challenge[-PROOF_BYTES:])
    assert (trainer.number, trainer.failed) == (None, True)


def test_an_agent_does_not_prove_itself_to_others() -> None:
    wire = Wire(Challenge(bytes(32)))
    with pytest.raises(GreetingError, match="not its trainer"):
        introduce(SECRET, 7, wire.send, wire.read)
    assert len(wire.sent) == HELLO_BYTES
    with pytest.raises(GreetingError, match="not the trainer"):
        introduce(SECRET, 7, lambda data: None, lambda nbytes: b"HTTP/"[:nbytes])


def test_another_version_is_told_of_it() -> None:
    trainer = Challenge(SECRET)
    head = trainer.take(b"DPEX" + bytes([VERSION + 1]))
    assert (head, trainer.failed) == (b"DPEX" + bytes([VERSION]), True)
    with pytest.raises(GreetingError, match=f"version {VERSION + 1}, this agent's {VERSION}: install one version"):
        introduce(SECRET, 7, lambda data: None, lambda nbytes: b"DPEX" + bytes([VERSION + 1]))


def hello_of(secret: bytes) -> bytes:
    """What an agent says first."""
    return greeted(Challenge(secret), secret=secret).sent[:HELLO_BYTES]


@pytest.mark.parametrize("data", [b"\0", b"GET / HTTP/1.1\r\n", b"DPE\0", b"\x16\x03\x01\x02\x00" * 20])
def test_what_is_no_hello_is_known_at_once(data: bytes) -> None:
    trainer = Challenge(SECRET)
    assert (trainer.take(data), trainer.failed, trainer.number) == (b"", True, None)


def test_only_who_knows_the_secret_is_let_in(server: Server) -> None:
    target = server.target(3)
    with pytest.raises(GreetingError, match="not its trainer"):
        connect(target._replace(secret=bytes(32)))
    with pending(target) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: trainer\r\nAccept: */*\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert gets_in(target)
    assert list(server.admitted) == [3]


def test_the_secret_is_not_shown(server: Server) -> None:
    target = server.target(3)
    assert repr(target.secret) not in f"{target} {target!r}"


def test_nobody_listening_is_an_os_error(server: Server) -> None:
    target = server.target(3)
    server.close()
    server.thread.join(60.0)
    with pytest.raises(OSError, match=r"\S"):
        connect(target)


# -- floods ------------------------------------------------------------------------------------------------------------


def test_a_flood_costs_no_thread_and_few_descriptors_and_a_worker_gets_in(server: Server) -> None:
    target = server.target(1)
    threads = threading.active_count()
    with contextlib.ExitStack() as flood:
        silent = [flood.enter_context(pending(target)) for _ in range(3 * admission.MOST_PENDING)]
        until(lambda: sum(map(is_closed, silent)) == 2 * admission.MOST_PENDING)
        assert len(server._pending) == admission.MOST_PENDING
        assert threading.active_count() == threads
        assert [is_closed(one) for one in silent] == sorted(map(is_closed, silent), reverse=True)  # the oldest went
        assert gets_in(target)


def the_pending_client(server: Server) -> admission._PendingClient:
    """The client that waits for admission, as the server sees it."""
    until(lambda: len(server._pending) == 1)
    return next(iter(server._pending))


def test_a_stranger_that_drips_has_one_deadline(server: Server) -> None:
    hello = hello_of(SECRET)
    with pending(server.target(1)) as slow:
        seen = the_pending_client(server)
        late_at = seen.late_at
        for at in range(3):
            slow.send(hello[at : at + 1])
            until(lambda at=at: seen.challenge._received == hello[: at + 1])  # type: ignore[misc]
            assert seen.late_at == late_at
        seen.late_at = 0.0
        slow.send(hello[3:4])
        until(lambda: is_closed(slow))


def test_a_silent_stranger_is_dropped(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "GREETING_S", 0.05)
    with pending(server.target(1)) as silent:
        assert silent.recv(1) == b""


def test_a_worker_comes_again_when_it_was_dropped(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a flood: the server drops the first two that come."""
    dropped, listen_to = [], admission.AdmissionServer._listen_to

    def drop(this: admission.AdmissionServer, one: admission._PendingClient) -> None:
        if len(dropped) < 2:
            dropped.append(one)
            this._drop(one)
        else:
            listen_to(this, one)

    monkeypatch.setattr(admission.AdmissionServer, "_listen_to", drop)
    assert gets_in(server.target(1))
    assert len(dropped) == 2


def test_noise_and_half_closed_sockets_do_no_harm(server: Server) -> None:
    target, chance = server.target(1), random.Random(1)
    hello = hello_of(bytes(32))
    for _ in range(200):
        with pending(target) as one, contextlib.suppress(OSError):
            one.sendall(hello[: chance.randrange(len(hello) + 1)] + chance.randbytes(chance.choice((0, 1, 40, 5000))))
            if chance.random() < 0.5:
                one.shutdown(socket.SHUT_WR)
    assert gets_in(target)
    until(lambda: not server._pending)


def test_who_stops_after_the_challenge_is_dropped(server: Server) -> None:
    with pending(server.target(1)) as one:
        one.sendall(hello_of(bytes(32)))
        assert len(one.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
        the_pending_client(server).late_at = 0.0
        one.sendall(b"\0")
        until(lambda: is_closed(one))


def test_an_agent_is_let_in_only_after_its_proof(server: Server) -> None:
    target = server.target(1)
    sent: list[bytes] = []
    with pending(target) as one:

        def send(data: bytes) -> None:
            if sent:
                one.sendall(data[:-1])
                assert 1 not in server.admitted
                one.sendall(data[-1:])
            else:
                one.sendall(data)
            sent.append(data)

        introduce(target.secret, 1, send, lambda nbytes: one.recv(nbytes, socket.MSG_WAITALL))
        assert 1 in server.admitted


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


def test_the_server_outlives_a_want_of_descriptors(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    target, accepts = server.target(1), []
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

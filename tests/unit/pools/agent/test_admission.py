"""Who connects to the trainer: strangers, floods of them, agents of other versions, and agents."""

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from families import no_descriptor_left
from waiting import until

from dpex.pools.agent import connection as admission
from dpex.pools.agent.connection import (
    ACCEPTED,
    VERSION,
    AdmissionServer,
    GreetingError,
    TrainerAddress,
    challenge,
    connect,
    introduce,
    tune,
)

SECRET = bytes(range(32))
HELLO_BYTES, CHALLENGE_BYTES, PROOF_BYTES = 45, 69, 32


class Server(AdmissionServer):
    """Keeps whom it lets in, by number."""

    def __init__(self) -> None:
        self.admitted: dict[int, socket.socket] = {}
        super().__init__("127.0.0.1", self._let_in)

    def _let_in(self, connection: socket.socket, number: int) -> None:
        tune(connection, is_trainer=True)
        self.admitted[number] = connection
        connection.sendall(ACCEPTED)


def threads_of_servers() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name in ("dpex-receive", "dpex-greet")]


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()
    made.close()
    until(lambda: not threads_of_servers())
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


class Ends:
    """An agent and a trainer that greet each other in two threads. sent, answered: all that travels either way."""

    def __init__(self, agents: bytes = SECRET, trainers: bytes = SECRET, number: int = 7) -> None:
        self.sent = self.answered = b""
        self.number: int | None = None
        self.refusal: GreetingError | None = None
        ours, theirs = socket.socketpair()

        def answer(data: bytes) -> None:
            self.answered += data
            theirs.sendall(data)

        def trainer() -> None:
            with theirs:
                try:
                    self.number = challenge(trainers, answer, whole(theirs))
                    theirs.sendall(ACCEPTED)
                except GreetingError as error:
                    self.refusal = error

        def send(data: bytes) -> None:
            self.sent += data
            ours.sendall(data)

        thread = threading.Thread(target=trainer)
        thread.start()
        with ours:
            try:
                introduce(agents, number, send, whole(ours))
            finally:
                ours.shutdown(socket.SHUT_WR)
                thread.join()


def whole(connection: socket.socket) -> Callable[[int], bytes]:
    def read(nbytes: int) -> bytes:
        data = connection.recv(nbytes, socket.MSG_WAITALL)
        if len(data) < nbytes:
            raise GreetingError("it ended")
        return data

    return read


def replayed(*messages: bytes) -> int:
    """The trainer's judgement of what was recorded."""
    left = b"".join(messages)

    def read(nbytes: int) -> bytes:
        nonlocal left
        found, left = left[:nbytes], left[nbytes:]
        return found

    return challenge(SECRET, lambda data: None, read)


def test_both_ends_prove_the_secret_without_sending_it() -> None:
    ends = Ends()
    assert ends.number == 7
    assert (len(ends.sent), len(ends.answered)) == (HELLO_BYTES + PROOF_BYTES, CHALLENGE_BYTES)
    assert all(SECRET[start : start + 4] not in ends.sent + ends.answered for start in range(29))


def test_a_proof_serves_once_for_one_number_and_for_one_end() -> None:
    first, other = Ends(), Ends(number=8)
    proof, trainers = first.sent[HELLO_BYTES:], first.answered[-PROOF_BYTES:]
    for hello, old in ((first.sent, proof), (other.sent, proof), (first.sent, trainers)):
        with pytest.raises(GreetingError, match="does not know this training run's secret"):
            replayed(hello[:HELLO_BYTES], old)


def test_an_agent_does_not_prove_itself_to_others() -> None:
    with pytest.raises(GreetingError, match="does not know this training run's secret"):
        Ends(trainers=bytes(32))
    with pytest.raises(GreetingError, match="not the trainer"):
        introduce(SECRET, 7, lambda data: None, lambda nbytes: b"HTTP/"[:nbytes])


def test_another_version_is_told_of_it() -> None:
    told: list[bytes] = []
    with pytest.raises(GreetingError):
        challenge(SECRET, told.append, lambda nbytes: b"DPEX" + bytes([VERSION + 1]))
    assert told == [b"DPEX" + bytes([VERSION])]
    with pytest.raises(GreetingError, match=f"version {VERSION + 1}, this agent's {VERSION}: install one version"):
        introduce(SECRET, 7, lambda data: None, lambda nbytes: b"DPEX" + bytes([VERSION + 1]))


def test_only_who_knows_the_secret_is_let_in(server: Server) -> None:
    target = server.address_of(3)
    with pytest.raises(GreetingError, match="does not know this training run's secret"):
        connect(target._replace(secret=bytes(32)))
    with pending(target) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: trainer\r\nAccept: */*\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert gets_in(target)
    assert list(server.admitted) == [3]
    assert repr(target.secret) not in f"{target} {target!r}"
    server.close()
    until(lambda: not threads_of_servers())
    with pytest.raises(OSError, match=r"\S"):
        connect(target)


def test_a_flood_costs_few_threads_and_an_agent_gets_in(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "GREETING_S", 0.5)
    target = server.address_of(1)
    most = admission.MOST_GREETINGS
    with contextlib.ExitStack() as flood:
        for _ in range(2 * most):
            flood.enter_context(pending(target))
        until(lambda: len(threads_of_servers()) == most + 1)
        assert gets_in(target)


def test_a_stranger_that_drips_has_one_deadline(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "GREETING_S", 0.2)
    drops = iter(Ends().sent[: HELLO_BYTES - 1])
    with pending(server.address_of(1)) as slow:

        def drips() -> bool:
            with contextlib.suppress(StopIteration, OSError):
                slow.send(bytes([next(drops)]))
            return is_closed(slow)

        until(drips)


def test_noise_and_half_closed_sockets_do_no_harm(server: Server) -> None:
    target, chance = server.address_of(1), random.Random(1)
    hello = Ends(bytes(32), bytes(32)).sent[:HELLO_BYTES]
    for _ in range(200):
        with pending(target) as one, contextlib.suppress(OSError):
            one.sendall(hello[: chance.randrange(len(hello) + 1)] + chance.randbytes(chance.choice((0, 1, 40, 5000))))
            if chance.random() < 0.5:
                one.shutdown(socket.SHUT_WR)
    assert gets_in(target)


def test_the_server_outlives_a_want_of_descriptors(server: Server) -> None:
    target = server.address_of(1)
    clients = [socket.socket() for _ in range(20)]
    with no_descriptor_left():
        for client in clients:
            client.connect((target.address, target.port))
    assert gets_in(target)
    for client in clients:
        client.close()

"""Which trainings the process that makes shared batches accepts, and what they must have alike, without workers."""

import os
import pickle
import socket
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import setup_of
from torch.utils.data import Dataset

from dpex.pools.share import producer as module
from dpex.pools.share.meeting import MeetingPlace, difference, facts_of
from dpex.pools.share.producer import Producer, Subscriber
from dpex.transport.frames import FrameWriter

FACTS = {"share": "a"}


class Writes:
    """An object that writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


@pytest.fixture
def producer(tmp_path: Path) -> Iterator[tuple[Producer, socket.socket]]:
    """A producer without workers, and the connection of a training."""
    place = MeetingPlace(str(tmp_path))
    listener = place.listen()
    assert listener is not None
    with listener:
        listener.setblocking(False)
        pool: Any = SimpleNamespace(
            workers=list, counts=SimpleNamespace(wanted=0), failed=None, resize=lambda _: None, takes_more=False
        )
        client = place.connect()
        assert client is not None
        with client:
            yield Producer(listener, FACTS, pool), client


def heard(producer: Producer, client: socket.socket, tickets: bytes) -> list[Subscriber]:
    """Have the producer read the frames of a training that asks for these tickets; return the trainings it accepts."""
    writer = FrameWriter(client)
    writer.add_frame(("open", 1, (FACTS, 0, 0)))
    writer.add_frame(("tickets", None, 0, 0, tickets))
    assert writer.flush()
    producer._accept()
    for subscriber in list(producer._subscribers.values()):
        producer._hear(subscriber)
    return list(producer._subscribers.values())


def test_nothing_is_read_of_a_process_of_another_user(
    producer: tuple[Producer, socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "peer", lambda connection: (os.getpid(), os.getuid() + 1))
    assert not heard(*producer, pickle.dumps([(0, Writes(tmp_path / "it was unpickled"))]))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConnectionError):
        producer[1].sendall(b"more")


def test_only_the_training_with_unreadable_indices_is_refused(producer: tuple[Producer, socket.socket]) -> None:
    (training,) = heard(*producer, b"cno_such_module\nIndex\n.")
    assert "the sampler of this training: ModuleNotFoundError: No module named 'no_such_module'" in training.refused
    training.close()


class Workers:
    """A pool whose workers are this test: ``sent`` has the tickets, ``made`` what it makes of them."""

    failed, is_unsettled, takes_more, processes = None, False, True, ()
    counts = SimpleNamespace(wanted=0)

    def __init__(self) -> None:
        self.made: deque[Any] = deque()
        self.sent: list[Any] = []

    def workers(self) -> list[int]:
        return []

    def poll(self) -> list[Any]:
        return []

    def resize(self, wanted: int) -> None:
        pass

    def send(self, tickets: list[Any], epoch: int) -> bool:
        self.sent += [(ticket.number, ticket.index) for ticket in tickets]
        return True


def test_a_batch_for_an_ended_training_is_not_given_to_another(
    producer: tuple[Producer, socket.socket], tmp_path: Path
) -> None:
    """A second training with another order asks for the same batch while a worker still makes that of the first."""
    serving, first = producer
    workers = Workers()
    serving._pool = workers  # type: ignore[assignment]
    (subscriber,) = heard(serving, first, pickle.dumps([(0, [1, 2])]))
    serving._hand_on_tickets()
    serving._leave(subscriber)
    second = MeetingPlace(str(tmp_path)).connect()
    assert second is not None
    with second:
        (subscriber,) = heard(serving, second, pickle.dumps([(0, [7, 8])]))
        for made_of in ([1, 2], [7, 8]):
            serving._hand_on_tickets()
            assert workers.sent.pop() == (0, made_of)
            workers.made.append(((0, 0), SimpleNamespace(data=str(made_of), nbytes=1, is_lent=False)))
            serving._hear_workers()
        assert [data for data, _ in subscriber._results] == ["[7, 8]"]
        subscriber.close()


class WithSets(Dataset[torch.Tensor]):
    def __init__(self, endings: Any) -> None:
        self.endings = endings

    def __len__(self) -> int:
        return 1


def test_the_order_of_a_set_is_no_difference() -> None:
    """The order of a set differs by process where the hashes of its items do, as those of texts."""
    one, other = {0, 8}, {8, 0}
    assert str(one) != str(other)
    for value, same in ((one, other), ([one], [other]), ({"a": frozenset(one)}, {"a": frozenset(other)})):
        facts = [facts_of("a", setup_of(WithSets(each))) for each in (value, same, (one, 1))]
        assert not difference(*facts[:2])
        assert "the endings of the dataset of this training is" in difference(facts[0], facts[2])

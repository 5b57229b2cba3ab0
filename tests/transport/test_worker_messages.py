"""What a local worker sends: as few messages as it can."""

import contextlib
import marshal
import math
import mmap
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from families import setup_of
from torch.utils.data._utils import worker as torch_worker

from dpex.pools.local import worker_process
from dpex.pools.local.worker_process import BoardRow, LocalWorker, WorkerPlan, receive

GROUP, SIZE = 7, 4
Start = Callable[[bool], "Ends"]


class Rows:
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((SIZE,), float(index))


class Ends:
    """A worker in this process, and the trainer's end of its socket."""

    def __init__(self, worker: LocalWorker, ours: socket.socket) -> None:
        self.worker = worker
        self._ours = ours

    def make(self, *numbers: int) -> None:
        self.worker._group(GROUP, 0, 0, [(number, [number]) for number in numbers])

    def made(self) -> list[tuple[int, list[int]]]:
        """Group and ticket numbers of the messages that have come, which bring results."""
        found, buffer = [], memoryview(bytearray(1 << 16))
        with contextlib.suppress(BlockingIOError):
            while (received := receive(self._ours, buffer, socket.MSG_DONTWAIT)) is not None:
                found.append(marshal.loads(received[0])[0])
        return [(message[1], [result[1] for result in message[2]]) for message in found]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(torch_worker, "_worker_info", None)
    with ExitStack() as stack:

        def started(shared_queue: bool) -> Ends:
            setup = setup_of(Rows(), num_workers=1, per_batch_seed=shared_queue)
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours, theirs = map(stack.enter_context, pair)
            row = BoardRow(mmap.mmap(-1, 4096), 16)
            worker = LocalWorker(WorkerPlan(setup, shared_queue), 0, theirs, row)
            worker.core.adopt(0)
            return Ends(worker, ours)

        yield started


NOT_YET = worker_process.NO_GROUP


@pytest.mark.parametrize(
    ("limits", "messages"),
    [
        ({"_FLUSH_S": -1.0}, [(NOT_YET, [0]), (NOT_YET, [1]), (GROUP, [2])]),
        ({"_FLUSH_S": math.inf}, [(GROUP, [0, 1, 2])]),
        ({"_FLUSH_S": math.inf, "_RESULT_BYTES": 500}, [(NOT_YET, [0, 1]), (GROUP, [2])]),
    ],
    ids=["they take long", "they take no time", "they fill a message"],
)
@pytest.mark.parametrize("shared_queue", [True, False])
def test_results_come_together_and_the_last_of_a_group_says_so(
    start: Start, monkeypatch: pytest.MonkeyPatch, shared_queue: bool, limits: dict[str, float], messages: Any
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(worker_process, name, value)
    ends = start(shared_queue)
    ends.make(0, 1, 2)
    assert ends.made() == messages

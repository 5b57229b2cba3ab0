"""What a local worker sends: as few messages as it can, and descriptors only where they were announced."""

from __future__ import annotations

import marshal
import math
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils import worker as torch_worker

from dpex.pools.local import worker_process
from dpex.pools.local.worker_process import BoardRow, LocalWorker, WorkerPlan, receive
from dpex.worker.setup import WorkerSetup

LARGE, GROUP = 4096, 7
Start = Callable[[bool, int], "Ends"]


class Rows:
    def __init__(self, size: int) -> None:
        self.size = size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.size,), float(index))


class Ends:
    """A worker in this process, and the trainer's end of its socket."""

    def __init__(self, worker: LocalWorker, ours: socket.socket) -> None:
        self.worker = worker
        self._ours = ours

    def make(self, *numbers: int) -> None:
        self.worker._group(GROUP, 0, 0, [(number, [number]) for number in numbers])

    def messages(self) -> list[tuple[Any, int]]:
        """What has come, and with how many descriptors."""
        found, buffer = [], memoryview(bytearray(1 << 16))
        while True:
            try:
                received = receive(self._ours, buffer, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return found
            assert received is not None
            for fd in received[1]:
                os.close(fd)
            found.append((marshal.loads(received[0])[0], len(received[1])))

    def made(self) -> list[tuple[int, list[int]]]:
        """Group and ticket numbers of the messages that bring results."""
        return [(it[1], [result[1] for result in it[2]]) for it, _ in self.messages() if it[0] == "made"]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(torch_worker, "_worker_info", None)
    with ExitStack() as stack:

        def started(shared_queue: bool, size: int) -> Ends:
            setup = WorkerSetup(
                dataset=Rows(size),
                collate_fn=default_collate,
                worker_init_fn=None,
                iterable=False,
                auto_collation=True,
                drop_last=False,
                num_workers=1,
                base_seed=1,
                per_batch_seed=shared_queue,
            )
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours, theirs = map(stack.enter_context, pair)
            row = BoardRow(mmap.mmap(-1, 4096), 16)
            worker = LocalWorker(WorkerPlan(setup, shared_queue), 0, theirs, row)
            worker._core.adopt(0)
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
    ends = start(shared_queue, 4)
    ends.make(0, 1, 2)
    assert ends.made() == messages


@pytest.mark.parametrize("shared_queue", [True, False])
def test_a_group_of_an_epoch_that_is_over_is_answered_only_where_somebody_counts(
    start: Start, monkeypatch: pytest.MonkeyPatch, shared_queue: bool
) -> None:
    monkeypatch.setattr(worker_process, "_FLUSH_S", math.inf)
    ends = start(shared_queue, 4)
    worker_process.BOARD_ROW.pack_into(ends.worker._row._board, worker_process.CONTROL_ROW, 0, 1)  # epoch 1 has begun
    ends.make(0, 1)
    assert ends.made() == ([(GROUP, [])] if shared_queue else [(GROUP, [0, 1])])


def test_only_a_message_that_was_announced_brings_descriptors(start: Start) -> None:
    ends = start(True, LARGE)
    ends.make(0)
    ends.make(1)
    assert [(message[0], fds) for message, fds in ends.messages()] == [
        ("coming", 0),
        ("segments", 1),
        ("made", 0),
        ("made", 0),
    ]

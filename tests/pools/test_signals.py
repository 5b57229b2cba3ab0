"""What a trainer does with signals stays in the trainer, and what it ignores does not blind the template."""

import os
import signal
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from families import Augmented, Of, assert_same, kill, seeded, stacked, worker_pids
from inspection import template_pid
from torch.utils.data import IterableDataset, get_worker_info
from workload import wait_as_work

from dpex import DpexDataLoader
from dpex.pools.local.forking import forget_handlers, with_signals_blocked

HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGALRM, signal.SIGCHLD)
SENT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def handler(_number: int, _frame: Any) -> None:
    """Of a trainer that writes a checkpoint, say."""


@pytest.fixture
def busy_with_signals() -> Iterator[None]:
    """A trainer with handlers, a wake-up descriptor as `asyncio` sets it, and a blocked signal."""
    kept = {number: signal.signal(number, handler) for number in HANDLED}
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    wakeup = signal.set_wakeup_fd(theirs.fileno())
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.set_wakeup_fd(wakeup)
        for number, before in kept.items():
            signal.signal(number, before)
        ours.close()
        theirs.close()


def seen_at(index: int) -> torch.Tensor:
    """Sample: how many of the trainer's handlers, wake-up descriptors and blocked signals its worker has, and how many
    signals it survives."""
    handlers = sum(signal.getsignal(number) is handler for number in HANDLED)
    blocked = len(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    survives = sum(signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN) for number in SENT)
    return torch.tensor([handlers, signal.set_wakeup_fd(-1) != -1, blocked, survives])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_have_none_of_the_trainer_s_handlers(busy_with_signals: None, method: str) -> None:
    loader = DpexDataLoader(Of(seen_at, 4), num_workers=1, multiprocessing_context=method)
    assert [batch.tolist() for batch in loader] == [[[0, 0, 0, len(SENT)]]] * 4


def ignores_at(index: int) -> bool:
    """Sample: True if its worker ignores SIGUSR1, as programs that the sample starts would."""
    return signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_ignore_what_the_trainer_ignores(method: str) -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        assert list(
            DpexDataLoader(Of(ignores_at, 1), batch_size=None, num_workers=1, multiprocessing_context=method)
        ) == [True]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_fork_server_blocks_no_signal_and_training_keeps_its(busy_with_signals: None) -> None:
    iterator = iter(DpexDataLoader(Augmented(8), num_workers=1))
    next(iterator)
    assert not mask_of(template_pid(iterator), "SigBlk")
    assert all(signal.getsignal(number) is handler for number in HANDLED)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == {signal.SIGUSR1}


class Stream(IterableDataset[torch.Tensor]):
    """As many numbers from each worker."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        assert info is not None
        for number in range(info.id, 400, info.num_workers):
            wait_as_work(0.001)
            yield torch.tensor(number)


@pytest.mark.parametrize(
    ("dataset", "method", "sizes", "is_ignored"),
    [
        (Augmented(400, nap_s=0.001), "fork", 2, False),
        (Stream(), "fork", 2, False),
        (Stream(), "fork", 2, True),
        (Augmented(400, nap_s=0.001), "fork", "auto", False),
        (Augmented(400, nap_s=0.001), "spawn", 2, False),
    ],
    ids=["map", "stream", "stream, ignored", "auto", "spawn"],
)
def test_a_signal_that_the_trainer_survives_ends_no_process(
    dataset: Any, method: str, sizes: Any, is_ignored: bool
) -> None:
    """Slurm sends SIGUSR1, SIGUSR2 or SIGTERM to every process of a job before it is preempted."""
    told: list[int] = []
    does = signal.SIG_IGN if is_ignored else lambda number, _: told.append(number)
    kept = {number: signal.signal(number, does) for number in SENT}
    try:
        loader = DpexDataLoader(dataset, batch_size=4, num_workers=sizes, multiprocessing_context=method)
        iterator = iter(loader)
        got = [next(iterator)]
        processes = [*worker_pids(iterator), template_pid(iterator)]
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            for number in SENT:
                for pid in (*processes, os.getpid()):
                    os.kill(pid, number)
            got += iterator
    finally:
        for number, before in kept.items():
            signal.signal(number, before)
    assert sum(map(len, got)) == 400
    assert loader.stats().deaths == 0
    assert told == ([] if is_ignored else list(SENT))


def test_a_signal_that_ends_the_trainer_ends_a_worker(recwarn: pytest.WarningsRecorder) -> None:
    iterator = iter(DpexDataLoader(Augmented(100, nap_s=0.001), num_workers=1, seeding="batch"))
    next(iterator)
    os.kill(worker_pids(iterator)[0], signal.SIGUSR1)
    assert len(list(iterator)) == 99
    assert any("killed by signal" in str(warning.message) for warning in recwarn)


def mask_of(pid: int, which: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(which)).split()[1], 16)


def test_a_signal_just_after_a_fork_runs_no_inherited_handler() -> None:
    """A signal to the whole process group may come between the fork and the child's first line."""
    reader, writer = os.pipe()
    before = signal.signal(signal.SIGTERM, lambda *_: os.write(writer, b"the handler ran"))

    def fork() -> int:
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            forget_handlers()  # unblocked, it does nothing
            os._exit(3)
        return child

    try:
        child = with_signals_blocked(fork)
    finally:
        signal.signal(signal.SIGTERM, before)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    with os.fdopen(reader) as pipe:
        assert pipe.read() == ""


@pytest.mark.parametrize("at", [1, 2, 3])
def test_signals_are_not_left_blocked_by_a_handler(at: int) -> None:
    """The handler of a signal that came before may raise as any of the calls that set the mask begins."""
    calls = 0

    def handler(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_name == "pthread_sigmask"
        if calls == at:
            sys.settrace(None)
            raise KeyboardInterrupt

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        sys.settrace(handler)
        with pytest.raises(KeyboardInterrupt):
            with_signals_blocked(int)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    finally:
        sys.settrace(None)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_death_is_noticed_although_the_trainer_ignores_sigchld() -> None:
    wanted = stacked(DpexDataLoader(Augmented(60), batch_size=2, num_workers=2, seeding="batch", generator=seeded()))
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        loader = DpexDataLoader(
            Augmented(60, nap_s=0.002), batch_size=2, num_workers=2, seeding="batch", generator=seeded()
        )
        iterator = iter(loader)
        found = [next(iterator)]
        kill(worker_pids(iterator, 2)[0])
        with pytest.warns(RuntimeWarning, match="killed by signal"):
            found += list(iterator)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert_same(torch.cat(found), wanted)


def test_a_fork_server_reaped_by_the_training_counts_as_dead() -> None:
    """As one does that starts programs, and waits for whichever ends."""
    with DpexDataLoader(Augmented(8), num_workers=1, seeding="batch") as loader:
        iterator = iter(loader)
        next(iterator)
        pid = template_pid(iterator)
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[0] == pid
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert len(list(iterator)) == 7
        assert ["starting anew" in str(warning.message) for warning in caught] == [True]

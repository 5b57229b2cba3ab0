"""What a trainer does with signals stays in the trainer, and what it ignores does not blind the template."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Augmented, assert_same, is_alive, kill, seeded, stacked, template_pid, worker_pids

from dpex import DpexDataLoader
from dpex.pools.local import signals

pytestmark = pytest.mark.timeout(240)
HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGALRM, signal.SIGCHLD)


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


class Seen:
    """Sample: how many of the trainer's handlers, wake-up descriptors and blocked signals its worker has."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        handlers = sum(signal.getsignal(number) is not signal.SIG_DFL for number in HANDLED)
        blocked = len(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        return torch.tensor([handlers, signal.set_wakeup_fd(-1) != -1, blocked])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_have_none_of_the_trainer_s_handlers(busy_with_signals: None, method: str) -> None:
    loader = DpexDataLoader(Seen(), num_workers=1, multiprocessing_context=method)
    assert [batch.tolist() for batch in loader] == [[[0, 0, 0]]] * 4


def test_the_template_has_none_either_and_the_trainer_keeps_its_own(busy_with_signals: None) -> None:
    iterator = iter(DpexDataLoader(Augmented(8), num_workers=1))
    next(iterator)
    caught, blocked = (mask_of(template_pid(iterator), which) for which in ("SigCgt", "SigBlk"))
    assert not blocked
    assert not [number for number in HANDLED if caught & 1 << number - 1]
    assert all(signal.getsignal(number) is handler for number in HANDLED)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == {signal.SIGUSR1}


def mask_of(pid: int, which: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(which)).split()[1], 16)


def test_what_arrives_before_a_forked_process_has_forgotten_runs_no_handler() -> None:
    """A signal to the whole process group may come between the fork and the child's first line."""
    reader, writer = os.pipe()
    before = signal.signal(signal.SIGTERM, lambda *_: os.write(writer, b"the handler ran"))
    try:
        with signals.blocked():
            child = os.fork()
            if not child:
                os.kill(os.getpid(), signal.SIGTERM)
                signals.forget()  # unblocked, it ends the child
                os._exit(1)
    finally:
        signal.signal(signal.SIGTERM, before)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    with os.fdopen(reader) as pipe:
        assert pipe.read() == ""


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


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_whose_end_is_not_told_to_who_ignores_sigchld_is_not_taken_for_alive(method: str) -> None:
    """Its number would get a SIGTERM when the interpreter ends, whoever has it by then."""
    before, others = signal.signal(signal.SIGCHLD, signal.SIG_IGN), multiprocessing.active_children()
    try:
        with DpexDataLoader(Augmented(8), num_workers=1, multiprocessing_context=method) as loader:
            iterator = iter(loader)
            next(iterator)
            pid = template_pid(iterator)
            assert pid in {child.pid for child in multiprocessing.active_children()}
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert not is_alive(pid)
    assert set(multiprocessing.active_children()) <= set(others)


@pytest.mark.filterwarnings("ignore:DataLoader worker:RuntimeWarning")
def test_a_process_that_the_trainer_itself_waited_for_is_not_taken_for_alive() -> None:
    """As one does that starts programs, and waits for whichever ends."""
    others = multiprocessing.active_children()
    with DpexDataLoader(Augmented(8), num_workers=1, seeding="batch") as loader:
        iterator = iter(loader)
        next(iterator)
        pid = template_pid(iterator)
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[0] == pid
        with pytest.warns(RuntimeWarning, match="starting anew"):
            assert len(list(iterator)) == 7
    assert set(multiprocessing.active_children()) <= set(others)

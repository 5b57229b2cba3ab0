"""What a forked process still reads is not overwritten; what it does not read comes back; nobody else pays."""

import gc
import multiprocessing
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from families import Of, descriptors
from pairs import LARGE, Pair
from waiting import until

from dpex import DpexDataLoader
from dpex.transport import arena


class Child:
    """A forked process that runs ``body`` and lives until it is told to end."""

    def __init__(self, body: Callable[[], object] = lambda: None) -> None:
        told, self._tell = os.pipe()
        self._says, says = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._tell)
            code = 99
            try:
                body()
                os.write(says, b"ready")
                os.read(told, 1)
                code = 0
            finally:
                os._exit(code)
        os.close(told)
        os.close(says)
        assert os.read(self._says, 5) == b"ready"

    def end(self) -> None:
        os.write(self._tell, b"!")  # closing it would not do: younger children have it, too
        os.close(self._tell)
        assert os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == 0
        os.close(self._says)


@pytest.fixture
def pair() -> Iterator[Pair]:
    gc.collect()  # slots that tests before left in cycles are in use
    yield Pair()
    gc.collect()
    arena.release_after_forks()
    assert arena.forks == []


def held(pair: Pair) -> int:
    arena.release_after_forks()
    return pair.slots_held()


def test_the_childs_children_count(pair: Pair) -> None:
    batch = pair(torch.arange(LARGE))
    told, tell = os.pipe()

    def fork_again() -> None:
        if os.fork() == 0:
            os.close(tell)
            os.read(told, 1)
            os._exit(0)

    child = Child(fork_again)
    del batch
    child.end()
    os.close(told)
    assert held(pair) == 1
    os.close(tell)
    until(lambda: held(pair) == 0)


def test_a_slot_returns_when_the_last_of_several_children_ends(pair: Pair) -> None:
    first = pair(torch.arange(LARGE))
    older = Child()
    second = pair(torch.arange(LARGE))
    younger = Child()
    del first, second
    assert held(pair) == 2
    older.end()
    assert held(pair) == 2  # the younger child inherited both
    younger.end()
    assert held(pair) == 0


def test_what_came_after_the_fork_comes_back_at_once(pair: Pair) -> None:
    batch = pair(torch.arange(LARGE))
    child = Child()
    later = pair(torch.arange(LARGE))
    assert held(pair) == 2
    del later
    assert held(pair) == 1
    child.end()
    assert held(pair) == 1
    del batch
    assert held(pair) == 0


def test_the_next_batch_brings_back_what_a_child_gave_up(pair: Pair) -> None:
    """Nobody calls `release_after_forks` in a training loop."""
    batch = pair(torch.arange(LARGE))
    child = Child()
    del batch
    child.end()
    pair(torch.arange(LARGE))
    assert arena.forks == []
    assert pair.slots_held() == 0


def test_each_living_child_costs_one_descriptor_until_it_ends(pair: Pair) -> None:
    batch = pair(torch.arange(LARGE))
    before = descriptors()
    children = [Child() for _ in range(3)]
    assert len(descriptors() - before) == 3 * 3  # two of them are the test's own
    for child in children:
        child.end()
    arena.release_after_forks()
    assert descriptors() == before
    del batch


@pytest.mark.parametrize("preexec", [None, lambda: None], ids=["plain", "preexec_fn"])
def test_a_program_that_is_executed_holds_nothing(pair: Pair, preexec: Any) -> None:
    batch = pair(torch.arange(LARGE))
    script = "import os; print(len(os.listdir('/proc/self/fd')), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=preexec,
        close_fds=False,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        del batch
        until(lambda: held(pair) == 0)
        assert process.poll() is None
        process.communicate(b"\n")


def test_a_fork_without_descriptors_leaks_memory_not_batches(pair: Pair) -> None:
    batch = pair(torch.arange(LARGE))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    os.waitpid(pid, 0)
    del batch
    assert held(pair) == 1
    arena.forks.clear()


def test_a_slot_of_a_forking_worker_is_held_until_the_child_ends(pair: Pair) -> None:
    """The maker's side is lent in the same way: a dataset may fork, too."""
    collated = pair.arena.tensor((LARGE,), torch.float32).fill_(1)
    child = Child()
    del collated
    assert held(pair) == 1
    child.end()
    assert held(pair) == 0


def numbers_at(index: int) -> torch.Tensor:
    return torch.full((LARGE,), float(index))


def test_a_forked_process_keeps_the_batch_it_was_given() -> None:
    iterator = iter(DpexDataLoader(Of(numbers_at, 120), batch_size=1, num_workers=1))
    batch = next(iterator)
    unchanged: list[bool] = []
    go, gone_on = multiprocessing.Pipe()
    answers, answer = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")

    def watch(batch: torch.Tensor) -> None:
        gone_on.recv()
        answer.send(batch.unique().tolist() == [0.0])

    process = context.Process(target=watch, args=(batch,))
    process.start()
    del batch
    assert [int(b[0, 0]) for b in iterator] == list(range(1, 120))
    go.send("gone on")
    unchanged.append(answers.recv())
    process.join()
    assert unchanged == [True]


def test_dpex_s_own_processes_hold_nothing() -> None:
    """The template of the second iterator is forked while a batch of the first is in use."""
    loader = DpexDataLoader(Of(numbers_at, 120), batch_size=1, num_workers=1)
    first = iter(loader)
    batch = next(first)
    second = iter(loader)
    next(second)
    until(lambda: (arena.release_after_forks(), arena.forks == [])[1])
    assert int(batch[0, 0]) == 0
    assert len(list(second)) == 119

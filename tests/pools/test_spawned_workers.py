"""Workers of the start methods "spawn" and "forkserver": each imports the script and unpickles for itself."""

import multiprocessing
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Augmented, assert_same, is_alive, kill, seeded, setup_of, stacked, worker_pids
from torch.utils.data import DataLoader, Dataset
from waiting import meet, until

from dpex import DpexDataLoader
from dpex.pools.local.clean_server import starter_for
from dpex.pools.local.pool import LocalPool
from dpex.pools.local.worker_process import WorkerPlan
from dpex.schedule.events import Notice

METHODS = pytest.mark.parametrize("method", ["spawn", "forkserver"])


def loader_of(dataset: Any, method: str, **options: Any) -> DpexDataLoader[Any]:
    options = {"batch_size": 4, "num_workers": 1, "generator": seeded(), **options}
    return DpexDataLoader(dataset, multiprocessing_context=method, **options)


class UsesThreads(Dataset[torch.Tensor]):
    """Sample: the index, by a thread that a module has started at its import, and the worker's process."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        from threads_at_import import POOL

        return torch.tensor([POOL.submit(lambda: index).result(), os.getpid()])

    def __reduce__(self) -> Any:
        return _with_the_module, ()


def _with_the_module() -> UsesThreads:
    """As where the dataset's own module has such threads: it is imported before the dataset is unpickled."""
    import threads_at_import  # noqa: F401

    return UsesThreads()


@METHODS
def test_threads_started_at_import_live_in_every_worker(method: str) -> None:
    made = stacked(loader_of(UsesThreads(), method, num_workers=2))
    assert made[:, 0].tolist() == list(range(8))
    assert len(set(made[:, 1].tolist())) == 2


class Attribute(Dataset[int]):
    """Sample: what the attribute was when the dataset was sent."""

    def __init__(self) -> None:
        self.value = 1

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return self.value


def test_a_worker_started_later_has_the_dataset_as_of_iter() -> None:
    dataset = Attribute()
    loader = loader_of(dataset, "spawn", seeding="batch")
    iterator = iter(loader)
    dataset.value = 2
    seen = set(next(iterator).tolist())
    loader.resize(local=2)
    kill(worker_pids(iterator)[0])
    with pytest.warns(RuntimeWarning, match="killed by signal"):
        seen.update(*(batch.tolist() for batch in iterator))
    assert seen == {1}


class Shares(Dataset[int]):
    """Holds what travels as a descriptor or a name: a shared tensor, a connection and a lock.

    From sample 20 on, two workers must have met.
    """

    def __init__(self, method: str, length: int, place: Path) -> None:
        self.place = place
        context: Any = multiprocessing.get_context(method)
        self.made = torch.zeros(length, dtype=torch.int64).share_memory_()
        self.reader, self.writer = context.Pipe(duplex=False)
        self.lock = context.Lock()

    def __len__(self) -> int:
        return len(self.made)

    def __getitem__(self, index: int) -> int:
        with self.lock:
            self.made[index] += 1
            self.writer.send(os.getpid())
        if index >= 20:
            meet(self.place, 2)
        return index


@METHODS
def test_shared_objects_reach_workers_that_start_later(method: str, tmp_path: Path) -> None:
    dataset = Shares(method, 40, tmp_path)
    loader = loader_of(dataset, method, seeding="batch")
    iterator = iter(loader)
    got = [next(iterator)]
    loader.resize(local=2)
    got += iterator
    assert torch.cat(got).tolist() == list(range(40))
    assert dataset.made.tolist() == [1] * 40
    assert len({dataset.reader.recv() for _ in range(40)}) == 2


@METHODS
def test_a_dead_worker_is_replaced_and_the_batches_are_the_same(method: str) -> None:
    with loader_of(Augmented(40), method, persistent_workers=True) as loader:
        iterator = iter(loader)
        got = [next(iterator)]
        (first,) = worker_pids(iterator)
        os.kill(first, signal.SIGKILL)
        with pytest.warns(RuntimeWarning, match="killed by signal"):
            got += iterator
        (second,) = worker_pids(iterator)
        assert first != second
        got += iter(loader)
        assert worker_pids(iterator) == [second], "a persistent worker is there for the next epoch"
    assert not is_alive(second)
    with DpexDataLoader(Augmented(40), 4, num_workers=1, generator=seeded(), persistent_workers=True) as loader:
        assert_same(torch.cat(got), torch.cat([stacked(loader), stacked(loader)]))


class CannotBeUnpickled(Augmented):
    error: type[Exception] = ValueError

    def __setstate__(self, state: Any) -> None:
        raise self.error("there is nothing to unpickle this with")


class LosesItsStore(CannotBeUnpickled):
    """The error is also that of a worker whose trainer is gone."""

    error = ConnectionResetError


def pool_of(dataset: Any, workers: int) -> LocalPool:
    plan = WorkerPlan(setup_of(dataset, num_workers=workers, per_batch_seed=True), True)
    return LocalPool(starter_for(multiprocessing.get_context("spawn"), plan), shared_queue=True, first_workers=workers)


@pytest.mark.parametrize("kind", [CannotBeUnpickled, LosesItsStore])
def test_workers_that_end_before_being_ready_are_not_restarted(kind: Any) -> None:
    pool = pool_of(kind(8), 3)
    try:
        until(lambda: pool.poll() is not None and pool.failed)
        assert not [event for event in pool.poll() if isinstance(event, Notice)]
        assert "no local worker can be started: a worker failed before its first batch:\nTraceback" in pool.failed
        assert pool.failed.endswith("Error: there is nothing to unpickle this with")
        assert (pool.counts.requested, pool.counts.running) == (0, 0)
        assert not pool._workers
        pool.resize(1)
        assert pool.failed is None
        assert pool.counts.requested == 1
    finally:
        pool.close()


def test_a_handled_signal_does_not_end_a_starting_worker() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        pool = pool_of(Augmented(8), 2)
        until(lambda: pool.poll() is not None and len(pool.pids()) == 2)
        pids = pool.pids()
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        try:
            until(lambda: pool.poll() is not None and pool.counts.running == 2)
            assert pool.pids() == pids
        finally:
            pool.close()
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("is_up", [True, False])
def test_workers_that_stay_are_killed_when_the_pool_is_closed(is_up: bool) -> None:
    pool = pool_of(Augmented(8), 1)
    until(lambda: pool.poll() is not None and (pool.counts.running if is_up else pool.pids()))
    (pid,) = pool.pids()
    os.kill(pid, signal.SIGSTOP)
    pool.close(0.1)
    assert not is_alive(pid)


def test_a_script_without_a_guard_is_told_so_as_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that imports such a script comes to its loader again."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(RuntimeError) as theirs:
        iter(DataLoader(Augmented(8), num_workers=1, multiprocessing_context="spawn"))
    with pytest.raises(RuntimeError, match=re.escape(str(theirs.value))):
        iter(loader_of(Augmented(8), "spawn"))


def test_more_descriptors_than_a_message_holds_reach_the_worker() -> None:
    dataset: Any = [torch.tensor(number) for number in range(300)]
    assert torch.cat(list(loader_of(dataset, "spawn"))).tolist() == list(range(300))

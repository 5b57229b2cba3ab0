"""Local workers that are threads: the same batches at less memory, and processes again where that would fail."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import Augmented, ThreadSafe, assert_same, is_alive, kill, living_workers, seeded, stacked, template_pid
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info
from waiting import PATIENCE_S, meet, until

import dpex
from dpex import DpexDataLoader, OptionError, WorkerDiedError
from dpex.pools.local import clean_fork_server
from dpex.pools.local.packing import LATER, NEW, Packing
from dpex.worker.threads import declares_thread_safe

DIED = "ignore:DataLoader worker:RuntimeWarning"
CROWD = "ignore:This DataLoader will create:UserWarning"
pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings(CROWD)]
PROCESSES = 2
LENGTH, BATCH = 400, 4


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further workers are threads, on any machine."""
    monkeypatch.setattr("dpex.loader.passes.rank_cpus", lambda: PROCESSES)


def loader_of(dataset: Any, workers: int = 8, **options: Any) -> DpexDataLoader[Any]:
    options = {"batch_size": BATCH, "shuffle": True, "seeding": "batch", "generator": seeded(), **options}
    return DpexDataLoader(dataset, num_workers=workers, **options)


def population(iterator: Any) -> list[int]:
    """Workers of each process that has any."""
    processes = iterator._engine.pool("local")._fleet.processes.values()
    return sorted(len(process.workers) for process in processes if process.workers)


@pytest.fixture(scope="module")
def wanted() -> torch.Tensor:
    """What any workers must make of an epoch."""
    return stacked(loader_of(ThreadSafe(LENGTH), 0))


# -- the same batches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thread_safe", [None, True, False])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_threads_make_what_processes_and_the_trainer_make(
    wanted: torch.Tensor, workers: int, thread_safe: bool | None
) -> None:
    with loader_of(ThreadSafe(LENGTH, 0.001), workers, thread_safe=thread_safe) as loader:
        iterator = iter(loader)
        got = [next(iterator) for _ in range(60)]
        until(lambda: iterator._engine._supply.collect() or loader.stats().pools["local"].running == workers)
        processes = workers if thread_safe is False else min(workers, PROCESSES)
        until(lambda: iterator._engine._supply.collect() or len(living_workers(iterator)) == processes)
        assert sum(population(iterator)) == workers
        assert max(population(iterator)) - min(population(iterator)) <= 1
        assert_same(torch.cat([*got, *iterator]), wanted)


def test_large_batches_lie_in_slots_of_the_thread_that_made_them() -> None:
    wanted = stacked(loader_of(ThreadSafe(LENGTH, extra=3000), 0))
    assert_same(stacked(loader_of(ThreadSafe(LENGTH, 0.0002, extra=3000), 6)), wanted)


def test_persistent_workers_over_epochs() -> None:
    runs = []
    for options in ({"thread_safe": True}, {"thread_safe": False}):
        with loader_of(ThreadSafe(100, 0.001), 6, persistent_workers=True, **options) as loader:
            runs.append(torch.cat([stacked(loader), stacked(loader)]))
    assert_same(*runs)


def test_processes_that_are_spawned() -> None:
    options = {"multiprocessing_context": "spawn", "thread_safe": True}
    assert_same(stacked(loader_of(ThreadSafe(100, 0.001), 5, **options)), stacked(loader_of(ThreadSafe(100), 0)))


def test_processes_of_the_clean_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clean_fork_server, "is_ray_connected", lambda: True)
    try:
        with loader_of(ThreadSafe(LENGTH, 0.002), 6) as loader:
            iterator = iter(loader)
            pool: Any = iterator._engine.pool("local")
            until(lambda: pool.poll() is not None and pool.counts.running == 2)  # else this process makes the batches
            got = [next(iterator) for _ in range(90)]
            assert population(iterator) == [3, 3]
            assert_same(torch.cat([*got, *iterator]), stacked(loader_of(ThreadSafe(LENGTH), 0)))
    finally:
        server, clean_fork_server._server = clean_fork_server._server, None
        if server is not None:
            server._process.kill()
            server._finalizer()


# -- resizing and deaths -----------------------------------------------------------------------------------------------

Step = Callable[[Any, Any], None]


def resized(workers: int) -> Step:
    return lambda loader, _: loader.resize(local=workers)


def process_killed(_: Any, iterator: Any) -> None:
    pids = living_workers(iterator)
    if pids:
        kill(pids[0])


def template_killed(_: Any, iterator: Any) -> None:
    kill(template_pid(iterator))


def to_and_fro(loader: Any, _: Any) -> None:
    for workers in (9, 1, 3, 2, 1, 7):
        loader.resize(local=workers)


def shrunk_and_killed(loader: Any, iterator: Any) -> None:
    loader.resize(local=2)
    process_killed(loader, iterator)


EVENTS: dict[str, tuple[int, dict[int, Step]]] = {
    "grow": (1, {10: resized(9)}),
    "shrink": (8, {30: resized(3)}),
    "at once to and fro": (4, {20: to_and_fro}),
    "to and fro": (3, {k: resized(1 + k % 7) for k in range(1, 99, 2)}),
    "kill a process": (8, {30: process_killed}),
    "kill a process at once": (8, {0: process_killed}),
    "kill processes often": (6, dict.fromkeys(range(20, 80, 15), process_killed)),
    "kill a process that shrinks": (8, {30: shrunk_and_killed}),
    "kill the template": (6, {30: template_killed}),
}


@pytest.mark.filterwarnings(DIED, "ignore:the process that starts:RuntimeWarning", "ignore:Processes whose threads")
@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.parametrize("nap_s", [0.0, 0.002])
def test_batches_do_not_depend_on_what_happens(wanted: torch.Tensor, name: str, nap_s: float) -> None:
    workers, steps = EVENTS[name]
    with loader_of(ThreadSafe(LENGTH, nap_s), workers) as loader:
        iterator = iter(loader)
        got = []
        for number, batch in enumerate(iterator):
            got.append(batch)
            if number in steps:
                steps[number](loader, iterator)
        assert_same(torch.cat(got), wanted)


@pytest.mark.parametrize("seed", range(4))
def test_exactly_once_under_random_resizes(wanted: torch.Tensor, seed: int) -> None:
    sizes = random.Random(seed)
    with loader_of(ThreadSafe(LENGTH, 0.0005), 4) as loader:
        got = []
        for batch in loader:
            got.append(batch)
            if sizes.random() < 0.4:
                loader.resize(local=sizes.randrange(1, 12), prefetch=sizes.randrange(1, 30))
        assert_same(torch.cat(got), wanted)


def test_growth_adds_threads_and_shrinking_ends_them_and_their_processes() -> None:
    with loader_of(ThreadSafe(4000, 0.001), 2) as loader:
        iterator = iter(loader)
        next(iterator)
        assert population(iterator) == [1, 1]
        for workers, processes in ((10, 2), (1, 1), (5, 2)):
            loader.resize(local=workers)
            until(lambda workers=workers: next(iterator) is not None and sum(population(iterator)) == workers)
            until(lambda processes=processes: len(living_workers(iterator)) == processes)
        next(iterator)


@pytest.mark.filterwarnings(DIED)
def test_a_killed_process_is_one_death_and_its_workers_are_threads_again() -> None:
    with loader_of(ThreadSafe(LENGTH, 0.02), 8) as loader:
        iterator = iter(loader)
        until(lambda: next(iterator) is not None and population(iterator) == [4, 4])
        next(iterator)
        os.kill(living_workers(iterator)[0], signal.SIGKILL)
        with pytest.warns(RuntimeWarning, match=r"is killed by signal.*\(\d+ tickets\) is made again"):
            until(lambda: next(iterator) is not None and loader.stats().deaths)
        until(lambda: next(iterator) is not None and population(iterator) == [4, 4])
        assert loader.stats().deaths == 1
        assert 1 <= loader.stats().remade <= 8


class Deadly(ThreadSafe):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 150:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.filterwarnings(DIED, "ignore:Processes whose threads:RuntimeWarning")
def test_a_deadly_sample_is_found_and_those_beside_it_are_delivered() -> None:
    with loader_of(Deadly(LENGTH, 0.001), 8, shuffle=False) as loader:
        iterator = iter(loader)
        got = [next(iterator) for _ in range(37)]
        with pytest.raises(WorkerDiedError, match=r"dataset indices \[148, 149, 150, 151\]"):
            next(iterator)
        got += iterator
    assert torch.cat(got)[:, 0].tolist() == [index for index in range(LENGTH) if not 148 <= index < 152]


# -- what a thread gets ------------------------------------------------------------------------------------------------


class Wrong(ThreadSafe):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 40 == 7:
            raise KeyError(f"sample {index}")
        return super().__getitem__(index)


def test_an_error_is_raised_at_its_place_and_the_rest_is_delivered() -> None:
    iterator, got = iter(loader_of(Wrong(LENGTH, 0.001), 8, shuffle=False)), []
    for number in range(LENGTH // BATCH):
        if number % 10 == 1:
            caught = rf"(?s)Caught KeyError in DataLoader worker process \d+\..*sample {number * 4 + 3}'"
            with pytest.raises(KeyError, match=caught):
                next(iterator)
        else:
            got.append(next(iterator)[0, 0].item())
    assert got == [number * 4 for number in range(100) if number % 10 != 1]


class Ending(ThreadSafe):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 201 and not Path(self.mark).exists():
            Path(self.mark).touch()
            raise SystemExit(3)
        return super().__getitem__(index)


@pytest.mark.filterwarnings(DIED)
def test_a_thread_that_ends_by_itself_ends_its_process(wanted: torch.Tensor, tmp_path: Path) -> None:
    dataset = Ending(LENGTH, 0.001)
    dataset.mark = str(tmp_path / "ended")
    with loader_of(dataset, 6) as loader, pytest.warns(RuntimeWarning, match="exited unexpectedly with exit code"):
        assert_same(stacked(loader), wanted)


class Hanging(ThreadSafe):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 200:
            until(Path(self.gate).exists, 10 * PATIENCE_S)
        return super().__getitem__(index)


def test_a_thread_that_hangs_does_not_stop_the_others(tmp_path: Path) -> None:
    dataset = Hanging(LENGTH, 0.001)
    dataset.gate = str(tmp_path / "gate")
    iterator = iter(loader_of(dataset, 4, shuffle=False, in_order=False))
    first = torch.cat([next(iterator) for _ in range(LENGTH // BATCH - 1)])[:, 0].tolist()
    assert sorted(first) == [index for index in range(LENGTH) if not 200 <= index < 204]
    Path(dataset.gate).touch()
    assert next(iterator)[:, 0].tolist() == [200, 201, 202, 203]


def test_a_hanging_thread_does_not_stop_the_end(tmp_path: Path) -> None:
    dataset = Hanging(LENGTH, 0.001)
    dataset.gate = str(tmp_path / "gate")
    iterator = iter(loader_of(dataset, 4, shuffle=False))
    for _ in range(40):
        next(iterator)
    pids = living_workers(iterator)
    iterator._engine.close(grace_s=0.1)
    until(lambda: not any(map(is_alive, pids)))


class Meeting(ThreadSafe):
    """Once the folder ``place`` is there, samples wait until so many threads ``many`` make some."""

    place: Path
    many: int

    def meet_others(self) -> None:
        if self.place.exists():
            meet(self.place, self.many)


def of_all_threads(dataset: Meeting, place: Path, **options: Any) -> torch.Tensor:
    """An epoch of which each of six workers made some, though none begins before the first batch is known to draw
    nothing."""
    dataset.place, dataset.many = place / "meeting", 6
    with loader_of(dataset, dataset.many, **options) as loader:
        iterator = iter(loader)
        got = [next(iterator)]
        until(lambda: iterator._engine._supply.collect() or loader.stats().pools["local"].running == dataset.many)
        dataset.place.mkdir()
        return torch.cat([*got, *iterator])


class Informed(Meeting):
    """Sample: index, worker id, its seed less the id, number of workers, pid, thread, whether its dataset is this."""

    def __getitem__(self, index: int) -> torch.Tensor:
        self.meet_others()
        info = get_worker_info()
        assert info is not None
        assert isinstance(info, torch.utils.data._utils.worker.WorkerInfo)
        assert f"id={info.id}" in repr(info)
        own = info.dataset is self
        ident = threading.get_ident() % 2**40
        return torch.tensor([index, info.id, info.seed - info.id, info.num_workers, os.getpid(), ident, own])


def test_get_worker_info_is_that_of_the_thread(tmp_path: Path) -> None:
    rows = of_all_threads(Informed(LENGTH), tmp_path)
    assert set(rows[:, 3].tolist()) == {6}
    assert len(rows[:, 2].unique()) == 1
    assert rows[:, 6].all()
    ids, threads, pids = (set(rows[:, column].tolist()) for column in (1, 5, 4))
    pairs = {(row[1], row[4], row[5]) for row in rows.tolist()}
    assert len(pairs) == len(ids) == 6
    assert len(pids) == PROCESSES
    assert len(threads) >= 3


class Counted(Meeting):
    """Sample: index, how often its dataset was prepared, pid."""

    prepared = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.meet_others()
        return torch.tensor([index, self.prepared, os.getpid()])


def prepare(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker
    assert torch.initial_seed() == info.seed
    info.dataset.prepared += 1
    torch.rand(5)


def fail(worker: int) -> None:
    raise ValueError(f"worker {worker} cannot")


def test_worker_init_fn_is_called_once_for_a_process_and_may_draw(tmp_path: Path) -> None:
    rows = of_all_threads(Counted(LENGTH), tmp_path, worker_init_fn=prepare)
    assert rows[:, 1].tolist() == [1] * LENGTH
    assert len(rows[:, 2].unique()) == PROCESSES


def test_worker_init_fn_that_fails_is_the_answer_to_every_ticket() -> None:
    iterator = iter(loader_of(ThreadSafe(40), 5, worker_init_fn=fail))
    for _ in range(10):
        with pytest.raises(ValueError, match="cannot"):
            next(iterator)


class Delegating(ThreadSafe):
    """Asks for the seed in a thread that it started itself."""

    def __getitem__(self, index: int) -> torch.Tensor:
        found: list[Any] = []

        def ask() -> None:
            try:
                found.append(dpex.batch_seed())
            except RuntimeError as error:
                found.append(str(error))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        if isinstance(found[0], str):
            raise RuntimeError(found[0])
        return torch.tensor([index])


def test_a_thread_of_the_datasets_own_is_told_that_it_has_no_ticket() -> None:
    with pytest.raises(RuntimeError, match="makes no batch: call batch_seed"):
        next(iter(loader_of(Delegating(40), 4)))


def test_times_are_those_of_the_thread() -> None:
    with loader_of(ThreadSafe(200, 0.004), 8) as loader:
        list(loader)
        pool = loader.stats().pools["local"]
    assert pool.tickets == 50
    assert pool.load_s >= 50 * BATCH * 0.004
    assert pool.cpu_s < pool.load_s


# -- datasets that draw ------------------------------------------------------------------------------------------------


class Drawing(ThreadSafe):
    """Declares itself thread-safe, and draws from a global generator from sample ``since`` on."""

    def __init__(self, length: int, which: str, since: int) -> None:
        super().__init__(length, 0.001)
        self.which = which
        self.since = since

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = super().__getitem__(index)
        if index >= self.since:
            sample[2] = {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(())}[
                self.which
            ]()
        return sample


NAMES = {"python": "Python's global", "numpy": "numpy's global", "torch": "torch's default"}


@pytest.mark.parametrize("since", [0, 200], ids=["at once", "later"])
@pytest.mark.parametrize("which", NAMES)
def test_a_dataset_that_draws_gets_processes_and_its_batches_stay_right(which: str, since: int) -> None:
    dataset = Drawing(LENGTH, which, since)
    wanted = stacked(loader_of(dataset, 0, shuffle=False))
    with loader_of(dataset, 6, shuffle=False) as loader:
        iterator = iter(loader)
        with pytest.warns(RuntimeWarning, match=f"moved {NAMES[which]}.*dpex.batch_seed") as caught:
            got = [next(iterator) for _ in range(95)]
        assert len(caught) == 1
        until(lambda: iterator._engine._supply.collect() or sum(population(iterator)) == 6)
        assert max(population(iterator)) <= (1 if since == 0 else 3)
        assert_same(torch.cat([*got, *iterator]), wanted)
        assert loader.stats().deaths == 0


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_it_is_found_out_once_for_the_loader() -> None:
    loader = loader_of(Drawing(LENGTH, "numpy", 0), 5)
    with contextlib.suppress(RuntimeWarning):
        list(loader)
    iterator = iter(loader)
    next(iterator)
    until(lambda: iterator._engine._supply.collect() or population(iterator) == [1] * 5)
    assert len(list(iterator)) == LENGTH // BATCH - 1


def test_a_dataset_that_does_not_declare_itself_has_processes() -> None:
    with loader_of(Augmented(LENGTH, 0.001), 4) as loader:
        iterator = iter(loader)
        next(iterator)
        assert population(iterator) == [1] * 4
        until(lambda: len(living_workers(iterator)) == 4)


# -- asking for it -----------------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    dpex_thread_safe = True

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_what_cannot_be_had_is_refused() -> None:
    data: Dataset[Any] = ThreadSafe(8)
    with pytest.raises(OptionError, match=r"thread_safe=True .* give seeding='batch'"):
        DpexDataLoader(data, seeding="worker", thread_safe=True)
    with pytest.raises(OptionError, match="local_engine='torch'"):
        DpexDataLoader(data, local_engine="torch", thread_safe=True)
    with pytest.raises(OptionError, match="IterableDataset"):
        DpexDataLoader(Stream(), thread_safe=True)
    with pytest.raises(OptionError, match="thread_safe='yes': give True, False"):
        DpexDataLoader(data, seeding="batch", thread_safe="yes")  # type: ignore[arg-type]
    assert DpexDataLoader(data, thread_safe=True).seeding == "batch"


def test_what_is_declared_and_cannot_be_had_is_left() -> None:
    assert sorted(int(i) for i in DpexDataLoader(Stream(), batch_size=None, num_workers=1)) == list(range(10))
    with DpexDataLoader(ThreadSafe(80, 0.001), num_workers=4, seeding="worker") as loader:
        iterator = iter(loader)
        next(iterator)
        assert population(iterator) == [1] * 4


def test_torchs_own_wrappers_pass_the_declaration_on() -> None:
    safe, other = ThreadSafe(8), TensorDataset(torch.zeros(3))
    assert declares_thread_safe(Subset(safe, [1]))
    assert declares_thread_safe(ConcatDataset([safe, Subset(safe, [2])]))
    assert not declares_thread_safe(ConcatDataset([safe, other]))
    assert not declares_thread_safe(other)


# -- packing -----------------------------------------------------------------------------------------------------------


def test_workers_are_packed_evenly_once_it_was_tried() -> None:
    packing = Packing(2)
    assert packing.place({}) == packing.place({0: 1}) == NEW
    assert packing.untried
    assert packing.place({0: 1, 1: 1}) == LATER
    packing.tried()
    assert packing.place({0: 2, 1: 1}) == 1
    assert packing.place({3: 5}) == NEW


def test_workers_are_apart_where_they_must() -> None:
    assert Packing().place({0: 1, 1: 1}) == NEW
    assert not Packing().untried
    packing = Packing(1)
    packing.tried()
    assert packing.keep_apart()
    assert not packing.keep_apart()
    assert packing.place({0: 1}) == NEW


def test_deaths_together_in_one_epoch_keep_workers_apart() -> None:
    packing = Packing(1)
    assert not packing.died_together()
    packing.new_epoch()
    assert not packing.died_together()
    assert packing.died_together()
    assert not packing.together

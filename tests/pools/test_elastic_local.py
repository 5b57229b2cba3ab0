"""Local workers that come, go and die while the epoch runs: the batches stay what they were, each exactly once."""

import contextlib
import gc
import multiprocessing
import random
import threading
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from families import (
    Augmented,
    Of,
    WhoMadeIt,
    assert_same,
    has_made_all,
    is_alive,
    kill,
    living_workers,
    outcomes,
    seeded,
    stacked,
    worker_pids,
)
from inspection import pool_of, template_pid, workers_of
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from waiting import meet, until
from workload import wait_as_work

from dpex import DpexDataLoader
from dpex.errors import OptionError, WorkerDiedError
from dpex.options import WorkerConfig
from dpex.pools.local.pool import FORKS_AT_ONCE

pytestmark = pytest.mark.filterwarnings("ignore:DataLoader worker:RuntimeWarning")
LARGE_BYTES = 1 << 20
Step = Callable[[Any, Any], None]
"""What a test does to (loader, iterator) in the middle of an epoch."""


def elastic(dataset: Any, workers: int, **options: Any) -> DpexDataLoader[Any]:
    return DpexDataLoader(dataset, num_workers=workers, seeding="batch", generator=seeded(), **options)


def driven(loader: Any, steps: dict[int, Step], epochs: int = 1) -> torch.Tensor:
    """All batches, with ``steps[k]`` carried out after batch k of the whole run."""
    batches: list[torch.Tensor] = []
    for _ in range(epochs):
        iterator = iter(loader)
        for batch in iterator:
            batches.append(batch)
            step = steps.get(len(batches) - 1)
            if step is not None:
                step(loader, iterator)
    return torch.cat(batches)


def resized(**sizes: int) -> Step:
    return lambda loader, _: loader.resize(**sizes)


def killed(which: int = 0) -> Step:
    """Kill the ``which``-th living worker; none if all are dead already, as only `next` lets new ones come."""

    def step(_: Any, iterator: Any) -> None:
        pids = living_workers(iterator)
        if pids:
            kill(pids[which % len(pids)])

    return step


def template_killed(_: Any, iterator: Any) -> None:
    kill(template_pid(iterator))


def killed_while_leaving(loader: Any, iterator: Any) -> None:
    pids = worker_pids(iterator, 2)
    loader.resize(local=1)
    with contextlib.suppress(ProcessLookupError):  # it has left
        kill(pids[0])


def to_and_fro_at_once(loader: Any, _: Any) -> None:
    for workers in (5, 1, 3, 1, 4, 2):
        loader.resize(local=workers)


# -- seeding="batch": the same bits from any workers -------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_epochs() -> torch.Tensor:
    """What any number of workers must make of 150 shuffled samples in batches of 4, twice."""
    return driven(elastic(Augmented(150), 0, batch_size=4, shuffle=True), {}, epochs=2)


RESIZES: dict[str, tuple[int, dict[int, Step]]] = {
    "grow": (1, {5: resized(local=4)}),
    "shrink": (4, {5: resized(local=1)}),
    "to and fro": (2, {k: resized(local=1 + k % 4) for k in range(1, 70)}),
    "at once to and fro": (2, {9: to_and_fro_at_once}),
    "prefetch": (2, {3: resized(prefetch=1), 15: resized(prefetch=30), 30: resized(local=3, prefetch=2)}),
    "kill one": (2, {5: killed()}),
    "kill the only one": (1, {5: killed()}),
    "kill and shrink": (3, {5: killed(), 6: resized(local=1), 8: killed()}),
    "kill while leaving": (3, {5: killed_while_leaving}),
    "kill the template": (2, {5: template_killed}),
    "kill the template, then grow": (1, {5: template_killed, 7: resized(local=3)}),
}


def at_two_speeds(names: Iterable[str], nap_s: float, smoke: Container[str] = ()) -> list[Any]:
    """Each case with samples that take ``nap_s`` and, in the long tier, with samples that take no time."""
    slow = [pytest.param(name, nap_s, marks=[pytest.mark.smoke] * (name in smoke)) for name in names]
    return [*slow, *(pytest.param(name, 0.0, marks=pytest.mark.long) for name in names)]


@pytest.mark.parametrize(("name", "nap_s"), at_two_speeds(RESIZES, 0.001, smoke=("grow", "shrink", "kill one")))
def test_batches_do_not_depend_on_what_happens(two_epochs: torch.Tensor, name: str, nap_s: float) -> None:
    workers, steps = RESIZES[name]
    loader = elastic(Augmented(150, nap_s), workers, batch_size=4, shuffle=True)
    assert_same(driven(loader, steps, epochs=2), two_epochs)


@pytest.mark.parametrize("step", [killed(), resized(local=3), template_killed])
def test_persistent_workers_go_on_into_the_next_epoch(step: Step) -> None:
    wanted = driven(elastic(Augmented(80), 1, batch_size=4, persistent_workers=True), {}, epochs=3)
    with elastic(Augmented(80, 0.001), 2, batch_size=4, persistent_workers=True) as loader:
        assert_same(driven(loader, {9: step, 19: step}, epochs=3), wanted)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
def test_exactly_once_and_in_order_under_random_kills(seed: int) -> None:
    """Tiny batches, many tickets to a message; several workers die in each of them."""
    choose = random.Random(seed)
    dataset = Augmented(3000, 0.00005)
    steps = {k: killed(choose.randrange(3)) for k in choose.sample(range(2900), 6)}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = driven(elastic(dataset, 3, batch_size=1), steps)
    assert got[:, 0].tolist() == list(range(3000))
    assert_same(got, driven(elastic(Augmented(3000), 0, batch_size=1), {}))
    deaths = [str(w.message) for w in said if "killed by signal" in str(w.message)]
    assert len(deaths) <= len(steps)


def test_a_death_is_counted_and_the_warning_names_pid_and_cause() -> None:
    loader = elastic(WhoMadeIt(60, 0.001), 2, batch_size=2)
    iterator = iter(loader)
    next(iterator)
    victim = kill(worker_pids(iterator, 2)[0])
    with pytest.warns(
        RuntimeWarning, match=rf"worker \(pid {victim}\) is killed by signal: Killed.*Training continues"
    ):
        rest = stacked(iterator)
    assert rest[:, 0].tolist() == list(range(2, 60))
    assert loader.stats().deaths == 1


def test_a_warning_that_a_filter_makes_an_error_ends_no_worker() -> None:
    loader, batches = elastic(WhoMadeIt(60, 0.001), 2, batch_size=2), []
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        iterator = iter(loader)
        batches.append(next(iterator))
        killed, survivor = worker_pids(iterator, 2)[:2]
        kill(killed)
        with pytest.raises(RuntimeWarning, match="Training continues"):
            batches.extend(iterator)
        batches.append(next(iterator))
        assert survivor in worker_pids(iterator)
        batches.extend(iterator)
    assert stacked(batches)[:, 0].tolist() == list(range(60))


class ExitsOnce(Dataset[int]):
    """The first worker that makes sample 7 ends itself with exit code 3."""

    def __init__(self, flag: Any) -> None:
        self.flag = flag

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index == 7 and not self.flag.exists():
            self.flag.touch()
            raise SystemExit(3)
        return index


def test_a_worker_that_exits_is_replaced_and_its_exit_code_named(tmp_path: Any) -> None:
    with pytest.warns(RuntimeWarning, match="exit code 3"):
        got = stacked(elastic(ExitsOnce(tmp_path / "flag"), 2, batch_size=2))
    assert got.tolist() == list(range(20))


def poisoned_at(index: int) -> int:
    """Sample 11 kills whoever makes it."""
    if index == 11:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)
    return index


@pytest.mark.parametrize(("seeding", "workers"), [("batch", 3), ("worker", 1), ("worker", 3)])
def test_a_ticket_that_always_kills_is_given_up(seeding: Any, workers: int) -> None:
    loader = DpexDataLoader(Of(poisoned_at, 40), batch_size=2, num_workers=workers, seeding=seeding)
    iterator = iter(loader)
    got = [next(iterator).tolist() for _ in range(5)]
    with pytest.raises(WorkerDiedError, match=r"indices \[10, 11\].*3 workers"):
        next(iterator)
    got += [batch.tolist() for batch in iterator]
    assert got == [[i, i + 1] for i in range(0, 40, 2) if i != 10]
    assert loader.stats().deaths == 3


def torchs(dataset: Any, workers: int, epochs: int = 1, **options: Any) -> torch.Tensor:
    return driven(DataLoader(dataset, num_workers=workers, generator=seeded(), **options), {}, epochs)


def fixed(dataset: Any, workers: int, **options: Any) -> DpexDataLoader[Any]:
    return DpexDataLoader(dataset, num_workers=workers, generator=seeded(), **options)


DEATHS: dict[str, tuple[int, dict[int, Step]]] = {
    "early": (2, {0: killed()}),
    "one": (2, {30: killed()}),
    "all": (3, {20: killed(2), 21: killed(1), 22: killed(0)}),
    "again and again": (2, {k: killed(k % 2) for k in (10, 11, 12, 40, 80)}),
    "the template": (2, {30: template_killed}),
}


@pytest.mark.parametrize(("name", "nap_s"), at_two_speeds(DEATHS, 0.002, smoke=("one",)))
def test_a_death_is_replayed_to_torchs_own_bits(name: str, nap_s: float) -> None:
    workers, steps = DEATHS[name]
    wanted = torchs(Augmented(200), workers, batch_size=2, shuffle=True)
    assert_same(driven(fixed(Augmented(200, nap_s), workers, batch_size=2, shuffle=True), steps), wanted)


@pytest.mark.parametrize("at", [700, *(pytest.param(at, marks=pytest.mark.long) for at in (300, 1300))])
def test_many_tiny_batches_are_replayed_after_a_death(at: int) -> None:
    """More replays than one socket takes at once."""
    wanted = torchs(Augmented(1500), 1, batch_size=1)
    assert_same(driven(fixed(Augmented(1500), 1, batch_size=1), {at: killed()}), wanted)


@pytest.mark.parametrize("after", [0, 3])
def test_a_death_after_breaking_off_a_persistent_epoch(after: int) -> None:
    """The workers go on with what the broken epoch had asked for, in torch as here: it moves their random state."""

    def run(loader: Any, deadly: bool) -> torch.Tensor:
        begun = iter(loader)
        batches = [next(begun) for _ in range(5)]
        iterator = iter(loader)
        for number in range(30):
            batches.append(next(iterator))
            if deadly and number == after:
                kill(worker_pids(iterator)[0])
        return torch.cat(batches)

    options: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "persistent_workers": True}
    wanted = run(DataLoader(Augmented(60), generator=seeded(), **options), False)
    with DpexDataLoader(Augmented(60, 0.002), generator=seeded(), **options) as loader:
        assert_same(run(loader, True), wanted)


def test_another_number_of_workers_is_refused_with_the_remedy() -> None:
    loader = fixed(Augmented(40), 2, batch_size=2)
    iterator = iter(loader)
    first = next(iterator)
    for sizes in ({"local": 3}, {"local": 1, "remote": 0}, {"local": 0, "remote": 0}):
        with pytest.raises(OptionError, match="seeding='batch'"):
            loader.resize(**sizes)
    loader.resize(local=2)
    loader.resize(prefetch=9)
    assert_same(torch.cat([first, *iterator]), torchs(Augmented(40), 2, batch_size=2))


def test_workers_that_leave_finish_what_they_hold_and_end() -> None:
    loader = elastic(WhoMadeIt(2000, 0.001), 4, batch_size=1)
    iterator = iter(loader)
    seen = [next(iterator)]
    pids = worker_pids(iterator, 4)
    loader.resize(local=1)
    assert loader.stats().pools["local"].wanted == 1
    while sum(map(is_alive, pids)) > 1 or loader.stats().pools["local"].running > 1:
        seen.append(next(iterator))
    pool = loader.stats().pools["local"]
    assert (pool.wanted, pool.requested, pool.running) == (1, 1, 1)
    assert loader.stats().deaths == 0
    rest = torch.cat([*seen, *iterator])
    assert rest[:, 0].tolist() == list(range(2000))


@pytest.mark.parametrize("rows", [80, pytest.param(400, marks=pytest.mark.long)])
def test_resize_from_another_thread_without_end(rows: int) -> None:
    """Trainer and template once waited for each other, with hundreds of forks asked for and as many leaves queued."""
    loader = elastic(Augmented(rows, 0.0005), 2, batch_size=2)
    stop = threading.Event()
    errors: list[BaseException] = []

    def fidget() -> None:
        sizes = random.Random(5)
        try:
            while not stop.wait(0.002):
                loader.resize(local=sizes.randrange(1, 5), prefetch=sizes.randrange(1, 12))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=fidget, name="fidget")
    thread.start()
    try:
        got = stacked(loader)
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert_same(got, stacked(elastic(Augmented(rows), 0, batch_size=2)))


def test_many_workers_at_once_are_forked_a_few_at_a_time() -> None:
    """All are counted as requested at once; the epoch does not wait for the last of them."""
    loader = elastic(WhoMadeIt(300, 0.001), 1, batch_size=1)
    iterator = iter(loader)
    next(iterator)
    loader.resize(local=100)
    assert loader.stats().pools["local"].requested == 100
    assert len(workers_of(iterator)) <= 1 + FORKS_AT_ONCE
    loader.resize(local=2)
    assert loader.stats().pools["local"].requested <= 1 + FORKS_AT_ONCE
    assert stacked(iterator)[:, 0].tolist() == list(range(1, 300))


def test_resize_before_the_first_epoch_and_between_epochs() -> None:
    loader = elastic(WhoMadeIt(80), 1, batch_size=2)
    loader.resize(local=3)
    iterator = iter(loader)
    assert len(worker_pids(iterator, 3)) == 3
    assert stacked(iterator)[:, 0].tolist() == list(range(80))
    loader.resize(local=2)
    assert loader.stats().pools["local"].wanted in (2, 3)
    iterator = iter(loader)
    assert len(worker_pids(iterator, 2)) == 2
    assert stacked(iterator)[:, 0].tolist() == list(range(80))


class Streams(IterableDataset[int]):
    """Worker w of the loader yields 1000 w + 0 … 49."""

    def __iter__(self) -> Iterator[int]:
        info: Any = get_worker_info()
        for number in range(50):
            wait_as_work(0.001)
            yield 1000 * info.id + number


def test_the_other_streams_go_on_after_one_failed() -> None:
    iterator = iter(DpexDataLoader(Streams(), batch_size=1, num_workers=2))
    got = [next(iterator)]
    kill(worker_pids(iterator, 2)[0])
    got += outcomes(iterator)
    numbers = [int(one) for one in got if not isinstance(one, type)]
    whole = [stream for stream in (range(50), range(1000, 1050)) if set(stream) <= set(numbers)]
    assert got.count(WorkerDiedError) == 1
    assert len(whole) == 1
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("extra", [0, pytest.param(700, marks=pytest.mark.smoke)], ids=["small", "over 4 KB"])
@pytest.mark.parametrize("seeding", ["batch", "worker"])
def test_all_batches_of_an_epoch_may_be_kept(extra: int, seeding: Any) -> None:
    """Also while workers die and come; and each may be written to without the others noticing."""

    def loader(workers: int) -> DpexDataLoader[Any]:
        dataset = Augmented(120, extra=extra)
        return DpexDataLoader(dataset, batch_size=4, num_workers=workers, seeding=seeding, generator=seeded())

    wanted = [batch.clone() for batch in loader(2)]
    iterator = iter(loader(2))
    kept = [next(iterator) for _ in range(9)]
    kill(worker_pids(iterator)[0])
    kept += list(iterator)
    del iterator
    gc.collect()
    assert len({batch.data_ptr() for batch in kept}) == len(kept) == 30
    assert all(map(torch.equal, kept, wanted))
    for number, batch in enumerate(kept):
        batch.fill_(number)
    assert all(bool((batch == number).all()) for number, batch in enumerate(kept))


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def test_memory_returns_when_batches_are_dropped() -> None:
    """64 batches of 2 MB are kept, then dropped; three quarters must come back while the epoch goes on."""
    loader = elastic(Augmented(1200, extra=60_000), 2, batch_size=4)
    iterator = iter(loader)
    for _ in range(16):
        next(iterator)
    before = resident_bytes()
    kept = [next(iterator) for _ in range(64)]
    with_batches = resident_bytes()
    assert with_batches - before > 64 << 20
    kept.clear()
    del kept
    for _ in iterator:
        pass
    del iterator
    gc.collect()
    assert resident_bytes() - before < (with_batches - before) // 4


def test_out_of_order_batches_have_the_bits_of_their_number() -> None:
    got = driven(elastic(Augmented(200, 0.0005), 3, batch_size=2, in_order=False), {20: killed()})
    wanted = stacked(elastic(Augmented(200), 0, batch_size=2))
    assert_same(got[got[:, 0].argsort()], wanted)


class Jump(Dataset[torch.Tensor]):
    """Tiny samples, then large ones; counts what was made."""

    def __init__(self) -> None:
        self.made = multiprocessing.Value("i", 0)

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.made.get_lock():
            self.made.value += 1
        return torch.full((10 if index < 60 else LARGE_BYTES,), index, dtype=torch.uint8)


@pytest.mark.parametrize("options", [{}, {"prefetch_factor": 30}], ids=["free", "prefetch_factor"])
def test_the_memory_budget_holds_when_batches_grow(options: dict[str, Any]) -> None:
    """What workers hold when the first large one comes may exceed it, no more."""
    dataset = Jump()
    loader = elastic(dataset, 2, worker_config=WorkerConfig(memory_budget=4 * LARGE_BYTES), **options)
    iterator = iter(loader)
    large = []
    for number, batch in enumerate(iterator):
        assert int(batch[0, 0]) == number
        if 50 <= number < 80:
            until(lambda: has_made_all(pool_of(iterator, "local")))  # whatever was sent is made
            large.append(dataset.made.value - max(60, number + 1))
    assert 0 < max(large) <= 2 * 2
    assert max(large[15:]) <= 4


def test_workers_added_in_mid_epoch_have_the_dataset_as_of_iter(tmp_path: Path) -> None:
    """What grows is forked from the template, which holds the dataset as it was at ``iter()``."""

    class Table(Dataset[int]):
        factor = 1

        def __len__(self) -> int:
            return 600

        def __getitem__(self, index: int) -> int:
            if index >= 2:
                meet(tmp_path, 3)
            return index * self.factor

    dataset = Table()
    loader = elastic(dataset, 1, batch_size=2)
    iterator = iter(loader)
    got = [next(iterator)]
    dataset.factor = 2
    loader.resize(local=3)
    got += list(iterator)
    assert torch.cat(got).tolist() == list(range(600))

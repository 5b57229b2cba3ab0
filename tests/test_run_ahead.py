"""Tiny batches of a tuned loader, a few of them made in one call of ``next()``: the same batches, each in its place."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from families import seeded
from torch.utils.data import Dataset, default_collate

from dpex import AutotuneConfig, DpexDataLoader, IteratorClosedError, batch_seed
from dpex.core.prefetch import Sizes
from dpex.engine import inprocess_sampling, unmeasured_calls
from dpex.system.other_threads import OtherThreads
from dpex.transport.arena import Arena
from dpex.worker.collate import ArenaCollate

LENGTH = 300
numpy_random: Any = np.random


@pytest.fixture(autouse=True)
def always_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a busy machine."""
    for limit in ("TURN_S", "SAMPLE_S", "LONGEST_S"):
        monkeypatch.setattr(inprocess_sampling, limit, math.inf)
    monkeypatch.setattr(unmeasured_calls, "RUN_S", math.inf)


class Drawn(Dataset[torch.Tensor]):
    """Sample: float64 (2,): its index, and what ``draw`` gave."""

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        self.draw = draw
        self.bad = -1
        self.called: Counter[int] = Counter()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        self.called[index] += 1
        if index == self.bad:
            raise ValueError(f"no sample {index}")
        return torch.tensor([index, self.draw()], dtype=torch.float64)


def tuned(dataset: Any, **options: Any) -> DpexDataLoader[Any]:
    here = AutotuneConfig(max_local=0)
    return DpexDataLoader(dataset, num_workers="auto", autotune=here, generator=seeded(), **options)


def by_a_worker(dataset: Any) -> list[Any]:
    with DpexDataLoader(dataset, num_workers=1, seeding="batch", generator=seeded()) as loader:
        return list(loader)


def one_by_one(dataset: Any) -> list[Any]:
    found = []
    for batch in DpexDataLoader(dataset, seeding="batch", generator=seeded()):
        found.append(batch)
        torch.set_grad_enabled(True)
    return found


def until_ahead(iterator: Any, least: int = 3) -> list[Any]:
    """Batches up to a moment when so many more are made already."""
    found = []
    while len(iterator._engine._ahead) < least:
        found.append(next(iterator))
    return found


def forked() -> float:
    with torch.random.fork_rng():
        return torch.rand(()).item()


def peeked() -> float:
    state = random.getstate()
    found = random.gauss(0, 1)
    random.setstate(state)
    return found


def with_another_generator() -> float:
    found: float = np.random.rand()
    numpy_random.set_bit_generator(np.random.MT19937(3))
    return found


def with_threads_left() -> float:
    found = float(torch.get_num_threads()) + torch.rand(()).item()
    torch.set_num_threads(2)
    return found


def with_a_mode_left() -> float:
    found = float(torch.is_grad_enabled()) + torch.rand(()).item()
    torch.set_grad_enabled(False)
    return found


DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "random, normal": lambda: random.gauss(0, 1),
    "random, its state": peeked,
    "numpy": np.random.rand,
    "numpy, normal": np.random.normal,
    "numpy, another bit generator": with_another_generator,
    "torch": lambda: torch.rand(()).item(),
    "torch, normal": lambda: torch.randn(()).item(),
    "torch, forked": forked,
    "torch, its seed": lambda: float(torch.initial_seed() % 2**40),
    "torch, its threads": with_threads_left,
    "torch, a mode": with_a_mode_left,
    "the seed": lambda: float(batch_seed() % 2**40),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_batches_are_those_of_a_worker_and_the_trainer_is_left_alone(draw: Callable[[], float]) -> None:
    leaves = draw in (with_threads_left, with_a_mode_left)  # which a worker keeps, as torch's do
    expected = one_by_one(Drawn(draw)) if leaves else by_a_worker(Drawn(draw))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    wanted = [(random.gauss(0, 1), np.random.normal(), torch.randn(()).item()) for _ in range(LENGTH)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    threads, found, drawn, most = torch.get_num_threads(), [], [], 0
    with torch.enable_grad(), tuned(Drawn(draw)) as loader:
        iterator: Any = iter(loader)
        for batch in iterator:
            found.append(batch)
            drawn.append((random.gauss(0, 1), np.random.normal(), torch.randn(()).item()))
            most = max(most, len(iterator._engine._ahead))
            torch.set_grad_enabled(True)
    assert most > 3 or leaves or draw is with_another_generator
    assert torch.equal(torch.cat(found), torch.cat(expected))
    assert drawn == wanted
    assert torch.get_num_threads() == threads


def test_an_error_is_raised_in_its_place_and_the_rest_comes() -> None:
    data = Drawn()
    with tuned(data) as loader:
        iterator: Any = iter(loader)
        found = [next(iterator)]
        found += until_ahead(iterator)
        ahead = len(iterator._engine._ahead)
        data.bad = len(found) + ahead + 2
        for _ in range(ahead + 2):
            found.append(next(iterator))
        with pytest.raises(ValueError, match=f"no sample {data.bad}"):
            next(iterator)
        found += iterator
        stats = loader.stats()
    expected = by_a_worker(Drawn())
    del expected[data.bad]
    assert torch.equal(torch.cat(found), torch.cat(expected))
    assert stats.batches == len(found)


def test_a_loader_that_is_not_tuned_makes_none_ahead() -> None:
    """Its dataset may change from one step to the next, and nothing was said of other workers."""
    data = Drawn()
    with DpexDataLoader(data, seeding="batch") as loader:
        for number, _ in enumerate(loader):
            assert sum(data.called.values()) == number + 1


@pytest.mark.parametrize(
    "options",
    [{"memory_budget": 1 << 20}, {"batch_sampler": [[at] for at in range(LENGTH)]}, {"prefetch_factor": 4}],
    ids=lambda options: next(iter(options)),
)
def test_none_is_made_ahead_where_that_could_be_told(options: dict[str, Any]) -> None:
    data = Drawn()
    with tuned(data, **options) as loader:
        for number, _ in enumerate(loader):
            assert sum(data.called.values()) == number + 1


def test_workers_go_on_behind_what_was_made_ahead() -> None:
    """Those of another thread's request, which is carried out at once, and those of the tuner's."""
    expected = by_a_worker(Drawn())
    for how in ("resize", "request"):
        with tuned(Drawn()) as loader:
            iterator: Any = iter(loader)
            found = until_ahead(iterator)
            getattr(iterator._engine, how)(Sizes(local=1, remote=0, prefetch=None, tuned_prefetch=2))
            found += islice(iterator, 100)
            assert iterator._engine.pool("local") is not None
            assert iterator._engine.stats().batches == len(found)
            iterator._engine.request(Sizes(local=0, remote=0, prefetch=None, tuned_prefetch=1))
            found += iterator
        assert torch.equal(torch.cat(found), torch.cat(expected))


def test_a_pass_that_is_broken_off_leaves_nothing_to_the_next() -> None:
    with tuned(Drawn(), persistent_workers=False) as loader:
        iterator: Any = iter(loader)
        until_ahead(iterator)
        iterator._engine.begin_epoch(iter([[index] for index in range(LENGTH)]))
        assert [int(batch[0, 0]) for batch in iterator] == list(range(LENGTH))


def test_a_closed_loader_hands_out_nothing_that_was_made_ahead() -> None:
    loader = tuned(Drawn())
    iterator: Any = iter(loader)
    until_ahead(iterator)
    loader.close()
    with pytest.raises(IteratorClosedError):
        next(iterator)


def test_statistics_count_what_was_handed_out() -> None:
    with tuned(Drawn()) as loader:
        for number, _ in enumerate(loader):
            stats = loader.stats()
            assert stats.batches == stats.pools["inline"].tickets == number + 1


def test_each_of_several_consumers_gets_batches_of_its_own() -> None:
    with tuned(Drawn()) as loader:
        iterator: Any = iter(loader)
        found: list[int] = []
        threads = [threading.Thread(target=lambda: found.extend(int(b[0, 0]) for b in iterator)) for _ in range(3)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OtherThreads, "is_able", False)  # each is another thread to the others
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert sorted(found) == list(range(LENGTH))


# -- threads -----------------------------------------------------------------------------------------------------------


def test_nobody_beside_is_found_anew_once_threads_come_or_go() -> None:
    others, over = OtherThreads(), threading.Event()
    assert not others.clocks()
    assert others.are_none()
    own = threading.Thread(target=over.wait, name="dpex-of-a-test")
    foreign = threading.Thread(target=over.wait, name="neighbour")
    own.start()
    assert not others.are_none()
    assert not others.clocks()
    assert others.are_none()
    foreign.start()
    assert not others.are_none()
    assert list(others.clocks()) == [foreign]
    assert not others.are_none()
    over.set()
    own.join(), foreign.join()
    assert others.are_none() or threading.active_count() > 1


# -- columns -----------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")
ROWS: dict[str, list[Any]] = {
    "tensors": [torch.rand(3), torch.rand(3)],
    "pairs": [(torch.rand(3), torch.rand(2)), (torch.rand(3), torch.rand(2))],
    "pairs of a tensor and an integer": [(torch.rand(3), 4), (torch.rand(3), 5)],
    "numbers": [(1, 2.5, True), (2, 3.5, False)],
    "text": [("a", b"b"), ("c", b"d")],
    "arrays": [(np.ones(3), np.float32(2)), (np.zeros(3), np.float32(3))],
    "nested": [((torch.rand(2), 1), {"a": torch.rand(1)}), ((torch.rand(2), 2), {"a": torch.rand(1)})],
    "empty tuples": [(), ()],
    "named tuples": [Pair(torch.rand(2), 1), Pair(torch.rand(2), 2)],
    "lists": [[torch.rand(2), 1], [torch.rand(2), 2]],
    "a tuple and a list": [(torch.rand(2), 1), [torch.rand(2), 2]],
    "mappings": [OrderedDict(a=torch.rand(2)), OrderedDict(a=torch.rand(2))],
    "gradients": [(torch.rand(2, requires_grad=True),), (torch.rand(2),)],
    "several dtypes": [(torch.rand(2),), (torch.zeros(2, dtype=torch.float64),)],
}
BAD: dict[str, list[Any]] = {
    "tuples of unequal size": [(1, 2), (1,)],
    "unequal tensors": [(torch.rand(2),), (torch.rand(3),)],
    "sparse tensors": [(torch.rand(2).to_sparse(),)] * 2,
    "objects": [(object(),), (object(),)],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_rows_are_collated_as_torch_does(rows: list[Any]) -> None:
    found, expected = ArenaCollate(Arena(shared=False), 1 << 20, in_worker=False)(rows), default_collate(rows)
    assert repr(found) == repr(expected)


@pytest.mark.parametrize("rows", BAD.values(), ids=BAD)
def test_rows_that_torch_refuses_are_refused_in_its_words(rows: list[Any]) -> None:
    with pytest.raises((RuntimeError, TypeError)) as expected:
        default_collate(rows)
    with pytest.raises(expected.type) as found:
        ArenaCollate(Arena(shared=False), 1 << 20, in_worker=False)(rows)
    assert str(found.value) == str(expected.value)

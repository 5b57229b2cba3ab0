"""In which order batches come, how far ahead indices are drawn, and what two iterators have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler
from torch_features import needs_in_order

from dpex import DpexDataLoader

from .datasets import Counting, Gated, GatedStream, Of, Recording, Stream, as_is, epochs, pair, take, worker_id
from .harness import PASSES, WORKERS, Loader, caught, parity


def lists(batches: list[Any]) -> list[Any]:
    return [[part.tolist() for part in batch] for batch in batches]


@pytest.mark.parametrize(("workers", "prefetch_factor"), [(1, 7), (2, 1), (2, 2), (3, 2), (3, 7)])
@parity
def test_in_order(cls: Loader, workers: int, prefetch_factor: int) -> Any:
    """The first batch waits at a gate, yet nothing overtakes it; batch i is made by worker i mod W."""
    dataset = Gated(17, at=[0])
    iterator = iter(cls(dataset, batch_size=2, num_workers=workers, prefetch_factor=prefetch_factor))
    dataset.gate.open()
    return list(iterator)


class Refilled:
    """A batch sampler that fills one and the same list, array or tensor for every batch."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 200

    def __iter__(self) -> Any:
        found = self.kind([0, 0])
        for number in range(len(self)):
            found[0], found[1] = number, number + 1
            yield found


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
@pytest.mark.parametrize("sizes", [{"num_workers": 0, "seeding": "batch"}, {"num_workers": 2}])
def test_a_sampler_that_fills_the_same_list_again(kind: Any, sizes: dict[str, Any]) -> None:
    """PyTorch's workers see some of these changed, as they are pickled in another thread; without workers none is."""
    loader = DpexDataLoader(torch.arange(300), batch_sampler=Refilled(kind), **sizes)
    assert [batch.tolist() for batch in loader] == [[number, number + 1] for number in range(200)]


class BeginsAnew:
    """A sampler that is its own iterator and begins anew at each ``iter()``, as Lightning's batch sampler in
    ``predict``."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.begun = 0

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> BeginsAnew:
        self.begun += 1
        self.rest = iter(self.inner)
        return self

    def __next__(self) -> Any:
        return next(self.rest)


@WORKERS
@pytest.mark.parametrize("is_batched", [True, False])
@parity
def test_a_sampler_that_is_its_own_iterator(cls: Loader, workers: int, is_batched: bool) -> Any:
    indices: Any = BatchSampler(SequentialSampler(range(21)), 4, False) if is_batched else SequentialSampler(range(21))
    sampler = BeginsAnew(indices)
    how: dict[str, Any] = {"batch_sampler": sampler} if is_batched else {"sampler": sampler, "batch_size": None}
    loader = cls(torch.arange(21), num_workers=workers, **how)
    return [[batch.tolist() for batch in loader] for _ in range(2)], sampler.begun


@pytest.mark.parametrize("sizes", [{"num_workers": 2}, {"num_workers": 2, "seeding": "batch"}, {"num_workers": "auto"}])
def test_a_sampler_that_is_its_own_iterator_is_resumed(sizes: dict[str, Any]) -> None:
    def made() -> Any:
        sampler: Any = BeginsAnew(BatchSampler(RandomSampler(range(40)), 4, False))
        return DpexDataLoader(torch.arange(40), batch_sampler=sampler, **sizes)

    torch.manual_seed(5)
    whole = [batch.tolist() for batch in made()]
    torch.manual_seed(5)
    loader = made()
    first = lists([[batch] for batch in take(iter(loader), 4)])
    state = loader.state_dict()
    later = made()
    later.load_state_dict(state)
    assert [batch for [batch] in first] + [batch.tolist() for batch in later] == whole
    assert sorted(index for batch in whole for index in batch) == list(range(40))


@needs_in_order
@parity
def test_out_of_order(cls: Loader) -> Any:
    """Worker 0 is stuck at item 0 and holds item 2; all else goes to worker 1, who has room."""
    dataset = Gated(10, at=[0])
    iterator = iter(cls(dataset, num_workers=2, in_order=False))
    first = take(iterator, 8)
    dataset.gate.open()
    return lists(first), lists(list(iterator))


@needs_in_order
@parity
def test_out_of_order_stream(cls: Loader) -> Any:
    dataset = GatedStream(10)
    iterator = iter(cls(dataset, num_workers=2, in_order=False))
    first = take(iterator, 5)
    dataset.gate.open()
    return lists(first), lists(list(iterator))


@WORKERS
@pytest.mark.parametrize("prefetch_factor", [1, 2, 4])
@parity
def test_how_far_ahead_indices_are_drawn(cls: Loader, workers: int, prefetch_factor: int) -> Any:
    """W * prefetch_factor at iter(), then one for each batch given."""
    options = {"num_workers": workers, "prefetch_factor": prefetch_factor} if workers else {}
    sampler = Recording([[i] for i in range(20)])
    loader = cls(Counting(20), batch_sampler=sampler, **options)
    seen: list[Any] = [sampler.seen]
    iterator = iter(loader)
    seen.append(sampler.seen)
    for _ in range(22):
        item = caught(next, iterator)
        seen.append((item, sampler.seen))
    return seen


@WORKERS
@parity
def test_the_sampler_is_read_in_this_process_and_in_this_thread(cls: Loader, workers: int) -> Any:
    import os
    import threading

    places = set()

    def sampler() -> Any:
        for i in range(5):
            places.add((os.getpid(), threading.current_thread() is threading.main_thread()))
            yield i

    batches = list(cls(Counting(5), sampler=sampler(), num_workers=workers))
    return [batches, places == {(os.getpid(), True)}]


@WORKERS
@parity
def test_a_sampler_that_learns_during_the_epoch(cls: Loader, workers: int) -> Any:
    """Feedback from batches reaches the indices that are drawn after it."""
    hard: list[int] = []

    class Feedback:
        def __iter__(self) -> Any:
            for i in range(12):
                yield hard.pop() if hard else i

        def __len__(self) -> int:
            return 12

    loader = cls(Of(as_is, 0), batch_size=None, sampler=Feedback(), num_workers=workers)
    seen = []
    for item in loader:
        seen.append(item)
        if item == 2:
            hard.append(100)
    return seen


@WORKERS
@parity
def test_two_iterators_live_at_once(cls: Loader, workers: int) -> Any:
    loader = cls(Counting(12), batch_size=2, num_workers=workers, shuffle=True)
    first = iter(loader)
    a = take(first, 2)
    second = iter(loader)
    b = take(second, 3)
    a += take(first, 1)
    third = iter(loader)
    return [a + list(first), b + list(second), list(third), first is not second]


@WORKERS
@parity
def test_the_dataset_is_seen_as_it_is_at_iter(cls: Loader, workers: int) -> Any:
    data = [1, 2, 3, 4]
    loader = cls(data, batch_size=2, num_workers=workers)
    seen = [list(loader)]
    data[0] = 100
    seen.append(list(loader))
    data.extend([5, 6])
    seen.append(list(loader))
    iterator = iter(loader)
    first = next(iterator)
    data[-1] = 7
    seen.append([first, *([] if not workers else list(iterator))])
    return seen


@parity
def test_persistent_workers_see_the_dataset_as_it_was(cls: Loader) -> Any:
    data = [1, 2, 3, 4]
    loader = cls(data, batch_size=2, num_workers=2, persistent_workers=True)
    data[1] = 50
    seen = [list(loader)]
    data[0] = 100
    seen.append(list(loader))
    return seen


class Notebook:
    """A dataset whose worker copy counts how often it was read."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        self.reads += 1
        return worker_id(), index, self.reads


@PASSES
@parity
def test_what_a_worker_s_copy_remembers(cls: Loader, workers: int, persistent: bool) -> Any:
    dataset = Notebook()
    loader = cls(dataset, num_workers=workers, persistent_workers=persistent)
    return [epochs(loader, 3), dataset.reads]


@parity
def test_the_persistent_iterator_is_one_object(cls: Loader) -> Any:
    loader = cls(Counting(6), batch_size=2, num_workers=2, persistent_workers=True)
    first = iter(loader)
    a = list(first)
    second = iter(loader)
    b = take(second, 1)
    third = iter(loader)
    return [a, b, first is second is third is loader._iterator, list(third), caught(next, first), list(loader)]


@pytest.mark.parametrize("taken", [0, 1, 5])
@parity
def test_a_persistent_epoch_that_is_broken_off(cls: Loader, taken: int) -> Any:
    """The next epoch starts afresh; nothing of the old one shows."""
    loader = cls(Notebook(), num_workers=2, persistent_workers=True, shuffle=True)
    seen = [take(iter(loader), taken) for _ in range(3)]
    return [[batch[:2] for batch in epoch] for epoch in seen] + [[batch[:2] for batch in loader]]


@parity
def test_a_persistent_stream_that_is_broken_off(cls: Loader) -> Any:
    loader = cls(Stream(pair, 9, 4), num_workers=2, persistent_workers=True)
    return [take(iter(loader), 3), list(loader), take(iter(loader), 12), list(loader)]


@pytest.mark.parametrize(("workers", "taken"), [(0, 1), (2, 0), (2, 3)])
@parity
def test_breaking_off(cls: Loader, workers: int, taken: int) -> Any:
    loader = cls(Counting(40), batch_size=2, num_workers=workers, shuffle=True)
    seen = []
    for _ in range(2):
        for i, batch in enumerate(loader):
            if i == taken:
                break
            seen.append(batch)
    return [seen, list(loader)]


class Eager(Recording):
    """Counts at `__iter__` itself, not when the first index is asked for; each start gives other indices."""

    def __iter__(self) -> Any:
        self.started += 1
        return iter([(index + self.started) % 5 for index in self.indices])


class EagerBatches(Recording):
    def __iter__(self) -> Any:
        self.started += 1
        return iter([[(i + self.started) % 5 for i in batch] for batch in self.indices])


@PASSES
@parity
def test_samplers_that_begin_at_once(cls: Loader, workers: int, persistent: bool) -> Any:
    """With workers torch asks the index sampler twice for its first iterator and uses the second."""
    seen: list[Any] = []
    kinds: list[tuple[str, Any, dict[str, Any]]] = [
        ("sampler", Eager(range(5)), {"batch_size": None}),
        ("sampler", Eager(range(5)), {"batch_size": 2}),
        ("batch_sampler", EagerBatches([[0, 1], [2]]), {}),
    ]
    for name, sampler, options in kinds:
        options[name] = sampler
        loader = cls(Counting(5), num_workers=workers, persistent_workers=persistent, **options)
        for _ in range(2):
            iterator = iter(loader)
            seen.append((sampler.started, list(iterator), sampler.started))
    return seen


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("change", [-15, 10])
@parity
def test_distributed_sampler_of_a_dataset_that_has_changed(cls: Loader, change: int, drop_last: bool) -> Any:
    data = list(range(20))
    sampler = DistributedSampler(data, 2, 0, drop_last=drop_last)
    loader = cls(data, sampler=sampler)
    data[20 + change if change < 0 else 20 :] = range(20, 20 + change)
    return caught(lambda: [batch.tolist() for batch in loader])

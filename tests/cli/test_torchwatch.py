"""torch's iterators, counted, in this process: what is counted, and that they live and end as torch's do."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from dpex.run.options import DiagnoseOptions, RunOptions, read
from dpex.run.stock import patch, report
from dpex.run.stock.counters import WorkersMeter, WorkerTimes, nbytes

OPTIONS = DiagnoseOptions(probe=False, again=("train.py",))


class Rows(Dataset[Any]):
    """Row number, a draw, and whether the worker's info shows this dataset and the loader's own collate function."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return index, torch.rand(()), info is None or info.dataset is self


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    report.forget()


def counted(loader: Any) -> Any:
    return patch.iterator(loader, DataLoader._get_iterator, OPTIONS)


def loader(workers: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Rows(), 4, num_workers=workers, generator=torch.Generator().manual_seed(3), **options)


def account(of: Any) -> Any:
    return report.book_of(of, OPTIONS, 0).read()


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_torchs_and_counted(workers: int) -> None:
    torch.manual_seed(1)
    expected = [[part.tolist() for part in batch] for batch in loader(workers)]
    torch.manual_seed(1)
    ours = loader(workers)
    found = [[part.tolist() for part in batch] for batch in counted(ours)]
    assert found == expected
    assert all(all(batch[2]) for batch in found)
    sums = account(ours)
    assert (sums.batches, sums.passes) == (3, 1)
    assert sums.pools["local" if workers else "inline"].tickets == 3


def test_an_iterator_that_is_let_go_ends_its_workers_at_once() -> None:
    gc.disable()
    try:
        iterator = counted(loader(2))
        next(iterator)
        workers, gone = list(iterator._workers), weakref.ref(iterator)
        del iterator
        assert gone() is None
        assert not any(worker.is_alive() for worker in workers)
    finally:
        gc.enable()


def test_persistent_workers_are_counted_pass_by_pass() -> None:
    ours = loader(1, persistent_workers=True)
    iterator = ours._iterator = counted(ours)
    assert len(list(iterator)) == 3
    next(iter(ours))  # broken off
    assert len(list(ours)) == 3
    sums = account(ours)
    assert (sums.passes, sums.batches) == (3, 7)


def test_loaders_that_are_made_anew_share_a_book_and_two_that_live_do_not() -> None:
    one = loader(0)
    book = report.book_of(one, OPTIONS, 0)
    other = loader(0)
    assert report.book_of(other, OPTIONS, 0) is not book
    del one
    assert report.book_of(loader(0), OPTIONS, 0) is book


def test_waits_behind_ready_batches_and_the_start_have_their_causes() -> None:
    meter = WorkersMeter(2, 4)
    meter.started(0.5)
    for tasks in ({0: (0,)}, {1: (0,), 2: (1, "data")}):
        meter.enter()
        meter.block(tasks)
        meter.unblock()
        meter.leave([])
    meter.enter()
    meter.leave(error=StopIteration())
    sums = meter.sums()
    assert sums.causes["startup"] >= 0.5
    assert sums.causes["straggler"] > 0
    assert sums.head_idle_s == pytest.approx(sums.causes["straggler"] / 2)
    assert sums.passes == 1


def test_rows_of_workers_add_up() -> None:
    times = WorkerTimes(2)
    for number in range(300):
        times.add(0, (1.0, 0.5, float(number), 0.25), 4)
    times.add(1, (2.0, 1.0, 0.0, 0.0), 4)
    pool = times.sums(2)
    assert (pool.tickets, pool.load_s, pool.load_cpu_s, pool.collate_cpu_s) == (301, 302.0, 151.0, 75.0)
    assert sorted(pool.kept_s) == [2.0, *(1.0 + number for number in range(44, 300))]


def test_bytes_are_those_of_tensors() -> None:
    assert nbytes({"a": [torch.zeros(3), "text"], "b": (torch.zeros(2, dtype=torch.uint8), 5)}) == 14


@pytest.mark.parametrize("options", [OPTIONS, RunOptions(num_workers=3)])
def test_options_travel_as_text(options: Any) -> None:
    assert read(options.to_text()) == options

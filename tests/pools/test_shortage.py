"""Want of descriptors or memory: an error that says so, no batch lost, and all is well once it is over."""

import contextlib
import gc
import os
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Of, descriptors, no_descriptor_left
from torch.utils.data import Dataset

from dpex import DpexDataLoader, IteratorInterruptedError
from dpex.transport.arena import Arena

COUNT = 12
LARGE_BYTES = 128 << 20


class Growing(Dataset[torch.Tensor]):
    """Each sample is of another size, so that each needs memory that is not there yet."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index + 1, 1 << 16), float(index))


def one_large_at(index: int) -> torch.Tensor:
    return torch.full((LARGE_BYTES if index == 3 else 1 << 16,), index, dtype=torch.uint8)


class ShortInWorker(Growing):
    """The worker itself has no descriptor left for some of its samples."""

    def __getitem__(self, index: int) -> torch.Tensor:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        if index == 4:
            self.limits = limits
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        if index == 7:
            resource.setrlimit(resource.RLIMIT_NOFILE, self.limits)
        return super().__getitem__(index)


class Plain(Dataset[int]):
    def __len__(self) -> int:
        return 200_000

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [len(indices), indices[0]]


@contextlib.contextmanager
def lowered(what: int, limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


def assert_none_is_left(before: set[tuple[str, str]]) -> None:
    """The training thread's run queue is opened once, when it is first read: that is no leak."""
    left = {one for one in descriptors() - before if not one[1].endswith("/schedstat")}
    gone = before - descriptors()
    assert len(left) <= len(gone), f"left: {left}; before: {before}"


def address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """A descriptor that garbage of an earlier test gives back meanwhile could be used."""
    gc.collect()


def until_error(iterator: Any) -> tuple[list[Any], OSError]:
    got: list[Any] = []
    for _ in range(COUNT):
        try:
            got.append(next(iterator))
        except OSError as error:
            return got, error
    raise AssertionError(f"no error, but {got}")


def numbers(batches: Iterable[torch.Tensor]) -> list[int]:
    return [int(batch.view(-1)[-1]) for batch in batches]


@pytest.mark.parametrize("seeding", ["batch", "worker"])
def test_no_descriptor_left_in_the_trainer(seeding: Any) -> None:
    loader = DpexDataLoader(Growing(), batch_size=1, num_workers=1, seeding=seeding)
    iterator = iter(loader)
    got = numbers([next(iterator)])
    before = descriptors()
    with no_descriptor_left():
        more, error = until_error(iterator)
    assert "Too many open files" in str(error)
    assert "ulimit -n" in str(error)
    assert_none_is_left(before)
    got += numbers([*more, *rest(loader, iterator)])
    assert got == list(range(COUNT))


def rest(loader: Any, iterator: Any) -> list[Any]:
    """Return the batches after an error of the system, which has broken the iterator."""
    with pytest.raises(IteratorInterruptedError, match=r"Too many open files|cannot map"):
        next(iterator)
    loader.load_state_dict(loader.state_dict())
    return list(loader)


def test_no_address_space_left_in_the_trainer() -> None:
    loader = DpexDataLoader(Of(one_large_at, COUNT), batch_size=1, num_workers=1)
    iterator = iter(loader)
    got = numbers([next(iterator)])
    before = descriptors()
    with lowered(resource.RLIMIT_AS, address_space() + LARGE_BYTES // 2):
        more, error = until_error(iterator)
    assert "cannot map" in str(error)
    assert "are made again after a resume" in str(error)
    assert_none_is_left(before)
    got += numbers([*more, *rest(loader, iterator)])
    assert got == list(range(COUNT))


def test_a_worker_out_of_descriptors_raises_in_its_batches() -> None:
    iterator = iter(DpexDataLoader(ShortInWorker(), batch_size=1, num_workers=1))
    got: list[int] = []
    failed: dict[int, OSError] = {}
    for number in range(COUNT):
        try:
            got += numbers([next(iterator)])
        except OSError as error:
            failed[number] = error
    assert sorted([*got, *failed]) == list(range(COUNT))
    assert failed
    assert set(failed) <= {4, 5, 6}
    assert all("Too many open files" in str(error) for error in failed.values())
    with pytest.raises(StopIteration):
        next(iterator)


def test_tickets_that_could_not_be_sent_are_sent_later() -> None:
    """A message of so many indices travels as a file, for which there is no descriptor."""
    batches = [list(range(start, start + 50_000)) for start in range(0, 200_000, 50_000)]
    loader = DpexDataLoader(
        Plain(), batch_sampler=batches, num_workers=1, prefetch_factor=1, collate_fn=list, seeding="batch"
    )
    iterator = iter(loader)
    with no_descriptor_left():
        got, error = until_error(iterator)
    assert "Too many open files" in str(error)
    got += rest(loader, iterator)
    assert got == [[50_000, batch[0]] for batch in batches]


def test_memory_that_cannot_be_had_leaves_no_descriptor() -> None:
    announced: list[int] = []
    arena = Arena(lambda _, fd: announced.append(fd))
    before = descriptors()
    with pytest.raises(OSError, match=r"File too large|Invalid argument|Cannot allocate"):
        arena.array(1 << 60)
    assert_none_is_left(before)
    base, ref = arena.array(10_000)
    assert (ref.segment, base.nbytes) == (1, 10_000)
    os.close(announced[0])


def test_a_state_is_given_beside_many_open_descriptors() -> None:
    """`select.select` takes no descriptor from 1024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        with DpexDataLoader(range(8), num_workers=1, persistent_workers=True) as loader:
            assert len(list(loader)) == 8
            assert loader.state_dict()

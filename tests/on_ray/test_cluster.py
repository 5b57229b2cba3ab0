"""The loader on a real Ray cluster of several raylets: same batches, whatever happens to it."""

import os
import types
import uuid
from collections.abc import Generator, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from families import Augmented, seeded
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from waiting import until

import dpex
from dpex import AsyncDataset, DpexDataLoader, decode_in_workers
from dpex.options import ClusterConfig

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("shared_ray")]

WORK = Augmented(120)
SLOW = Augmented(240, nap_s=0.004)
SHAPE: dict[str, Any] = {"batch_size": 4, "shuffle": True}


def epochs(loader: Any, count: int = 1) -> list[torch.Tensor]:
    return [batch for _ in range(count) for batch in loader]


def remote(dataset: Any, **options: Any) -> DpexDataLoader[torch.Tensor]:
    """All batches come from the cluster."""
    return DpexDataLoader(dataset, distribute_mode=True, generator=seeded(), **options)


def assert_same(expected: list[torch.Tensor], got: list[torch.Tensor]) -> None:
    assert len(expected) == len(got)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.smoke
def test_per_worker_seeds_are_torch_s() -> None:
    expected = epochs(DataLoader(WORK, **SHAPE, num_workers=3, generator=seeded()), 2)
    with remote(WORK, **SHAPE, num_workers=3) as loader:
        assert_same(expected, epochs(loader, 2))


def test_moving_between_machines_in_the_middle() -> None:
    expected = epochs(DpexDataLoader(SLOW, **SHAPE, num_workers=0, seeding="batch", generator=seeded()))
    with remote(SLOW, **SHAPE, num_workers=2, seeding="batch") as loader:
        iterator = iter(loader)
        got = [next(iterator) for _ in range(10)]
        loader.resize(local=1, remote=3)
        got += [next(iterator) for _ in range(15)]
        loader.resize(local=0, remote=1, prefetch=3)
        got += [next(iterator) for _ in range(15)]
        loader.resize(local=2, remote=0)
        assert_same(expected, got + list(iterator))
        assert loader.stats().pools["remote"].wanted == 0


def test_a_stream_is_torch_s() -> None:
    expected = epochs(DataLoader(Stream(), batch_size=3, num_workers=2, generator=seeded()))
    with remote(Stream(), batch_size=3, num_workers=2) as loader:
        assert_same(expected, epochs(loader))


class Stream(IterableDataset[torch.Tensor]):
    """Uneven streams: worker k yields 5 + 6k samples."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        assert info is not None
        for number in range(5 + 6 * info.id):
            yield torch.tensor([info.id, number, info.num_workers])


class StatefulStream(Stream):
    """Endless but for its length, with a draw in each sample; it tells where it is."""

    def __init__(self) -> None:
        self.at = self.begin = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        assert info is not None
        begin, self.begin = self.begin, 0
        for self.at in range(begin + 1, 61):
            yield torch.stack([torch.tensor(float(info.id)), torch.tensor(float(self.at)), torch.rand(())])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


@pytest.mark.parametrize(
    ("kind", "is_remote_first"),
    [
        ("batch", True),
        pytest.param("worker", False, marks=pytest.mark.long),
        pytest.param("stream", True, marks=pytest.mark.long),
    ],
)
def test_a_run_goes_on_at_another_place(kind: str, is_remote_first: bool) -> None:
    def loader_at(is_remote: bool) -> DpexDataLoader[torch.Tensor]:
        workers = 2 if is_remote or kind != "batch" else 1
        options: dict[str, Any] = {"num_workers": workers, "generator": seeded(), "distribute_mode": is_remote}
        if kind == "stream":
            return DpexDataLoader(StatefulStream(), batch_size=3, **options)
        return DpexDataLoader(WORK, **SHAPE, seeding=kind, **options)

    with loader_at(is_remote_first) as first:
        iterator = iter(first)
        for _ in range(7):
            next(iterator)
        state, rest = first.state_dict(), list(iterator)
    with loader_at(not is_remote_first) as second:
        second.load_state_dict(state)
        assert_same(rest, epochs(second))


def on_its_node(sample: torch.Tensor) -> torch.Tensor:
    return torch.cat([sample, torch.rand(1)])


def test_a_stream_read_here_and_decoded_remotely_is_resumed() -> None:
    dataset = decode_in_workers(Stream(), on_its_node)
    expected = epochs(DataLoader(dataset, batch_size=4, num_workers=3))
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 3, "seeding": "batch"}
    with remote(dataset, **options) as loader:
        iterator = iter(loader)
        got = [next(iterator) for _ in range(3)]
        state = loader.state_dict()
        got += iterator
        assert loader.stats().pools.keys() == {"remote"}
    assert_same([batch[:, :3] for batch in expected], [batch[:, :3] for batch in got])
    with DpexDataLoader(dataset, distribute_mode=False, generator=seeded(), **options) as loader:
        loader.load_state_dict(state)
        assert_same(got[3:], epochs(loader))


def until_all_run(loader: Any, iterator: Iterator[Any]) -> list[Any]:
    """Batches until every worker runs, and some more."""
    got: list[Any] = []

    def has_come() -> bool:
        got.append(next(iterator))
        return bool(loader.stats().pools["remote"].running == loader.num_workers)

    until(has_come, 90.0)
    return got + list(islice(iterator, 60))


class Broken(Augmented):
    """Divides by zero in the first batch, as the example of origin does."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index // (index > 3)])


def test_an_error_arrives_as_itself_and_the_other_batches_come() -> None:
    with remote(Broken(20), batch_size=4, num_workers=2) as loader:
        iterator = iter(loader)
        with pytest.raises(ZeroDivisionError, match="Caught ZeroDivisionError in DataLoader worker process 0"):
            next(iterator)
        assert [batch.flatten().tolist() for batch in iterator] == [[*range(i, i + 4)] for i in range(4, 20, 4)]


@types.coroutine
def turn() -> Generator[None, None, None]:
    """Let the other samples have a turn."""
    yield


class Waiting(AsyncDataset):
    """Waits for a number of turns that no seed determines, then draws. A batch at a time cannot load it: a sample waits
    until samples of another batch are open."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.most = self.open = 0

    def __len__(self) -> int:
        return self.length

    async def fetch(self, index: int) -> None:
        self.open += 1
        self.most = max(self.most, self.open)
        while self.most < 6 and "DPEX_TEST_NODE" in os.environ:
            await turn()
        for _ in range(os.urandom(1)[0] % 6):
            await turn()
        self.open -= 1

    def decode(self, index: int, raw: None) -> torch.Tensor:
        return torch.tensor([index, torch.randint(10**6, ()).item()])


def test_remote_workers_load_asynchronous_batches_at_once() -> None:
    expected = epochs(DpexDataLoader(Waiting(120), **SHAPE, num_workers=0, generator=seeded()))
    with remote(Waiting(120), **SHAPE, num_workers=2) as loader:
        assert_same(expected, epochs(loader))
        assert loader.stats().pools["remote"].tickets == 30


class NotOnNodes(Augmented):
    """Can be opened on this machine, and on no node of the cluster."""

    def __setstate__(self, state: Any) -> None:
        if "DPEX_TEST_NODE" in os.environ:
            raise ImportError("nowhere")
        self.__dict__ = state


class Decoded(Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((20_000,), float(index))


def test_a_cached_dataset_is_prepared_once_on_a_node() -> None:
    dataset = dpex.cached(Decoded(24), memory="10MB", version=uuid.uuid4().hex)
    with remote(dataset, batch_size=4, num_workers=2) as loader:
        for kept in (0, 24):
            assert [batch[:, 0].tolist() for batch in loader] == torch.arange(24.0).view(-1, 4).tolist()
            pool = loader.stats().pools["remote"]
            assert pool.cache_hits + pool.cache_misses == 24
            assert abs(pool.cache_hits - kept) <= 2  # a worker may prepare a sample while another one writes it


def test_where_no_node_can_serve_local_workers_do() -> None:
    expected = epochs(DpexDataLoader(WORK, **SHAPE, num_workers=0, seeding="batch", generator=seeded()))
    aside: dict[str, Any] = {"num_cpus": 0, "resources": {"probe": 1}}
    with remote(
        NotOnNodes(120), **SHAPE, num_workers=2, seeding="batch", cluster_config=ClusterConfig(ray_remote_args=aside)
    ) as loader:
        with pytest.warns(RuntimeWarning, match="nowhere"):
            got = epochs(loader)
        pools = loader.stats().pools
        assert (pools["remote"].running, pools["remote"].tickets) == (0, 0)
        assert pools["local"].tickets > 0
    assert_same(expected, got)

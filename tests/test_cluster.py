"""The loader on a real Ray cluster of several raylets: same batches, whatever happens to it."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import families
import psutil
import pytest
import torch
from families import Augmented, seeded, until
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dpex import DpexDataLoader, WorkerDiedError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
ray = pytest.importorskip("ray")

STORE_BYTES = 200 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without CPUs, where the trainer is, and three nodes with two each."""
    from ray.cluster_utils import Cluster

    started = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False},
    )
    for _ in range(3):
        started.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    for module in (families, sys.modules[__name__]):
        ray.cloudpickle.register_pickle_by_value(module)
    ray.init(address=started.address, log_to_driver=False)
    yield started
    ray.shutdown()
    started.shutdown()
    for module in (families, sys.modules[__name__]):
        ray.cloudpickle.unregister_pickle_by_value(module)


def epochs(loader: Any, count: int = 1) -> list[torch.Tensor]:
    return [batch for _ in range(count) for batch in loader]


def remote(dataset: Any, **options: Any) -> DpexDataLoader[torch.Tensor]:
    return DpexDataLoader(dataset, distribute_mode=True, generator=seeded(), **options)


def assert_same(expected: list[torch.Tensor], got: list[torch.Tensor]) -> None:
    assert len(expected) == len(got)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


WORK = Augmented(120)
SLOW = Augmented(240, nap_s=0.004)
SHAPE: dict[str, Any] = {"batch_size": 4, "shuffle": True}


def test_per_worker_seeds_are_torch_s(cluster: Any) -> None:
    expected = epochs(DataLoader(WORK, **SHAPE, num_workers=3, generator=seeded()), 2)
    with remote(WORK, **SHAPE, num_workers=3) as loader:
        assert_same(expected, epochs(loader, 2))


@pytest.mark.parametrize("workers", [1, 4])
def test_per_batch_seeds_do_not_depend_on_the_place(cluster: Any, workers: int) -> None:
    expected = epochs(DpexDataLoader(WORK, **SHAPE, num_workers=0, seeding="batch", generator=seeded()))
    with remote(WORK, **SHAPE, num_workers=workers, seeding="batch") as loader:
        assert_same(expected, epochs(loader))


def test_moving_between_machines_in_the_middle(cluster: Any) -> None:
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
        assert loader.stats().lanes["remote"].wanted == 0


def test_logical_workers_move_with_their_random_state(cluster: Any) -> None:
    expected = epochs(DataLoader(SLOW, **SHAPE, num_workers=3, generator=seeded()))
    with remote(SLOW, **SHAPE, num_workers=3) as loader:
        iterator = iter(loader)
        got = [next(iterator) for _ in range(10)]
        loader.resize(local=2, remote=1)
        got += [next(iterator) for _ in range(20)]
        loader.resize(local=0, remote=3)
        assert_same(expected, got + list(iterator))


def test_a_stream_is_torch_s(cluster: Any) -> None:
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


class Broken(Augmented):
    """Divides by zero, as the example of origin does."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index // 0)


def test_an_error_arrives_as_itself(cluster: Any) -> None:
    with (
        remote(Broken(20), batch_size=10, num_workers=2) as loader,
        pytest.raises(ZeroDivisionError, match="Caught ZeroDivisionError in DataLoader worker process 0"),
    ):
        next(iter(loader))


class Deadly(Augmented):
    """Kills whatever process makes sample 13."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([index])


def test_a_ticket_that_kills_actors_is_given_up(cluster: Any) -> None:
    with warnings.catch_warnings(), remote(Deadly(30), batch_size=5, num_workers=2, seeding="batch") as loader:
        warnings.simplefilter("ignore")
        iterator, got, errors = iter(loader), [], []
        while True:
            try:
                got.append(next(iterator))
            except StopIteration:
                break
            except WorkerDiedError as error:
                errors.append(str(error))
        assert len(got) == 5
        assert len(errors) == 1
        assert "[10, 11, 12, 13, 14]" in errors[0]


def test_the_dataset_is_sent_anew_at_each_pass(cluster: Any) -> None:
    dataset = Augmented(8)
    with remote(dataset, batch_size=4, num_workers=1, seeding="batch") as loader:
        assert all(batch.shape[1] == 4 for batch in loader)
        dataset.extra = 3
        assert all(batch.shape[1] == 7 for batch in loader)


def kill_raylet(node: Any) -> None:
    """SIGKILL to a node's raylet; its workers follow."""
    for process in node.all_processes["raylet"]:
        psutil.Process(process.process.pid).send_signal(signal.SIGKILL)


@pytest.mark.parametrize("seeding", ["batch", "worker"])
def test_a_raylet_killed_in_the_middle_changes_nothing(cluster: Any, seeding: Any) -> None:
    expected = (
        epochs(DataLoader(SLOW, **SHAPE, num_workers=3, generator=seeded()))
        if seeding == "worker"
        else epochs(DpexDataLoader(SLOW, **SHAPE, num_workers=0, seeding="batch", generator=seeded()))
    )
    victim = cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    try:
        with remote(SLOW, **SHAPE, num_workers=3, seeding=seeding) as loader:
            iterator = iter(loader)
            got = [next(iterator) for _ in range(8)]
            until(lambda: loader.stats().lanes["remote"].running == 3 or next_into(got, iterator))
            kill_raylet(victim)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got += list(iterator)
        assert_same(expected, got)
    finally:
        cluster.remove_node(victim, allow_graceful=False)


def next_into(got: list[torch.Tensor], iterator: Iterator[torch.Tensor]) -> bool:
    """Go on a little, so that the engine hears of actors that came up."""
    if len(got) < 30:
        got.append(next(iterator))
    return len(got) >= 30


def test_no_node_left_means_local_workers(cluster: Any) -> None:
    """Last of the module: it takes the cluster's nodes away."""
    expected = epochs(DpexDataLoader(SLOW, **SHAPE, num_workers=0, seeding="batch", generator=seeded()))
    with remote(SLOW, **SHAPE, num_workers=2, seeding="batch") as loader:
        iterator = iter(loader)
        got = [next(iterator) for _ in range(8)]
        for node in list(cluster.worker_nodes):
            cluster.remove_node(node, allow_graceful=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that local workers take over, unless the actors outlived their raylets
            got += list(iterator)
    assert_same(expected, got)

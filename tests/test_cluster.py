"""The loader on a real Ray cluster of several raylets: same batches, whatever happens to it."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import families
import numpy as np
import psutil
import pytest
import torch
from families import Augmented, seeded
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from waiting import until

from benchmarks.drills.trainer import Work
from benchmarks.drills.watched import AFTER, Watched
from dpex import DpexDataLoader, WorkerDiedError, decode_in_workers
from dpex.core import assignment
from dpex.pools.ray.cluster import connect, release

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
ray = pytest.importorskip("ray")

STORE_BYTES = 200 << 20
PREEMPTION = 2
"""``DRAIN_NODE_REASON_PREEMPTION``, as `ray drain-node` has it."""


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    """A head without CPUs, where the trainer is, and three nodes with two each."""
    from ray.cluster_utils import Cluster

    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False},
    )
    for _ in range(3):
        made.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    for module in (families, sys.modules[__name__]):
        ray.cloudpickle.register_pickle_by_value(module)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()
    for module in (families, sys.modules[__name__]):
        ray.cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(scope="module")
def shares(started: Any) -> Iterator[list[Any]]:
    """Shares of the connection: while there is one, agents are parked when their loader closes."""
    held: list[Any] = []
    yield held
    give_back(held)


def give_back(shares: list[Any]) -> None:
    while shares:
        release(shares.pop())


@pytest.fixture
def parked(shares: list[Any]) -> None:
    """Agents of the test before serve this one, too: starting them is most of what such a test takes."""
    if not shares:
        shares.append(connect("auto"))


@pytest.fixture
def cluster(started: Any, shares: list[Any]) -> Any:
    """On which nothing of the test before runs."""
    give_back(shares)
    return started


def epochs(loader: Any, count: int = 1) -> list[torch.Tensor]:
    return [batch for _ in range(count) for batch in loader]


def remote(dataset: Any, *, local_while_starting: bool = False, **options: Any) -> DpexDataLoader[torch.Tensor]:
    """All batches come from the cluster, unless the training process stands in."""
    return DpexDataLoader(
        dataset,
        distribute_mode=True,
        generator=seeded(),
        local_while_starting=local_while_starting,
        **options,
    )


def assert_same(expected: list[torch.Tensor], got: list[torch.Tensor]) -> None:
    assert len(expected) == len(got)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


WORK = Augmented(120)
SLOW = Augmented(240, nap_s=0.004)
SHAPE: dict[str, Any] = {"batch_size": 4, "shuffle": True}


def test_per_worker_seeds_are_torch_s(parked: None) -> None:
    expected = epochs(DataLoader(WORK, **SHAPE, num_workers=3, generator=seeded()), 2)
    with remote(WORK, **SHAPE, num_workers=3) as loader:
        assert_same(expected, epochs(loader, 2))


@pytest.mark.parametrize("workers", [1, 4])
def test_per_batch_seeds_do_not_depend_on_the_place(parked: None, workers: int) -> None:
    expected = epochs(DpexDataLoader(WORK, **SHAPE, num_workers=0, seeding="batch", generator=seeded()))
    with remote(WORK, **SHAPE, num_workers=workers, seeding="batch") as loader:
        assert_same(expected, epochs(loader))


def test_moving_between_machines_in_the_middle(parked: None) -> None:
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


def test_logical_workers_move_with_their_random_state(parked: None) -> None:
    expected = epochs(DataLoader(SLOW, **SHAPE, num_workers=3, generator=seeded()))
    with remote(SLOW, **SHAPE, num_workers=3) as loader:
        iterator = iter(loader)
        got = [next(iterator) for _ in range(10)]
        loader.resize(local=2, remote=1)
        got += [next(iterator) for _ in range(20)]
        loader.resize(local=0, remote=3)
        assert_same(expected, got + list(iterator))


def test_a_stream_is_torch_s(parked: None) -> None:
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


def test_a_stream_with_a_state_moves_to_the_cluster_and_back(parked: None) -> None:
    expected = epochs(DataLoader(StatefulStream(), batch_size=3, num_workers=2, generator=seeded()))
    with remote(StatefulStream(), batch_size=3, num_workers=2) as loader:
        iterator = iter(loader)
        got = [next(iterator) for _ in range(4)]
        loader.resize(local=2, remote=0)
        got += [next(iterator) for _ in range(8)]
        loader.resize(local=1, remote=1)
        assert_same(expected, got + list(iterator))


@pytest.mark.parametrize("kind", ["batch", "worker", "stream"])
@pytest.mark.parametrize("is_remote_first", [True, False])
def test_a_run_goes_on_at_another_place(parked: None, kind: str, is_remote_first: bool) -> None:
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


def test_what_is_read_here_is_decoded_on_the_cluster_and_goes_on_elsewhere(parked: None) -> None:
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


# -- while workers start -----------------------------------------------------------------------------------------------


def until_all_run(loader: Any, iterator: Iterator[Any]) -> list[Any]:
    """Batches until every worker runs, and some more."""
    got: list[Any] = []

    def has_come() -> bool:
        got.append(next(iterator))
        return bool(loader.stats().pools["remote"].running == loader.num_workers)

    until(has_come, 90.0)
    return got + list(islice(iterator, 60))


@pytest.mark.parametrize("seeding", ["batch", "worker"])
def test_the_first_batches_are_made_here_and_are_those_of_the_workers(cluster: Any, seeding: Any) -> None:
    with remote(OwnState(8000, nap_s=0.004), **SHAPE, num_workers=3, seeding=seeding, local_while_starting=True) as it:
        iterator = iter(it)
        got = [next(iterator)]
        assert (it.stats().pools["inline"].tickets, it.stats().pools["remote"].running) == (1, 0)
        got += until_all_run(it, iterator)
        assert it.stats().pools["remote"].tickets > 0
    workers = 3 if seeding == "worker" else 0
    kind = DataLoader if seeding == "worker" else partial(DpexDataLoader, seeding="batch")
    dataset = OwnState(8000) if seeding == "worker" else Augmented(8000)
    expected = list(islice(kind(dataset, **SHAPE, num_workers=workers, generator=seeded()), len(got)))
    if seeding == "batch":  # which promises nothing of what a dataset keeps to itself
        got = [batch[:, :-1] for batch in got]
    assert_same(expected, got)


def test_workers_that_come_late_take_over_whoever_shares_one(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A logical worker takes along what its dataset draws from: with a fixed number of workers, nothing says that it
    moved."""
    monkeypatch.setattr(assignment, "CROWD_AFTER_S", 0.0)
    with remote(OwnState(8000, nap_s=0.004), **SHAPE, num_workers=3) as loader:
        got = until_all_run(loader, iter(loader))
    expected = DataLoader(OwnState(8000), **SHAPE, num_workers=3, generator=seeded())
    assert_same(list(islice(expected, len(got))), got)


class OwnState(Augmented):
    """Draws from a generator of its own, too, of which every logical worker has a copy."""

    def __init__(self, length: int, nap_s: float = 0.0) -> None:
        super().__init__(length, nap_s)
        self.own = np.random.default_rng(3)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([super().__getitem__(index), torch.from_numpy(self.own.random(1))])


class NodeBound(Augmented):
    """Only the nodes have its files."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.trainer = os.getpid()

    def __getitem__(self, index: int) -> torch.Tensor:
        if os.getpid() == self.trainer:
            raise FileNotFoundError("/only/on/the/nodes")
        return super().__getitem__(index)


@pytest.mark.parametrize("seeding", ["batch", "worker"])
def test_data_that_only_the_nodes_can_read_is_left_to_them(cluster: Any, seeding: Any) -> None:
    with remote(NodeBound(40), **SHAPE, num_workers=2, seeding=seeding, local_while_starting=True) as loader:
        assert len(list(loader)) == 10
        assert "inline" not in loader.stats().pools


class Broken(Augmented):
    """Divides by zero, as the example of origin does."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index // 0)


@pytest.mark.parametrize("local_while_starting", [False, True])
def test_an_error_arrives_as_itself(cluster: Any, local_while_starting: bool) -> None:
    with (
        remote(Broken(20), batch_size=10, num_workers=2, local_while_starting=local_while_starting) as loader,
        pytest.raises(ZeroDivisionError, match="Caught ZeroDivisionError in DataLoader worker process 0"),
    ):
        next(iter(loader))


class Deadly(Augmented):
    """Kills whatever process makes sample 13."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([index])


def test_a_ticket_that_kills_actors_is_given_up(parked: None) -> None:
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


def test_the_dataset_is_sent_anew_at_each_pass(parked: None) -> None:
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
            until(lambda: loader.stats().pools["remote"].running == 3 or next_into(got, iterator))
            kill_raylet(victim)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got += list(iterator)
        assert_same(expected, got)
    finally:
        cluster.remove_node(victim, allow_graceful=False)


def test_a_drained_node_gives_its_logical_workers_back_with_their_state(cluster: Any) -> None:
    """They go on elsewhere from where they were: nothing dies, and nothing is made twice."""
    drained, other = (
        cluster.add_node(num_cpus=2, resources={"pair": 2}, object_store_memory=STORE_BYTES) for _ in range(2)
    )
    try:
        pair = {"resources": {"pair": 1}}
        with remote(Augmented(20_000, nap_s=0.004), **SHAPE, num_workers=2, ray_remote_args=pair) as loader:
            iterator: Any = iter(loader)
            pool = iterator._engine.pool("remote")
            got = [next(iterator)]
            until(lambda: loader.stats().pools["remote"].running == 2 or next_into(got, iterator))
            assert {node for _, node in pool._nodes.agents} == {drained.node_id, other.node_id}
            in_an_hour_ms = int(1000 * (time.time() + 3600))
            client = ray._raylet.GcsClient(address=cluster.address)
            assert client.drain_node(drained.node_id, PREEMPTION, "a test", in_an_hour_ms)[0]

            def has_moved() -> bool:
                got.append(next(iterator))
                return nodes_of(pool) == {other.node_id}

            until(has_moved, 90.0)
            assert loader.stats().deaths == 0
            got += islice(iterator, 60)
        # Forked beside Ray on Python 3.13, torch's workers crash here while a client of Ray is deallocated.
        fresh: Any = {"multiprocessing_context": "spawn"}
        made = DataLoader(Augmented(20_000), **SHAPE, **fresh, num_workers=2, generator=seeded())
        assert_same(list(islice(made, len(got))), got)
    finally:
        for node in (drained, other):
            cluster.remove_node(node, allow_graceful=False)


def nodes_of(pool: Any) -> set[str]:
    """Where workers are up."""
    nodes = dict(pool._nodes.agents)
    return {nodes[agent.number] for agent in pool._agents.values() if agent.up}


def next_into(got: list[torch.Tensor], iterator: Iterator[torch.Tensor]) -> bool:
    """Go on a little, so that the engine hears of actors that came up."""
    if len(got) < 30:
        got.append(next(iterator))
    return len(got) >= 30


def test_sixty_four_workers_of_two_nodes(cluster: Any) -> None:
    many = [cluster.add_node(num_cpus=32, resources={"many": 32}, object_store_memory=STORE_BYTES) for _ in range(2)]
    try:
        options = {"num_workers": 64, "ray_remote_args": {"resources": {"many": 1}}}
        with remote(Augmented(10**6, nap_s=0.05), **SHAPE, seeding="batch", **options) as loader:
            got = until_all_run(loader, iter(loader))
            assert loader.stats().deaths == 0
            assert len(loader.stats().pools["remote"].nodes) == len(many)
        made = DpexDataLoader(Augmented(10**6), **SHAPE, num_workers=0, seeding="batch", generator=seeded())
        assert_same(list(islice(made, len(got))), got)
    finally:
        for node in many:
            cluster.remove_node(node, allow_graceful=False)


def test_no_node_left_means_local_workers(cluster: Any) -> None:
    """Last but one of the module: it takes the cluster's nodes away."""
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


def test_without_rays_control_service_workers_go_on_and_a_warning_says_what_follows(cluster: Any) -> None:
    """Last of the module: it ends the cluster. Ray ends whoever is connected a minute later, so nobody here may be."""
    cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    ray.shutdown()
    (service,) = cluster.head_node.all_processes["gcs_server"]
    with Watched(Work(place="cluster", workers=2, address=cluster.address)) as training:
        training.until_all_run()
        os.kill(service.process.pid, signal.SIGKILL)
        training.until(lambda: training.warnings, 90.0)
        made = training.made_by("remote")
        training.until(lambda: training.made_by("remote") > made + AFTER)
        assert training.finish() == 0, training.errors()
    (warning,) = training.warnings
    assert f"control service at {cluster.address} cannot be reached" in warning
    assert (training.lost, training.repeated, training.deaths) == (0, 0, 0)

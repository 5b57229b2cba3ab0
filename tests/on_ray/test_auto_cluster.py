"""`num_workers="auto"` on a real Ray cluster: work moves out, comes back, and outlives a node.

The raylets share this machine's cores, so CPU work would find nothing on them that the trainer's process does not have
too. What they do have is room: a sample here waits for 10 ms (as for a storage), local workers are limited to
`LOCAL`, and whatever goes beyond them must come from actors. Nothing is said here of how fast anything is: conditions
are waited for.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from families import Augmented, assert_same, seeded, stacked
from inspection import pool_of
from shared_ray import QUICK_TO_NOTICE, STORE_BYTES, SharedRay, own_ray
from torch.utils.data import Sampler
from workload import wait_as_work

from dpex import AutotuneConfig, DpexDataLoader

pytestmark = [pytest.mark.alone, pytest.mark.ray, pytest.mark.timeout(600)]
ray = pytest.importorskip("ray")

HEAD_CPUS, NODE_CPUS = 1, 4
PATIENCE_S = 240.0
BATCH = 8
NAP_S = 0.01
STEP_S = 0.02
SHORT_STEP_S = 0.008
"""So that more workers are needed than there is room for on one node."""
LOCAL = 2
ENOUGH = 60
"""Batches after which it is seen that somebody takes part: the local workers alone would need two seconds for them."""
CONFIG = AutotuneConfig(max_local=LOCAL, interval_s=0.25)
LENGTH = 1_000_000


@pytest.fixture(scope="module")
def cluster(ray_of_session: SharedRay) -> Iterator[Any]:
    """A Ray of its own, as nodes end here: a head with one CPU, where the trainer is, and two nodes of four CPUs."""
    node = {"num_cpus": NODE_CPUS}
    with own_ray(ray_of_session, head={"num_cpus": HEAD_CPUS}, nodes=[node, node], settings=QUICK_TO_NOTICE) as started:
        yield started


def auto(dataset: Any, **options: Any) -> DpexDataLoader[torch.Tensor]:
    settings: dict[str, Any] = {"num_workers": "auto", "distribute_mode": True, "autotune": CONFIG}
    return DpexDataLoader(dataset, batch_size=BATCH, generator=seeded(), **{**settings, **options})


def in_process(count: int, **options: Any) -> torch.Tensor:
    """The first batches as one process makes them, without the naps."""
    plain = {"num_workers": 0, "seeding": "batch", "distribute_mode": False, "autotune": None}
    return stacked(islice(auto(Augmented(LENGTH), **plain, **options), count))


class Training:
    """A consumer that takes a batch and then `step_s` for its step."""

    def __init__(self, loader: DpexDataLoader[torch.Tensor]) -> None:
        self.loader = loader
        self.iterator = iter(loader)
        self.batches: list[torch.Tensor] = []

    def until(self, enough: Callable[[], Any], step_s: float = STEP_S) -> None:
        """Train until ``enough()``; AssertionError when patience or the data end."""
        deadline = time.monotonic() + PATIENCE_S
        while not enough():
            self.batches.append(next(self.iterator))
            wait_as_work(step_s)
            assert time.monotonic() < deadline, f"{self.loader.decisions}, {self.loader.stats()}"

    def made_far(self) -> int:
        """Batches that actors made."""
        pools = self.loader.stats().pools
        return pools["remote"].tickets if "remote" in pools else 0

    def remote(self) -> int:
        """Actors that run."""
        pools = self.loader.stats().pools
        return pools["remote"].running if "remote" in pools else 0

    def actors(self) -> Counter[str]:
        """Actors that are up, by node."""
        pool = pool_of(self.iterator, "remote")
        nodes = dict(pool._nodes._numbers)
        up = {number: len(agent.up) for number, agent in pool._agents.items() if number in nodes}
        return Counter({nodes[number].node: count for number, count in up.items()})

    def fullest(self, cluster: Any) -> str:
        """The node with the most actors, but for the head."""
        return max((node.node_id for node in cluster.worker_nodes), key=self.actors().__getitem__)


@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize("mode", [True, pytest.param("auto", marks=pytest.mark.long)])
def test_what_is_too_much_for_this_machine_is_moved_out(mode: Any) -> None:
    with auto(Augmented(LENGTH, NAP_S), shuffle=True, distribute_mode=mode) as loader:
        training = Training(loader)
        training.until(lambda: training.remote() >= 2 and training.made_far() >= ENOUGH)
        first = loader.decisions[0]
        assert (first.reason, first.old.remote) == ("too few", 0)
        assert first.new.remote >= 1  # Ray may still count the actors of the test before as there
        assert first.new.local <= LOCAL
        assert loader.stats().pools["local"].running <= LOCAL
        count = len(training.batches)
    assert_same(stacked(training.batches), in_process(count, shuffle=True))


class Endless(Sampler[int]):
    """Indices in an order of its own, until it is told to stop: an epoch that ends when the test has seen enough."""

    def __init__(self, most: int = LENGTH) -> None:
        self.most = most
        self.stopped = threading.Event()

    def __iter__(self) -> Iterator[int]:
        order = random.Random(3)
        for number in range(self.most):
            if self.stopped.is_set() and number % BATCH == 0:
                return
            yield order.randrange(LENGTH)


@pytest.fixture(params=[True, False], ids=["leaving", "killed"])
def remove(cluster: Any, request: Any) -> Iterator[Callable[[str], threading.Thread]]:
    """Takes the node with that id away: it signs off, or its raylet is killed. Another one comes after the test."""
    begun: list[threading.Thread] = []

    def begin(node_id: str) -> threading.Thread:
        node = next(node for node in cluster.worker_nodes if node.node_id == node_id)
        options = {"allow_graceful": request.param}
        begun.append(threading.Thread(target=cluster.remove_node, args=(node,), kwargs=options))
        begun[0].start()
        return begun[0]

    yield begin
    for thread in begun:
        thread.join(PATIENCE_S)
        cluster.add_node(num_cpus=NODE_CPUS, object_store_memory=STORE_BYTES)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:the agent on node")
def test_a_node_that_goes_is_made_up_for(cluster: Any, remove: Callable[[str], threading.Thread]) -> None:
    """As many actors as are wanted are there again, elsewhere, and no batch is lost or comes twice."""
    sampler = Endless()
    with auto(Augmented(LENGTH, NAP_S), sampler=sampler) as loader:
        training = Training(loader)
        training.until(lambda: training.remote() >= 2 and training.made_far() >= ENOUGH)
        victim = training.fullest(cluster)
        removal = remove(victim)
        training.until(lambda: not removal.is_alive() and not training.actors()[victim])
        made = training.made_far()
        training.until(lambda: training.made_far() >= made + ENOUGH)
        training.until(lambda: training.remote() >= loader.stats().pools["remote"].wanted > 0)
        assert not training.actors()[victim]
        assert loader.stats().deaths >= 1
        sampler.stopped.set()
        training.batches += training.iterator
        got = stacked(training.batches)
    assert_same(got, in_process(len(training.batches) + 1, sampler=Endless(len(got))))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:the agent on node")
@pytest.mark.parametrize("remove", [True], indirect=True, ids=["leaving"])
def test_what_there_is_no_room_for_is_not_wanted_any_longer(
    cluster: Any, remove: Callable[[str], threading.Thread]
) -> None:
    """All nodes are needed and one goes: the request falls to what fits, and a decision says so."""
    fits = NODE_CPUS + HEAD_CPUS
    with auto(Augmented(LENGTH, NAP_S), shuffle=True) as loader:
        training = Training(loader)
        training.until(lambda: training.remote() > fits, step_s=SHORT_STEP_S)
        decided = len(loader.decisions)
        removal = remove(training.fullest(cluster))
        training.until(lambda: not removal.is_alive() and training.remote() <= fits, step_s=SHORT_STEP_S)
        training.until(lambda: loader.stats().pools["remote"].wanted <= fits, step_s=SHORT_STEP_S)
        assert any(d.new.remote < d.old.remote for d in loader.decisions[decided:])
        count = len(training.batches)
    assert_same(stacked(training.batches), in_process(count, shuffle=True))

"""The nodes of a cluster and the pools that use them one after the other, without a cluster."""

import threading
from collections.abc import Iterator

import pytest
from waiting import PATIENCE_S

from dpex.pools.agent.connection import wake_nobody
from dpex.pools.agent.pool import NodeNews
from dpex.pools.ray import nodes as module
from dpex.pools.ray.cluster import LOOPBACK, Cluster
from dpex.pools.ray.nodes import RayNodes
from dpex.pools.ray.room import worker_options


class Connected(Cluster):
    """A cluster without any node."""

    def is_connected(self) -> bool:
        return True


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Connected("a session", private=False, shares=1)
    monkeypatch.setattr(module, "trainer_address", lambda: LOOPBACK)
    monkeypatch.setattr(module, "living_nodes", list)
    yield made
    made.parked.clear()


def test_a_pool_gets_no_news_of_the_pool_before_it(cluster: Cluster) -> None:
    nodes = RayNodes(cluster, "key", worker_options(None))
    nodes.begin(wake_nobody)
    goes_on, has_begun = threading.Event(), threading.Event()
    nodes._do(lambda: goes_on.wait(PATIENCE_S))
    nodes._do(lambda: nodes._report(NodeNews("ready", 1, "here", path="the dataset of the pool before")))
    cluster.shares += 1
    nodes.close()
    assert cluster.parked.take("key") is nodes
    nodes.begin(has_begun.set)
    nodes._do(has_begun.set)
    goes_on.set()
    assert has_begun.wait(PATIENCE_S)
    assert [news.kind for news in nodes.news() if news.kind == "ready"] == []
    nodes.end()
    nodes.join(PATIENCE_S)

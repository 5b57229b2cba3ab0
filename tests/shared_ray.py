"""One private Ray for all tests of a process that do not test how Ray starts.

It has a head without CPUs, where the tests are, and two nodes. The process holds a share of the connection, so that the
agents of one test are parked for the next one: starting agents is most of what a test with Ray costs. Tests that end
nodes, or need another Ray, leave this one first (`SharedRay.leave`); the next test that needs it joins it again.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest

STORE_BYTES = 200 << 20
KEPT_S = 3600.0
"""Seconds for which agents stay parked: as long as any run of the tests."""
HEAD: dict[str, Any] = {"num_cpus": 0}
NODES: tuple[dict[str, Any], ...] = (
    {"num_cpus": 2, "resources": {"main": 3, "probe": 1}, "env_vars": {"DPEX_TEST_NODE": "good"}},
    {"num_cpus": 2, "resources": {"aside": 100, "probe": 2}, "env_vars": {"DPEX_TEST_NODE": "bare"}},
)
"""``DPEX_TEST_NODE`` tells a dataset which node it is on. Each resource is for tests whose agents are on that node."""
QUICK_TO_NOTICE: dict[str, Any] = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}
"""Ray's settings with which a node is dead after two seconds without a heartbeat, where the defaults take fifteen. They
are for tests that run alone: a node of a busy machine may be late."""


def started(
    head: dict[str, Any] = HEAD, nodes: Sequence[dict[str, Any]] = NODES, settings: dict[str, Any] | None = None
) -> Any:
    """Start a Ray of so many raylets on this machine, and return it as a `ray.cluster_utils.Cluster`."""
    from ray.cluster_utils import Cluster

    settings = {"prestart_worker_first_driver": False, **(settings or {})}
    quiet = {"object_store_memory": STORE_BYTES, "include_dashboard": False, "_system_config": settings}
    cluster = Cluster(initialize_head=True, head_node_args={**quiet, **head})
    for node in nodes:
        cluster.add_node(wait=False, **{"object_store_memory": STORE_BYTES, **node})
    cluster.wait_for_nodes()
    return cluster


def connect_to(cluster: Any, **options: Any) -> None:
    """Connect this process; ``options``: of ``ray.init``."""
    ray = importlib.import_module("ray")
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", **options)


@contextlib.contextmanager
def by_value(*modules: ModuleType) -> Iterator[None]:
    """What these modules define travels to workers, which cannot import the modules."""
    pickling = importlib.import_module("ray").cloudpickle
    for module in modules:
        pickling.register_pickle_by_value(module)
    yield
    for module in modules:
        pickling.unregister_pickle_by_value(module)


class SharedRay:
    """The Ray of this process, started when it is first joined."""

    def __init__(self) -> None:
        self._cluster: Any = None
        self._share: Any = None

    @property
    def address(self) -> str:
        """Address of the cluster."""
        return str(self._cluster.address)

    @property
    def share(self) -> Any:
        """This process's share of dpex's connection."""
        return self._share

    def join(self) -> None:
        """Connect this process, and forget which nodes failed in the tests before."""
        from dpex.pools.ray.cluster import AvoidedNodes, connect

        if self._cluster is None:
            self._cluster = started()
        if not importlib.import_module("ray").is_initialized():
            connect_to(self._cluster)
        if self._share is None:
            self._share = connect("auto")
        self._share.avoided = AvoidedNodes()

    def release(self) -> None:
        """Give the share back, with all parked agents. The process stays connected."""
        from dpex.pools.ray.cluster import release

        if self._share is not None:
            release(self._share)
            self._share = None

    def leave(self) -> None:
        """Disconnect this process. The nodes stay for whoever joins next."""
        self.release()
        if (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
            ray.shutdown()

    def end(self) -> None:
        """Disconnect, and end all nodes."""
        self.leave()
        if self._cluster is not None:
            self._cluster.shutdown()
            self._cluster = None


@contextlib.contextmanager
def own_ray(shared: SharedRay, connection: dict[str, Any] | None = None, **how: Any) -> Iterator[Any]:
    """Another Ray, to which this process is connected instead; ``how``: as for `started`.

    It is no Ray that ``ray.init(address="local")`` starts: that one asks for tokens, and who has been connected to it
    sends them to others, too, which then take its actors for dead.
    """
    shared.leave()
    cluster = started(**how)
    try:
        connect_to(cluster, **(connection or {}))
        yield cluster
    finally:
        shared.leave()
        cluster.shutdown()


@pytest.fixture(scope="session")
def ray_of_session() -> Iterator[SharedRay]:
    """The shared Ray, whether it runs or not. Tests that need it connected ask for `shared_ray`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpex.pools.ray.nodes.PARKED_S", KEPT_S)
        shared = SharedRay()
        yield shared
        shared.end()


@pytest.fixture
def shared_ray(ray_of_session: SharedRay) -> SharedRay:
    """The shared Ray, to which this process is connected."""
    ray_of_session.join()
    return ray_of_session

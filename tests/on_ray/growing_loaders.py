"""Loaders on a cluster that grows on demand: a real autoscaler adds a raylet for them, and takes it away after them.

`test_ray_heads` runs this in a process of its own, without the shared Ray.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
from families import Augmented, assert_same, is_alive, seeded, stacked, train_until
from waiting import until

from dpex import AutotuneConfig, DpexDataLoader

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
ray = pytest.importorskip("ray")

PATIENCE_S = 200.0
NODE_CPUS = 2
STEP_S = 0.02
LENGTH = 1_000_000
SLOW = Augmented(LENGTH, nap_s=0.01)
SHAPE: dict[str, Any] = {"batch_size": 8, "shuffle": True}
CONFIG = AutotuneConfig(max_local=1, max_remote=NODE_CPUS, interval_s=0.25)
"""One local worker makes 12 batches a second, and the training loop takes 50."""


IDLE_MINUTES = 0.05
"""After which the autoscaler takes a node away."""
START_S = 120


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class GrowingCluster:
    """A head without CPUs, and nodes of ``node_cpus`` each that the autoscaler adds, ``most_nodes`` at most.

    It is started by ``ray start``; ``address`` is for ``ray.init``. It asks for no token, as those of
    ``ray.cluster_utils`` do not. The autoscaling cluster there neither works from Ray's wheel (a file of its is missing
    there) nor leaves other Rays of this machine alone.
    """

    def __init__(self, *, node_cpus: int, most_nodes: int, store_bytes: int) -> None:
        self._node = {"CPU": node_cpus, "object_store_memory": store_bytes}
        self._most_nodes = most_nodes
        self._directory = Path(tempfile.mkdtemp(prefix="dpex"))
        port = free_port()
        self.address = f"{_own_address()}:{port}"
        scaling = self._directory / "autoscaling.json"
        scaling.write_text(json.dumps(self._config()))
        sizes = ["--num-cpus=0", f"--object-store-memory={store_bytes}", "--include-dashboard=false"]
        others = [f"--temp-dir={self._directory}", "--disable-usage-stats", f"--autoscaling-config={scaling}"]
        scales = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
        try:
            subprocess.run(
                [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}", *sizes, *others],
                env={**os.environ, "RAY_AUTH_MODE": "disabled", **scales},
                stdout=subprocess.DEVNULL,
                check=True,
                timeout=START_S,
            )
        except BaseException:
            self.shutdown()
            raise

    def processes(self) -> list[psutil.Process]:
        """All that were started with this head's directory."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and any(str(self._directory) in part for part in process.cmdline()):
                    found.append(process)
        return found

    def shutdown(self) -> None:
        """End them, until none is there that another one has started meanwhile, and remove the directory."""
        while processes := self.processes():
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            until(lambda pids=[process.pid for process in processes]: not any(map(is_alive, pids)), START_S)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _config(self) -> dict[str, Any]:
        lists = ("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands", "setup_commands")
        commands = ("head_setup_commands", "worker_setup_commands", "head_start_ray_commands")
        provider = {"type": "fake_multinode", "gcs_address": self.address, "use_node_id_as_ip": True}
        switches = {"disable_node_updaters": True, "disable_launch_config_check": True}
        head = {"resources": {"CPU": 0}, "node_config": {}, "min_workers": 0, "max_workers": 0}
        worker = {**head, "resources": self._node, "max_workers": self._most_nodes}
        return {
            "cluster_name": "dpex",
            "max_workers": self._most_nodes,
            "upscaling_speed": 1.0,
            "idle_timeout_minutes": IDLE_MINUTES,
            "provider": {**provider, **switches},
            "auth": {},
            "docker": {},
            "file_mounts": {},
            "file_mounts_sync_continuously": False,
            "head_node_type": "ray.head.default",
            "available_node_types": {"ray.head.default": head, "worker": worker},
            **{name: [] for name in (*lists, *commands, "worker_start_ray_commands")},
        }


def _own_address() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


@pytest.fixture(scope="module")
def cluster() -> Iterator[GrowingCluster]:
    started = GrowingCluster(node_cpus=NODE_CPUS, most_nodes=1, store_bytes=100 << 20)
    try:
        ray.init(address=started.address, log_to_driver=False, logging_level="ERROR")
        yield started
        ray.shutdown()
    finally:
        started.shutdown()


def nodes() -> int:
    """Those beside the head."""
    return sum(node["Alive"] for node in ray.nodes()) - 1


def running(loader: Any, pool: str) -> int:
    pools = loader.stats().pools
    return pools[pool].running if pool in pools else 0


def wait_until_it_has_shrunk() -> None:
    until(lambda: nodes() == 0, PATIENCE_S)


def test_a_tuned_loaders_demand_adds_a_node_until_it_is_idle(
    cluster: GrowingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpex.pools.ray.nodes.IDLE_S", 0.5)
    assert nodes() == 0
    where: dict[str, Any] = {"num_workers": "auto", "distribute_mode": True, "autotune": CONFIG}
    with DpexDataLoader(SLOW, generator=seeded(), **SHAPE, **where) as loader:
        iterator = iter(loader)
        got = train_until(lambda: running(loader, "remote") == NODE_CPUS, loader, iterator, step_s=STEP_S)
        made = loader.stats().pools["remote"].tickets
        got += train_until(lambda: loader.stats().pools["remote"].tickets > made + 20, loader, iterator, step_s=STEP_S)
        told = [decision.text for decision in loader.decisions if decision.reason == "demand"]
        assert told[0].startswith("Asked the cluster for ")
        loader.resize(local=1, remote=0)
        got += train_until(lambda: nodes() == 0, loader, iterator, step_s=STEP_S)
        assert running(loader, "local") == 1
    expected = DpexDataLoader(Augmented(LENGTH), generator=seeded(), seeding="batch", **SHAPE)
    assert_same(stacked(got), stacked(islice(expected, len(got))))


@pytest.mark.filterwarnings("ignore:no worker can run on the cluster", "ignore:no remote worker is left")
def test_fixed_workers_wait_for_a_node_while_local_ones_serve(cluster: GrowingCluster) -> None:
    wait_until_it_has_shrunk()
    where: dict[str, Any] = {"num_workers": NODE_CPUS, "distribute_mode": True, "seeding": "batch"}
    with DpexDataLoader(SLOW, generator=seeded(), **SHAPE, **where) as loader:
        iterator = iter(loader)
        got = train_until(lambda: running(loader, "local") > 0, loader, iterator, step_s=STEP_S)
        got += train_until(lambda: running(loader, "remote") == NODE_CPUS, loader, iterator, step_s=STEP_S)
        got += train_until(lambda: running(loader, "local") == 0, loader, iterator, step_s=STEP_S)
        made = loader.stats().pools["remote"].tickets
        got += train_until(lambda: loader.stats().pools["remote"].tickets > made + 20, loader, iterator, step_s=STEP_S)
    expected = DpexDataLoader(Augmented(LENGTH), generator=seeded(), seeding="batch", **SHAPE)
    assert_same(stacked(got), stacked(islice(expected, len(got))))
    wait_until_it_has_shrunk()

"""Planted bottlenecks with workers on a Ray cluster: three raylets on this machine, the trainer's without CPUs."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

import pytest

from dpex import DpexDataLoader
from dpex.options import ClusterConfig
from dpex.pools.ray.cluster import living_nodes
from dpex.system.cpus import usable_cpus
from tests.diagnose import planted
from tests.diagnose.planted import REMOTE, Case, Planted, Transformed, Uneven, check, train
from tests.diagnose.test_hot_calls import check_dear
from tests.shared_ray import SharedRay, by_value

pytestmark = [pytest.mark.alone, pytest.mark.ray, pytest.mark.usefixtures("shared_ray")]
SLOW_NODE = "aside"
"""Resource of the node that is slow in `Uneven`."""


@pytest.fixture(scope="module", autouse=True)
def cases_travel() -> Iterator[None]:
    with by_value(planted):
        yield


@pytest.fixture
def new_agents(shared_ray: SharedRay) -> Iterator[None]:
    """None of the case before serves this one, and none of this one the next."""
    shared_ray.share.parked.clear()
    yield
    shared_ray.share.parked.clear()


@pytest.mark.parametrize(
    "name", [name if name == "computing" else pytest.param(name, marks=pytest.mark.long) for name in REMOTE]
)
def test_the_planted_bottleneck_is_found(name: str) -> None:
    diagnosis = check(REMOTE[name])
    if name == "stragglers":
        planted_ones = [slow for slow in diagnosis.facts.slow_samples if int(slow.shown) % 32 == 0]
        assert len(planted_ones) >= 3  # a busy machine may make others as slow
        assert planted_ones[0].seconds > 0.2


@pytest.mark.long
def test_the_dear_transform_is_named() -> None:
    case = replace(REMOTE["computing"], dataset=partial(Transformed, 600))
    diagnosis = case.run()
    check_dear(diagnosis)
    assert "`zlib.crc32`" in diagnosis.verdict.where
    assert [node.tickets for node in diagnosis.facts.nodes.values()] == [diagnosis.facts.pools["remote"].tickets]
    assert "All batches were made on one machine" in diagnosis.full


@pytest.mark.long
@pytest.mark.usefixtures("new_agents")
def test_the_slower_machine_is_named() -> None:
    """Two workers on two nodes of which each has room for one."""
    options = {
        "distribute_mode": True,
        "num_workers": 2,
        "cluster_config": ClusterConfig(ray_remote_args={"num_cpus": 2}),
    }
    diagnosis = Case(dataset=partial(Uneven, 800), accepted=("storage",), options=options).run()
    nodes = diagnosis.facts.nodes.items()
    (slower, slow_sums), (quicker, quick_sums) = sorted(nodes, key=lambda node: -node[1].busy_s / node[1].tickets)
    (slow,) = [node["NodeID"] for node in living_nodes() if SLOW_NODE in node["Resources"]]
    assert slow[:8] in slower
    assert slow[:8] not in quicker
    assert slow_sums.busy_s / slow_sums.tickets > 0.03
    assert slow_sums.tickets + quick_sums.tickets == diagnosis.facts.pools["remote"].tickets
    text = diagnosis.full
    assert text.index(slower) < text.index(quicker)


BURN = "import os; os.nice(15)\nwhile True: pass"
"""As nice as Ray's workers are, so that they share the CPUs evenly."""


@pytest.mark.long
def test_waiting_for_a_cpu_there_is_no_waiting_for_data() -> None:
    """An actor computes while others want the CPUs, too."""
    options: dict[str, Any] = {"num_workers": 1, "distribute_mode": True}
    with DpexDataLoader(Planted(4000, cpu_s=0.005), batch_size=2, **options) as loader:
        running = iter(loader)
        next(running)
        burning = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(2 * ceil(usable_cpus()))]
        try:
            loader.diagnose(reset=True)
            train(running, 0.001)
            diagnosis = loader.diagnose()
        finally:
            for process in burning:
                process.kill()
                process.wait()
    remote = diagnosis.facts.pools["remote"]
    queued_s = remote.queueing_s
    assert queued_s is not None
    assert queued_s > 0.2 * remote.busy_s
    assert queued_s + remote.cpu_s == pytest.approx(remote.busy_s, rel=0.2)
    assert diagnosis.verdict.cause == "cpu", str(diagnosis)
    assert not any("other machines" in gap for gap in diagnosis.facts.unmeasured)

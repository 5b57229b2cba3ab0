"""Planted bottlenecks with workers on a Ray cluster: two raylets on this machine, the trainer's without CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from tests.diagnose import planted
from tests.diagnose.planted import REMOTE, Case, Large

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
STORE_BYTES = 300 << 20


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    from ray.cluster_utils import Cluster

    quiet = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **quiet})
    started.add_node(num_cpus=4, object_store_memory=STORE_BYTES)
    ray.cloudpickle.register_pickle_by_value(planted)
    ray.init(address=started.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
    started.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(planted)


def check(case: Case) -> None:
    diagnosis = case.run()
    verdict = diagnosis.verdict
    assert verdict.cause in case.accepted, str(diagnosis)
    assert case.where in verdict.where


@pytest.mark.parametrize("name", REMOTE)
def test_the_planted_bottleneck_is_found(name: str) -> None:
    check(REMOTE[name])


def test_the_object_store_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpex.lanes.remote.stream_address", lambda: None)
    diagnosis = replace(REMOTE["large batches"], dataset=partial(Large, 1600)).run()
    assert diagnosis.verdict.cause == "transfer", str(diagnosis)
    assert "the object store" in diagnosis.verdict.where

"""The headline series as somebody sees them who scrapes a Ray cluster and has never heard of dpex's endpoint."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

import families
import pytest
from families import Augmented
from shared_ray import SharedRay, by_value, own_ray
from waiting import until

from dpex import DpexDataLoader
from dpex.telemetry.catalog import BY_NAME
from dpex.telemetry.loader_metrics import LoaderMetrics
from dpex.telemetry.ray_metrics import HEADLINES, RayMirror, mirror

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
ray = pytest.importorskip("ray")
AGENT = Path(sys.prefix) / "ray-agent"
"""Where `make ray-agent` puts what ``ray[default]`` adds, without which a node exports no metrics."""
AGENT_NEEDS = ("aiohttp", "aiohttp_cors", "opencensus", "opentelemetry", "pydantic")


@pytest.fixture(scope="module", autouse=True)
def tests_travel() -> Iterator[None]:
    with by_value(families, sys.modules[__name__]):
        yield


@pytest.fixture
def exporter(ray_of_session: SharedRay) -> Iterator[str]:
    """A private Ray; yields the address of what exports its metrics."""
    if not exports_metrics():
        pytest.skip("this Ray exports no metrics: `make ray-agent` installs what its agent needs")
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(AGENT), prepend=os.pathsep)  # for the agent
        patch.setattr(sys, "path", [*sys.path, str(AGENT)])  # for Ray, which looks whether it can start one
        with own_ray(ray_of_session, head={"num_cpus": 2}, nodes=(), settings={"metrics_report_interval_ms": 500}):
            yield metrics_address()
    forget_agent(before)


def forget_agent(before: set[str]) -> None:
    """Unload what was imported for the agent: the next Ray of this process would be sure that it can start one."""
    for name, module in list(sys.modules.items()):
        is_the_agents = (getattr(module, "__file__", None) or "").startswith(str(AGENT))
        if name not in before and (is_the_agents or name.startswith("ray.dashboard")):
            del sys.modules[name]


def exports_metrics() -> bool:
    return all(PathFinder.find_spec(name, [*sys.path, str(AGENT)]) for name in AGENT_NEEDS)


def metrics_address() -> str:
    """Known once the node's agent is up."""
    node = until(lambda: next((node for node in ray.nodes() if node["MetricsExportPort"] > 0), None), 60.0)
    return f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"


def scraped(address: str, name: str, loader: str) -> dict[str, float]:
    """Values of that series by the rest of its labels."""
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    lines = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in lines if f'loader="{loader}"' in labels}


def mirror_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dpex-ray-metrics"]


def test_headlines_are_in_the_catalogue() -> None:
    assert set(HEADLINES) <= set(BY_NAME)
    assert not [name for name in HEADLINES if BY_NAME[name].kind not in ("counter", "gauge")]


def twelve_batches(name: str) -> None:
    with DpexDataLoader(Augmented(24), batch_size=2, num_workers=1, distribute_mode=True, name=name) as loader:
        assert len(list(loader)) == 12
        assert [thread.daemon for thread in mirror_threads()] == [True]
    assert not mirror_threads()
    assert mirror._written[name, ("dpex_batches_total",)] == 12


@pytest.mark.usefixtures("shared_ray")
def test_a_loader_on_the_cluster_hands_its_counts_to_ray() -> None:
    twelve_batches("on-ray")


@pytest.mark.long
def test_a_scrape_of_the_cluster_shows_a_loader_that_has_ended(exporter: str) -> None:
    twelve_batches("scraped")
    found = until(lambda: scraped(exporter, "ray_dpex_batches_total", "scraped"), 60.0)
    assert list(found.values()) == [12.0]
    states = scraped(exporter, "ray_dpex_consumer_seconds_total", "scraped")
    assert all('state="' in labels for labels in states)
    assert sum(states.values()) > 0
    assert scraped(exporter, "ray_dpex_workers_running", "scraped")


@pytest.mark.usefixtures("shared_ray")
def test_only_what_is_new_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, added = LoaderMetrics("a"), []

    class Metric:
        def inc(self, value: float, tags: dict[str, str]) -> None:
            assert value > 0, "Ray refuses that"
            added.append((value, tags))

        def set(self, value: float, tags: dict[str, str]) -> None:
            pass

    own = RayMirror()
    monkeypatch.setattr(own, "_metric", lambda name: Metric())
    loader = DpexDataLoader(Augmented(8), batch_size=2, num_workers=1)
    iterator = iter(loader)
    entry = ledger.watch(iterator._engine)
    own.write(ledger)
    assert [value for value, tags in added if not tags.keys() - {"loader"}] == []
    for _ in range(3):
        next(iterator)
    own.write(ledger)
    own.write(ledger)
    entry.end()
    own.write(ledger)
    assert [value for value, tags in added if tags == {"loader": "a"}] == [3.0, 6.0]  # batches, samples


@pytest.mark.usefixtures("shared_ray")
def test_when_ray_ends_nothing_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpex.telemetry.ray_metrics.is_ray_connected", lambda: False)
    own = RayMirror(every_s=0.01)
    token = own.join(LoaderMetrics("b"))
    turns = time.monotonic() + 0.1
    until(lambda: time.monotonic() > turns)
    assert own._thread is not None
    assert own._thread.is_alive()
    own.leave(token)
    own.leave(token)
    assert own._thread is None
    assert mirror._members == {}

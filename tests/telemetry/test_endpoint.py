"""The endpoint as Prometheus sees it: scraped over HTTP while a real loader trains."""

import gc
import json
import os
import pickle
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from certificates import make_certificate
from families import Augmented
from forks import in_a_child
from inspection import workers_of
from waiting import until

import dpex
from dpex import DpexDataLoader, MetricsConfig, TLSConfig
from dpex.errors import OptionError
from dpex.measure.causes import TIMED
from dpex.telemetry.catalog import BY_NAME, METRICS
from dpex.telemetry.exporter import exporter

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")

Scrape = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DPEX_METRICS_DIR", str(tmp_path / "sd"))
    monkeypatch.delenv("DPEX_METRICS_PORT", raising=False)
    yield
    gc.collect()
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("dpex-metrics")])
    assert exporter.port is None
    assert not list((tmp_path / "sd").glob("*"))


def text(port: int | None = None, context: ssl.SSLContext | None = None) -> str:
    scheme = "https" if context is not None else "http"
    url = f"{scheme}://localhost:{port or exporter.port}/metrics"
    with urllib.request.urlopen(url, timeout=60, context=context) as answer:
        return str(answer.read().decode())


def scrape(port: int | None = None) -> Scrape:
    found: Scrape = {}
    for line in text(port).splitlines():
        if not line.startswith("#"):
            match = LINE.fullmatch(line)
            assert match, line
            labels = frozenset(re.findall(r'(\w+)="([^"]*)"', match["labels"] or ""))
            found[match["name"], labels] = float(match["value"])
    return found


def value(found: Scrape, name: str, **labels: str) -> float:
    """The sum over all series that have these labels."""
    wanted = set(labels.items())
    values = [number for (series, has), number in found.items() if series == name and wanted <= has]
    assert values, f"no series {name} {labels}"
    return sum(values)


def announced(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text())[0] for path in sorted(directory.glob("*.json"))]


KINDS: dict[str, dict[str, Any]] = {
    "in-process": {"num_workers": 0},
    "logical workers": {"num_workers": 2},
    "shared queue": {"num_workers": 2, "seeding": "batch"},
    "tuned": {"num_workers": "auto"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_loop_is_scraped(kind: str) -> None:
    data = Augmented(200, 0.0005, extra=2000)
    with DpexDataLoader(data, batch_size=4, metrics_port=0, name="train", **KINDS[kind]) as loader:
        before: Scrape = {}
        for number, _ in enumerate(loader):
            if number % 10 == 9:
                now = scrape()
                assert value(now, "dpex_batches_total", loader="train") == number + 1
                assert value(now, "dpex_samples_total") == 4 * (number + 1)
                shrunk = {key for key in before if key[0].endswith("_total") and now[key] < before[key]}
                assert not shrunk
                before = now
        wait_s = value(before, "dpex_consumer_seconds_total", state="wait")
        assert value(before, "dpex_wait_seconds_total") == pytest.approx(wait_s)
        made = value(before, "dpex_worker_batch_seconds_count")
        assert 50 <= made <= 50 + 4 * 2
        assert value(before, "dpex_worker_seconds_total", stage="load") >= 0.0005 * 4 * 50
        assert value(before, "dpex_batch_wait_seconds_count") == 49
        after = scrape()
        assert value(after, "dpex_batches_total") == 50
        assert abs(value(after, "dpex_last_batch_timestamp_seconds") - time.time()) < 60


@pytest.mark.parametrize("kind", ["in-process", "shared queue"])
def test_counts_continue_over_epochs_and_restart_after_close(kind: str) -> None:
    loader = DpexDataLoader(Augmented(40), batch_size=4, metrics_port=0, **KINDS[kind])
    for epoch in range(3):
        assert len(list(loader)) == 10
        assert value(scrape(), "dpex_batches_total") == 10 * (epoch + 1)
    assert value(scrape(), "dpex_ready_batches") == 0
    loader.close()
    assert exporter.port is None
    iterator = iter(loader)
    next(iterator)
    assert value(scrape(), "dpex_batches_total") == 1
    loader.close()


def test_every_series_is_in_the_catalogue_with_its_labels() -> None:
    with DpexDataLoader(Augmented(8), batch_size=2, num_workers=1, metrics_port=0) as loader:
        list(loader)
        types = dict(re.findall(r"# TYPE (\w+) (\w+)", text()))
        found = scrape()
    assert set(types) <= set(BY_NAME)
    for name, kind in types.items():
        assert kind == {"info": "gauge"}.get(BY_NAME[name].kind, BY_NAME[name].kind)
    for series, labels in found:
        metric = BY_NAME[series] if series in BY_NAME else BY_NAME[re.sub(r"_(bucket|sum|count)$", "", series)]
        assert {name for name, _ in labels} - {"le"} == set(metric.label_names)
        allowed = {label.name: label.values for label in metric.labels if label.values}
        assert all(one in allowed[name] for name, one in labels if name in allowed)
    expected = {m.name for m in METRICS if m.group in ("consumer", "workers", "network")}
    expected -= {"dpex_device_feed_seconds_total", "dpex_gpu_stall_seconds_total"}  # of a loader with a device
    expected -= {"dpex_cache_memory_bytes", "dpex_cache_disk_bytes"}  # of a dataset with a cache
    expected -= {m.name for m in METRICS if any(label.values == ("remote",) for label in m.labels)}  # of a cluster
    assert expected <= set(types)
    assert all(value(found, "dpex_wait_seconds_total", cause=cause) >= 0 for cause in TIMED)


def test_what_a_cache_has_and_does_is_exported() -> None:
    dataset = dpex.cached(list(range(8)), memory="1MB", version=uuid.uuid4().hex)
    with DpexDataLoader(dataset, batch_size=2, num_workers=1, metrics_port=0) as loader:
        for _ in range(2):
            list(loader)
        found = scrape()
        until(lambda: cache_on_the_page()["hits"] == 8)
        state = cache_on_the_page()
    assert [value(found, f"dpex_cache_{what}_total", pool="local") for what in ("hits", "misses")] == [8, 8]
    assert value(found, "dpex_cache_memory_bytes") == state["memory_bytes"] > 0
    assert (state["misses"], state["disk_bytes"]) == (8, None)


def cache_on_the_page() -> dict[str, Any]:
    return dict(on_the_page()["cache"] or {"hits": 0})


def on_the_page() -> dict[str, Any]:
    with urllib.request.urlopen(f"http://localhost:{exporter.port}/api/state", timeout=60) as answer:
        (state,) = json.loads(answer.read())["loaders"]
    return dict(state)


def test_errors_of_the_dataset_and_deaths_are_counted() -> None:
    class Bad(Augmented):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 5:
                raise KeyError(index)
            return super().__getitem__(index)

    with DpexDataLoader(Bad(400, 0.002), batch_size=2, num_workers=2, metrics_port=0) as loader:
        iterator = iter(loader)
        with pytest.raises(KeyError):
            list(iterator)
        assert value(scrape(), "dpex_errors_total", kind="batch") == 1
        os.kill(workers_of(iterator)[0].pid, 9)
        with pytest.warns(RuntimeWarning, match="Training continues"):
            list(iterator)
        assert value(scrape(), "dpex_worker_restarts_total", pool="local") == 1


def test_two_loaders_share_an_endpoint(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        DpexDataLoader(Augmented(40), batch_size=2, num_workers=1, metrics_port=0, name="train") as train,
        DpexDataLoader(Augmented(40), batch_size=2, num_workers=0, metrics_port=1, name="validation") as validation,
    ):
        batches = iter(train)
        next(batches)
        port = exporter.port
        assert capsys.readouterr().err == f"dpex: the live page and the metrics are at {train.metrics_url}\n"
        list(validation)
        assert exporter.port == port
        assert "metrics: port 1 is not opened: the loaders of a process share one endpoint" in caplog.text
        found = scrape()
        assert value(found, "dpex_batches_total", loader="train") == 1
        assert value(found, "dpex_batches_total", loader="validation") == 20
        validation.close()
        assert {dict(labels).get("loader") for name, labels in scrape() if name == "dpex_batches_total"} == {"train"}


@pytest.mark.smoke
def test_it_ends_with_the_last_loader(tmp_path: Path) -> None:
    loaders = [DpexDataLoader([1, 2, 3], metrics_port=0) for _ in range(2)]
    for loader in loaders:
        list(loader)
    port = exporter.port
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "dpex-metrics"] == [True]
    assert [found["targets"] for found in announced(tmp_path / "sd")] == [[f"127.0.0.1:{port}"]]
    loaders.pop()
    gc.collect()
    assert exporter.port == port
    loaders.clear()
    del loader
    gc.collect()
    assert exporter.port is None
    assert announced(tmp_path / "sd") == []
    with pytest.raises(urllib.error.URLError):
        text(port)


def test_closing_twice_and_pickling() -> None:
    loader = DpexDataLoader([1, 2, 3], metrics_port=0, name="real")
    list(loader)
    (ledger,) = exporter.ledgers()
    assert ledger.case is not None
    assert str(ledger.case.diagnose()) == str(loader.diagnose())
    again = pickle.loads(pickle.dumps(loader))
    loader.close()
    loader.close()
    assert loader.metrics_url is None
    assert list(again)
    assert exporter.port is not None
    again.close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OptionError, match=r"nothing can listen on host='192\.0\.2\.1', port=0: .* Give an address of"):
        iter(DpexDataLoader([1, 2], metrics_config=MetricsConfig(host="192.0.2.1")))


def test_an_option_goes_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("DPEX_METRICS_PORT", str(port))
        config = MetricsConfig(directory=str(tmp_path / "given"), allowed_hosts=("train.example",))
        with DpexDataLoader([1, 2], metrics_port=0, metrics_config=config) as loader:
            list(loader)
            assert [found["targets"] for found in announced(tmp_path / "given")] == [[f"127.0.0.1:{exporter.port}"]]
            request = urllib.request.Request(f"{loader.metrics_url}metrics", headers={"Host": "train.example"})
            assert urllib.request.urlopen(request, timeout=60).status == 200
        assert "is taken" not in caplog.text
        with DpexDataLoader([1, 2], metrics_config=MetricsConfig()) as loader:  # which leaves the port open
            list(loader)
    assert f"metrics: port {port} is taken" in caplog.text


def test_the_environment_turns_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPEX_METRICS_PORT", "0")
    loader = DpexDataLoader([1, 2])
    list(loader)
    assert value(scrape(), "dpex_batches_total") == 2
    loader.close()
    monkeypatch.setenv("DPEX_METRICS_PORT", "many")
    with pytest.raises(OptionError, match="DPEX_METRICS_PORT='many': give a port"):
        iter(loader)


class NestedLoader(Augmented):
    """Loads with a loader of its own, inside a worker."""

    def __getitem__(self, index: int) -> torch.Tensor:
        inner = sum(batch.sum() for batch in DpexDataLoader(torch.ones(4), metrics_port=0))
        return torch.tensor([float(inner), float(exporter.port or 0)])


def test_workers_do_not_serve() -> None:
    with DpexDataLoader(NestedLoader(4), batch_size=2, num_workers=1, metrics_port=0) as loader:
        assert torch.cat(list(loader)).tolist() == [[4.0, 0.0]] * 4


def test_a_forked_child_does_not_serve_and_frees_the_port(tmp_path: Path) -> None:
    loader = DpexDataLoader([1, 2, 3], metrics_port=0)
    list(loader)

    def train() -> None:
        assert list(loader) == list(DpexDataLoader([1, 2, 3], metrics_port=0))
        assert (len(threading.enumerate()), exporter.port) == (1, None)
        loader.close()

    in_a_child(train)
    assert value(scrape(), "dpex_batches_total") == 3
    assert len(announced(tmp_path / "sd")) == 1
    loader.close()


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    for name in ("server", "client"):
        make_certificate(tmp_path / f"{name}.key", tmp_path / f"{name}.pem")
    return tmp_path


def test_tls_and_only_clients_with_a_certificate(certificates: Path) -> None:
    own = {"certfile": str(certificates / "server.pem"), "keyfile": str(certificates / "server.key")}
    context = ssl.create_default_context(cafile=own["certfile"])
    with DpexDataLoader([1, 2], metrics_config=MetricsConfig(tls=TLSConfig(**own))) as loader:
        list(loader)
        assert "dpex_batches_total" in text(context=context)
        assert announced(certificates / "sd")[0]["labels"]["__scheme__"] == "https"
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            text()
    authority = str(certificates / "client.pem")
    with DpexDataLoader([1, 2], metrics_config=MetricsConfig(tls=TLSConfig(**own, client_cafile=authority))) as loader:
        list(loader)
        with pytest.raises((urllib.error.URLError, OSError)):
            text(context=context)
        context.load_cert_chain(authority, str(certificates / "client.key"))
        assert "dpex_batches_total" in text(context=context)


def test_a_certificate_that_is_not_there_is_named() -> None:
    files = TLSConfig(certfile="/nowhere.pem", keyfile="/nowhere.key")
    loader = DpexDataLoader([1, 2], metrics_config=MetricsConfig(tls=files))
    with pytest.raises(OptionError, match=r"TLSConfig\(certfile='/nowhere\.pem'.*No such file.* Give PEM files"):
        iter(loader)


def test_off_costs_nothing() -> None:
    """No thread, no import, no ledger, no detail; in a process of its own."""
    code = (
        "import sys, threading\n"
        "from dpex import DpexDataLoader\n"
        "from tests.inspection import tally_of\n"
        "loader = DpexDataLoader([1, 2, 3], num_workers=1)\n"
        "iterator = iter(loader)\n"
        "next(iterator)\n"
        "assert [t.name for t in threading.enumerate()] == ['MainThread'], threading.enumerate()\n"
        "assert not {'prometheus_client', 'dpex.telemetry.exporter'} & set(sys.modules)\n"
        "assert not tally_of(iterator).detailed\n"
        "assert sum(tally_of(iterator).steps) == 0\n"
    )
    environment = {name: one for name, one in os.environ.items() if not name.startswith("DPEX_")}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment, timeout=60)

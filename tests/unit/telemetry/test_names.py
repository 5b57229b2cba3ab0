"""Loaders with odd names: nothing that is exported, served, shown, announced or recorded is broken by one."""

import importlib
import json
import urllib.request
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from urllib.parse import urlencode

import pytest
from rich.console import Console
from waiting import until

from dpex import DpexDataLoader
from dpex.autotune.runtime.trace import TraceFile, line
from dpex.cli.top import ReportRequests, fetching, report_screen
from dpex.schedule.names import encodable
from dpex.telemetry.discovery import Announcement, identity, targets
from dpex.telemetry.exporter import exporter

NAMES = [
    "run-\udcff",
    '<img src=x onerror=alert(1)>"}\n# HELP x\nfoo{a="b"} 1 \\ \'x',
    "\r\n\0\x1b[2J[bold]\u202e{}",
    "名前 🚂 \u2028",
]


def test_names_stay_apart_and_readable() -> None:
    assert encodable("run-\udcff") == r"run-\udcff"
    assert [encodable(name) for name in NAMES[1:]] == NAMES[1:]


class Odd(list[int]):
    """A dataset whose class has an odd name."""


Odd.__name__ = NAMES[1]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    loaders = [DpexDataLoader(Odd(range(8)), batch_size=2, metrics_port=0, name=name) for name in NAMES]
    for loader in loaders:
        assert len(list(loader)) == 4
    served = f"http://127.0.0.1:{exporter.port}"
    until(lambda: len(json.loads(fetched(f"{served}/api/state"))["loaders"]) == len(NAMES))
    yield served
    for loader in loaders:
        loader.close()


def fetched(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize(
    ("accept", "parser"), [("text/plain", "parser"), ("application/openmetrics-text", "openmetrics.parser")]
)
def test_both_formats_of_metrics(url: str, accept: str, parser: str) -> None:
    parse = importlib.import_module(f"prometheus_client.{parser}").text_string_to_metric_families
    families = {family.name: family for family in parse(fetched(f"{url}/metrics", Accept=accept))}
    batches = {sample.labels["loader"]: sample.value for sample in families["dpex_batches"].samples}
    assert batches == {encodable(name): 4.0 for name in NAMES}
    assert {sample.labels["dataset"] for sample in families["dpex_loader_info"].samples} == {NAMES[1]}


def test_state_and_diagnoses(url: str) -> None:
    names = [encodable(name) for name in NAMES]
    assert [loader["name"] for loader in json.loads(fetched(f"{url}/api/state"))["loaders"]] == names
    assert [told["name"] for told in json.loads(fetched(f"{url}/diagnosis.json"))["loaders"]] == names
    for name in names:
        query = urlencode({"loader": name, "stretch": "recent"})
        (told,) = json.loads(fetched(f"{url}/diagnosis.json?{query}"))["loaders"]
        assert told["name"] == name


def test_a_diagnosis_can_be_printed_and_written(tmp_path: Path) -> None:
    for name in NAMES:
        loader = DpexDataLoader(Odd(range(8)), name=name)
        list(loader)
        found = loader.diagnose()
        str(found).encode()
        json.dumps(found.to_dict(), ensure_ascii=False).encode()
        assert "<img" not in found.write_html(tmp_path / "page.html").read_text()


def test_the_terminal(url: str, tmp_path: Path) -> None:
    out = StringIO()
    Console(file=out, width=200).print(
        report_screen(ReportRequests(fetching(None)).reports([url], [tmp_path]), "/place")
    )
    text = out.getvalue()
    text.encode()
    assert r"run-\udcff" in text
    assert "\x1b" not in text
    assert "<img src=x onerror=alert(1)>" in text


@pytest.mark.parametrize("name", NAMES)
def test_an_announcement(tmp_path: Path, name: str) -> None:
    labels = identity({"DPEX_RUN_ID": name, "RANK": name})
    Announcement(tmp_path, "127.0.0.1:9", labels)
    (target,) = targets(tmp_path)
    assert (target.labels["run_id"], target.labels["rank"]) == (encodable(name), "0")


def test_a_trace(tmp_path: Path) -> None:
    TraceFile(tmp_path / "odd-\udcff-\n.jsonl").write({"note": NAMES})
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["note"] == NAMES
    assert line({"note": NAMES}).isascii()

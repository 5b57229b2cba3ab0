"""A real Prometheus with the configuration, rules and queries of `dashboards/`, beside real runs with planted waiting.

Two ranks wait for 30 % and 10 % of their time, each with one worker; a run of its own is tuned and has a stand-in for a
GPU that misses a quarter of the time; another one is announced but lives no more. Scrapes come every second, and
Grafana's interval, the recording rules' minute and the alerts' patience are shortened to match.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from panels import FOLDER, RULES, dashboard, filled, panels
from waiting import until
from waiting_run import GPU_STALL

ROOT = Path(__file__).parents[2]
WINDOW_S = 10
POINTS = 0.05
"""Difference of the shares that a rank and Prometheus measure: on a busy machine a wait of half a second may lie in one
of the two windows only. The planted shares differ by more than twice as much."""
STEP_S = {"0": 0.14, "1": 0.195}
LOAD_S = 0.2
SETTLED_S = 2.0
"""Scrapes that began so long ago have ended, or failed: what is known about that moment does not change any more."""
DEAD = "dpex-elsewhere-1-1.json"
"""As a process of another machine left it."""

Series = dict[str, Any]


needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is needed")
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")


def promtool(*arguments: str, given: str = "") -> str:
    done = subprocess.run(
        ["promtool", *arguments], input=given, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_promtool
def test_rules_are_valid_and_do_what_they_should() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))
    assert "SUCCESS" in promtool("test", "rules", str(RULES.parent / "tests" / "dpex.yml"))


@needs_promtool
def test_the_configuration_is_valid(tmp_path: Path) -> None:
    for name in ("prometheus.yml", "rules"):
        (tmp_path / name).symlink_to(FOLDER / name)
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / DEAD).write_text("[]")
    said = promtool("check", "config", "--lint=all", "--lint-fatal", str(tmp_path / "prometheus.yml"))
    assert "prometheus.yml is valid" in said
    assert "WARNING" not in said


@dataclass(frozen=True, kw_only=True)
class World:
    """``at``: the moment all queries are about. ``logs``: of the training processes, by rank."""

    url: str
    folder: Path
    logs: dict[str, Path]
    at: float

    def query(self, expr: str, **chosen: str) -> list[Series]:
        """Series at that moment; the variables that are not chosen stand for everything."""
        found: list[Series] = ask(self.url, "query", query=filled(expr, f"{WINDOW_S}s", **chosen), time=str(self.at))[
            "result"
        ]
        return found

    def panel(self, title: str, **chosen: str) -> list[Series]:
        """What a panel's first query shows."""
        (expr,) = [panel["targets"][0]["expr"] for panel in panels() if panel["title"] == title]
        return self.query(expr, **chosen)

    def waited(self, rank: str) -> float:
        """The share of time that a rank measured itself, in the window before that moment."""
        rows = [tuple(map(float, line.split())) for line in self.logs[rank].read_text().splitlines()]
        window = [row for row in rows if self.at - WINDOW_S <= row[0] <= self.at]
        (_, waited, took), (_, waited_at_last, took_at_last) = window[0], window[-1]
        return (waited_at_last - waited) / (took_at_last - took)


def ask(url: str, what: str, **parameters: str) -> Any:
    with urllib.request.urlopen(f"{url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}", timeout=60) as answer:
        content = json.load(answer)
    assert content["status"] == "success"
    return content["data"]


def number(series: Series) -> float:
    return float(series["value"][1])


@contextmanager
def running(command: list[str], log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A program that ends with this; SIGTERM unless the end of its standard input is enough."""
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=errors, stderr=errors, **options)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        if command[0] != sys.executable:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(60.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def configured(folder: Path) -> None:
    """Prometheus's files of `dashboards/`, with seconds for minutes."""
    config = (FOLDER / "prometheus.yml").read_text()
    (folder / "prometheus.yml").write_text(re.sub(r": (4|5|10)s\b", ": 1s", config))
    (folder / "rules").mkdir()
    rules = re.sub(r"for: \d+m", "for: 2s", RULES.read_text().replace("[1m]", f"[{WINDOW_S}s]"))
    (folder / "rules" / "dpex.yml").write_text(rules)
    (folder / "targets").mkdir(mode=0o700)
    dead = {"targets": [f"127.0.0.1:{free_port()}"], "labels": {"run_id": "gone", "rank": "0", "node": "elsewhere"}}
    (folder / "targets" / DEAD).write_text(json.dumps([dead]))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def trainer(folder: Path, kind: str, step_s: float, log: Path, **variables: str) -> Any:
    environment = {**os.environ, "DPEX_METRICS_DIR": str(folder / "targets"), "PYTHONPATH": str(ROOT), **variables}
    program = str(Path(__file__).with_name("waiting_run.py"))
    command = [sys.executable, program, kind, str(LOAD_S), str(step_s), str(log)]
    return running(command, log.with_suffix(".err"), env=environment)


def prometheus(folder: Path, port: int) -> Any:
    options = [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", *options]
    return running(command, folder / "prometheus.err")


def is_all_there(url: str, at: float) -> bool:
    """A window full of every run, and a decision of the tuner that was judged; no run's latest scrape failed."""
    full = f"count_over_time(dpex_batches_total[{WINDOW_S + 2}s]) >= {WINDOW_S + 1} and dpex_batches_total"
    try:
        seen = ask(url, "query", query=full, time=str(at))
        judged = ask(url, "query", query="dpex_tuner_predicted_wait_ratio", time=str(at))
    except OSError:
        return False
    return len(seen["result"]) == 3 and len(judged["result"]) == 1


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("prometheus")
    configured(folder)
    logs = {rank: folder / f"rank{rank}.log" for rank in STEP_S}
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as stack:
        stack.enter_context(prometheus(folder, port))
        for rank, log in logs.items():
            stack.enter_context(
                trainer(folder, "fixed", STEP_S[rank], log, RANK=rank, WORLD_SIZE="2", DPEX_RUN_ID="pair")
            )
        stack.enter_context(trainer(folder, "tuned", 0.04, folder / "tuned.log", DPEX_RUN_ID="tuned"))
        at = until(
            lambda: is_all_there(url, at := time.time() - SETTLED_S) and at,
            120.0,
            pause_s=0.5,
            told=lambda: [path.read_text() for path in folder.glob("*.err")],
        )
        yield World(url=url, folder=folder, logs=logs, at=at)
    assert [path.name for path in (folder / "targets").iterdir()] == [DEAD]


NEEDS_MORE = {
    "Bytes of the cache",
    "Feeding the device",
    "What the network carries while sending",
    "Lost on the network",
    "Round trip to remote workers",
}
"""Panels of series that only a loader with an accelerator or a cache has, or one with workers on another machine."""


@needs_prometheus
@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_every_query_of_a_panel_returns_series(world: World, panel: Series) -> None:
    for target in panel["targets"]:
        found = world.query(target["expr"])
        assert found or panel["title"] in NEEDS_MORE, target["expr"]
        placeholders = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert all(placeholders <= set(series["metric"]) for series in found)


@needs_prometheus
def test_the_headline_is_the_share_of_the_rank_that_waits_most(world: World) -> None:
    (found,) = world.panel("Starving most (GPU stall, else wait)", run="pair")
    assert found["metric"] == {"rank": "0", "run_id": "pair"}
    assert number(found) == pytest.approx(world.waited("0"), abs=POINTS)
    assert 0.2 < world.waited("0") < 0.4
    for title in ("Which rank starves, since when", "Share of time starved by rank (GPU stall, else wait)"):
        shares = {series["metric"]["rank"]: number(series) for series in world.panel(title, run="pair")}
        assert shares == {rank: pytest.approx(world.waited(rank), abs=POINTS) for rank in STEP_S}
        assert shares["0"] > shares["1"] + 0.1
    (wait,) = world.panel("Wait, all ranks", run="pair", rank="1")
    assert number(wait) == pytest.approx(world.waited("1"), abs=POINTS)


@needs_prometheus
def test_gpu_stall_is_the_headline_where_it_is_measured(world: World) -> None:
    (found,) = world.panel("Starving most (GPU stall, else wait)", run="tuned")
    assert number(found) == pytest.approx(GPU_STALL, abs=POINTS)
    (all_ranks,) = world.panel("GPU stall, all ranks")
    assert number(all_ranks) == pytest.approx(GPU_STALL, abs=POINTS)
    assert world.panel("GPU stall, all ranks", run="pair") == []


@needs_prometheus
def test_variables_offer_what_there_is(world: World) -> None:
    offered = {}
    for variable in dashboard()["templating"]["list"][1:]:
        query = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
        assert query
        offered[variable["name"]] = ask(world.url, f"label/{query[2]}/values", **{"match[]": filled(query[1])})
    assert offered["job"] == ["dpex"]
    assert offered["run"] == ["pair", "tuned"]
    assert offered["rank"] == ["0", "1"]
    assert offered["loader"] == ["train"]
    assert len(offered["instance"]) == 3


@needs_prometheus
def test_the_alert_fires_for_who_starves_and_nobody_else(world: World) -> None:
    found = world.query('ALERTS{alertname="DpexTrainingStarving",alertstate="firing"}')
    assert {(s["metric"]["run_id"], s["metric"]["rank"]) for s in found} == {("pair", "0"), ("tuned", "0")}
    assert all(s["metric"]["node"] == socket.gethostname() for s in found)
    (since,) = world.panel("Starving since", run="pair")
    assert since["metric"]["rank"] == "0"
    assert 0 < world.at - number(since) / 1000 < 120


@needs_prometheus
def test_a_process_that_is_no_more_is_missed(world: World) -> None:
    firing = world.query('ALERTS{alertname="DpexTargetDown",alertstate="firing"}')
    assert [s["metric"]["run_id"] for s in firing] == ["gone"]
    up = {(s["metric"]["run_id"], s["metric"]["rank"]): number(s) for s in world.panel("Processes that answer")}
    assert up == {("gone", "0"): 0, ("pair", "0"): 1, ("pair", "1"): 1, ("tuned", "0"): 1}


@needs_prometheus
def test_rules_are_evaluated_without_an_error(world: World) -> None:
    groups = ask(world.url, "rules")["groups"]
    assert [rule["name"] for group in groups for rule in group["rules"] if rule["health"] != "ok"] == []
    assert sum(len(group["rules"]) for group in groups) == 16


@needs_prometheus
@needs_promtool
def test_promtool_finds_nothing_to_say_about_the_metrics(world: World) -> None:
    for series in world.query("dpex_build_info"):
        with urllib.request.urlopen(f"http://{series['metric']['instance']}/metrics", timeout=60) as answer:
            assert promtool("check", "metrics", given=answer.read().decode()) == ""

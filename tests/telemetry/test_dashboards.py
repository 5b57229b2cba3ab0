"""The dashboard is what the script makes, the rules of Grafana's linter hold, no metric is missing.

The linter's rules (grafana/dashboard-linter) are written again here, as the linter itself is not at hand everywhere.
"""

import json
import re
from pathlib import Path

import promql_parser as promql
import pytest
import yaml
from panels import FOLDER, RULES, Json, dashboard, filled, panels, queries, selectors, walk

from dpex.system.directories import own_directories
from dpex.telemetry.catalog import BY_NAME, METRICS

PROMETHEUS_OWN = {"up", "ALERTS", "ALERTS_FOR_STATE"}
NOT_SHOWN: dict[str, str] = {}
"""Metrics of the catalogue that no panel shows, and why."""
EVERY_QUERY = pytest.mark.parametrize(("title", "expr"), queries())


def rules() -> list[Json]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def metric_of(series: str) -> str:
    return series if series in BY_NAME else re.sub(r"_(bucket|sum|count)$", "", series)


def named_in(expr: str) -> set[str]:
    return {metric_of(selector.name) for selector, _ in selectors(expr)}


def test_the_file_is_what_the_script_makes() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk needs Python 3.11")
    from dashboards.contents import dashboard as made

    assert (FOLDER / "dpex.json").read_text() == made(), "python -m dashboards"


@EVERY_QUERY
def test_every_selector_is_bound_to_the_variables(title: str, expr: str) -> None:
    chosen = {name: f"<{name}>" for name in ("job", "instance", "run", "rank", "loader")}
    nodes = walk(promql.parse(filled(expr, **chosen)))
    found = [node for node, _ in nodes if isinstance(node, promql.VectorSelector)]
    assert found
    for selector in found:
        matchers = {(m.name, m.value) for m in selector.matchers.matchers if m.op == promql.MatchOp.Re}
        wanted = {("job", "<job>"), ("instance", "<instance>"), ("run_id", "<run>"), ("rank", "<rank>")}
        metric = BY_NAME.get(metric_of(selector.name))
        has_loader = metric is not None and "loader" in metric.label_names
        assert wanted | ({("loader", "<loader>")} if has_loader else set()) <= matchers, title


@EVERY_QUERY
def test_counters_are_seen_as_rates_over_grafanas_interval(title: str, expr: str) -> None:
    for selector, above in selectors(expr):
        accumulates = selector.name.endswith(("_total", "_bucket", "_sum", "_count"))
        if accumulates:
            assert isinstance(above[-1], promql.MatrixSelector), title
            assert above[-2].func.name in ("rate", "irate", "increase"), title
    assert set(re.findall(r"\[([^\]]+)\]", expr)) <= {"$__rate_interval"}


# -- metrics: none that does not exist, none that nobody sees ----------------------------------------------------------


@EVERY_QUERY
def test_labels_that_a_query_names_exist(title: str, expr: str) -> None:
    """In matchers: those of the metric, or of its target."""
    for selector, _ in selectors(expr):
        if selector.name in PROMETHEUS_OWN:
            continue
        metric = BY_NAME[metric_of(selector.name)]
        names = {m.name: m.value for m in selector.matchers.matchers}
        assert set(names) <= {*metric.label_names, "job", "instance", "run_id", "rank"}, title
        for label in metric.labels:
            if label.values and label.name in names:
                assert names[label.name] in label.values, title


def test_every_metric_is_on_a_panel() -> None:
    shown = {name for _, expr in queries() for name in named_in(expr)}
    assert {metric.name for metric in METRICS} - shown == set(NOT_SHOWN)


def test_rules_name_what_exists() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        assert named_in(rule["expr"]) <= {*BY_NAME, *recorded, "up"}


def test_an_alert_says_what_is_wrong_and_what_to_do() -> None:
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    assert set(alerts) == {f"Dpex{name}" for name in _ALERTS}
    for alert in alerts.values():
        assert set(alert["annotations"]) == {"summary", "description", "runbook"}
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert "{{ $labels.rank }}" in alert["annotations"]["summary"]


_ALERTS = ("TrainingStarving", "RankStarvesJob", "TrainingStalled", "WorkersDying", "WorkersNotPlaced", "TargetDown")


def test_alerts_that_the_dashboard_asks_for_exist() -> None:
    asked = set(re.findall(r'alertname="(\w+)"', json.dumps([expr for _, expr in queries()]).replace("\\", "")))
    assert asked == {"DpexTrainingStarving"}


def test_panels_that_runbooks_name_exist() -> None:
    titles = {panel["title"] for panel in (*dashboard()["panels"], *panels())}
    for rule in rules():
        text = rule.get("annotations", {}).get("runbook", "")
        assert set(re.findall(r'"([^"]+)"', text)) <= titles


def loaded(name: str) -> Json:
    found: Json = yaml.safe_load((FOLDER / name).read_text())
    return found


def test_compose_mounts_what_is_there_where_it_is_looked_for(tmp_path: Path) -> None:
    services = loaded("docker-compose.yml")["services"]
    mounted: dict[str, str] = {}
    for service in services.values():
        assert service["network_mode"] == "host", "metrics are served on loopback"
        assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+", service["image"]), "pinned"
        for volume in service["volumes"]:
            source, target = volume.split(":")[:2] if isinstance(volume, str) else (volume["source"], volume["target"])
            mounted[target] = source
            if source.startswith("./"):
                assert (FOLDER / source).exists()
    assert mounted["/etc/prometheus/rules"] == "./rules"
    assert mounted["/etc/prometheus/targets"] == "${DPEX_METRICS_DIR:-${XDG_RUNTIME_DIR}/dpex}"
    assert own_directories({"XDG_RUNTIME_DIR": str(tmp_path)})[0] == tmp_path / "dpex"
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert mounted[home] == "./dpex.json"
    provider = loaded("provisioning/dashboards/dpex.yml")["providers"][0]
    assert home.startswith(provider["options"]["path"] + "/")

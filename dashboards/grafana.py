"""Panels as values, and the JSON that Grafana 10 to 13 load (the classic schema, which later versions convert).

Panels are laid out by their order and size, from left to right, 24 columns wide. Ids are numbers in that order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 39
COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

Kind = Literal["timeseries", "stat", "state-timeline", "heatmap", "table"]
Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Query:
    """One PromQL expression. ``legend`` names its series; ``instant``: only its value at the end of the time range."""

    expr: str
    legend: str = "__auto"
    instant: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel. ``unit`` is one of Grafana's; ``steps`` are colours from a value on, the first one from the bottom.

    ``none`` is shown where there is no data; ``dashed`` are series drawn so, by a regular expression of their names;
    ``hidden`` are columns of a table that are not shown.
    """

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    lowest: float | None = 0
    highest: float | None = None
    steps: tuple[tuple[float | None, str], ...] = ()
    stacked: bool = False
    bars: bool = False
    none: str = ""
    dashed: str = ""
    text: Literal["value", "value_and_name", "name"] = "value"
    hidden: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """A headline, and the panels below it."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A label whose values can be chosen; ``everything`` is what "All" stands for."""

    name: str
    label: str
    query: str
    everything: str = ".*"


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """Marks on all panels, wherever ``expr`` has a value."""

    name: str
    expr: str
    title: str
    text: str
    colour: str


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """All of it. ``uid`` is its address and never changes."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...]
    annotations: tuple[Annotation, ...]
    tags: tuple[str, ...] = field(default=())


def as_text(dashboard: Dashboard) -> str:
    """The file."""
    return json.dumps(as_json(dashboard), indent=2, ensure_ascii=False) + "\n"


def as_json(dashboard: Dashboard) -> Json:
    """Grafana's classic schema."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": list(dashboard.tags),
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "fiscalYearStartMonth": 0,
        "liveNow": False,
        "links": [],
        "annotations": {"list": [_BUILT_IN, *map(_annotation, dashboard.annotations)]},
        "templating": {"list": [_SOURCE_VARIABLE, *map(_variable, dashboard.variables)]},
        "panels": list(_laid_out(dashboard.rows)),
    }


# -- around the panels -------------------------------------------------------------------------------------------------

_BUILT_IN = {
    "builtIn": 1,
    "datasource": {"type": "grafana", "uid": "-- Grafana --"},
    "enable": True,
    "hide": True,
    "iconColor": "rgba(0, 211, 255, 1)",
    "name": "Annotations & Alerts",
    "type": "dashboard",
}
_SOURCE_VARIABLE = {
    "name": "datasource",
    "label": "Data source",
    "type": "datasource",
    "query": "prometheus",
    "current": {},
    "hide": 0,
    "includeAll": False,
    "multi": False,
    "options": [],
    "refresh": 1,
    "regex": "",
    "skipUrlSync": False,
}


def _variable(variable: Variable) -> Json:
    return {
        "name": variable.name,
        "label": variable.label,
        "type": "query",
        "datasource": SOURCE,
        "definition": variable.query,
        "query": {"qryType": 1, "query": variable.query, "refId": f"variable-{variable.name}"},
        "allValue": variable.everything,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
        "includeAll": True,
        "multi": True,
        "options": [],
        "refresh": 2,
        "regex": "",
        "skipUrlSync": False,
        "sort": 3,
    }


def _annotation(annotation: Annotation) -> Json:
    return {
        "name": annotation.name,
        "datasource": SOURCE,
        "enable": True,
        "hide": False,
        "iconColor": annotation.colour,
        "expr": annotation.expr,
        "step": "15s",
        "titleFormat": annotation.title,
        "textFormat": annotation.text,
    }


def _laid_out(rows: tuple[Row, ...]) -> Iterator[Json]:
    number, top = 0, 0
    for row in rows:
        number += 1
        yield _row(row, number, top)
        top, left, tallest = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                top, left, tallest = top + tallest, 0, 0
            number += 1
            yield _panel(panel, number, {"h": panel.height, "w": panel.width, "x": left, "y": top})
            left, tallest = left + panel.width, max(tallest, panel.height)
        top += tallest


def _row(row: Row, number: int, top: int) -> Json:
    place = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
    return {"id": number, "type": "row", "title": row.title, "collapsed": False, "gridPos": place, "panels": []}


# -- a panel -----------------------------------------------------------------------------------------------------------


def _panel(panel: Panel, number: int, place: Json) -> Json:
    made: Json = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": place,
        "targets": [_target(panel, query, chr(ord("A") + n)) for n, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": _overrides(panel)},
        "options": _options(panel),
    }
    if panel.kind == "table":
        hidden = dict.fromkeys(("Time", "Value", "__name__", *panel.hidden), True)
        options = {"excludeByName": hidden, "indexByName": {}, "renameByName": {}}
        made["transformations"] = [{"id": "organize", "options": options}]
    return made


def _target(panel: Panel, query: Query, letter: str) -> Json:
    formats = {"heatmap": "heatmap", "table": "table"}
    return {
        "refId": letter,
        "datasource": SOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "format": formats.get(panel.kind, "time_series"),
        "instant": query.instant,
        "range": not query.instant,
        "legendFormat": query.legend,
    }


def _defaults(panel: Panel) -> Json:
    made: Json = {"unit": panel.unit, "custom": _custom(panel), "mappings": []}
    if panel.kind == "heatmap":
        return {"custom": _custom(panel)}
    for key, value in (("min", panel.lowest), ("max", panel.highest), ("noValue", panel.none or None)):
        if value is not None and panel.kind != "table":
            made[key] = value
    steps = panel.steps or ((None, "text" if panel.kind == "stat" else "green"),)
    made["thresholds"] = {"mode": "absolute", "steps": [{"value": value, "color": colour} for value, colour in steps]}
    made["color"] = {"mode": "thresholds" if panel.kind in ("stat", "state-timeline") else "palette-classic"}
    if not made["custom"]:
        del made["custom"]
    return made


_HIDDEN_FROM = {"legend": False, "tooltip": False, "viz": False}


def _custom(panel: Panel) -> Json:
    if panel.kind == "timeseries":
        return {
            "drawStyle": "bars" if panel.bars else "line",
            "fillOpacity": 60 if panel.stacked or panel.bars else 8,
            "lineWidth": 1,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"group": "A", "mode": "normal" if panel.stacked else "none"},
            "thresholdsStyle": {"mode": "dashed" if panel.steps else "off"},
        }
    if panel.kind == "state-timeline":
        return {"fillOpacity": 80, "lineWidth": 0}
    if panel.kind == "heatmap":
        return {"hideFrom": _HIDDEN_FROM, "scaleDistribution": {"type": "linear"}}
    return {}


def _overrides(panel: Panel) -> list[Json]:
    if not panel.dashed:
        return []
    properties = [
        {"id": "custom.lineStyle", "value": {"dash": [8, 8], "fill": "dash"}},
        {"id": "custom.fillOpacity", "value": 0},
    ]
    return [{"matcher": {"id": "byRegexp", "options": panel.dashed}, "properties": properties}]


def _options(panel: Panel) -> Json:
    return {**_OPTIONS[panel.kind], **({"textMode": panel.text} if panel.kind == "stat" else {})} | (
        {"yAxis": {"axisPlacement": "left", "reverse": False, "unit": panel.unit}} if panel.kind == "heatmap" else {}
    )


_OPTIONS: Mapping[Kind, Json] = {
    "timeseries": {
        "legend": {"calcs": ["lastNotNull", "mean"], "displayMode": "table", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    },
    "state-timeline": {
        "alignValue": "left",
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "mergeValues": True,
        "rowHeight": 0.9,
        "showValue": "never",
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "heatmap": {
        "calculate": False,
        "cellGap": 1,
        "color": {
            "exponent": 0.5,
            "fill": "dark-orange",
            "mode": "scheme",
            "reverse": False,
            "scale": "exponential",
            "scheme": "Oranges",
            "steps": 64,
        },
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "tooltip": {"mode": "single", "showColorScale": False, "yHistogram": False},
    },
    "table": {"cellHeight": "sm", "showHeader": True},
}

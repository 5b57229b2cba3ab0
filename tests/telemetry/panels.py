"""The committed dashboard as tests read it: its panels, and their queries as Grafana would send them."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser as promql

FOLDER = Path(__file__).parents[2] / "dashboards"
RULES = FOLDER / "rules" / "dpex.yml"

Json = dict[str, Any]


@cache
def dashboard() -> Json:
    found: Json = json.loads((FOLDER / "dpex.json").read_text())
    return found


def panels() -> list[Json]:
    """Without the rows' headlines, and with what is below those that are folded."""
    listed = [one for panel in dashboard()["panels"] for one in (panel, *(panel.get("panels") or ()))]
    return [panel for panel in listed if panel["type"] != "row"]


def queries() -> list[tuple[str, str]]:
    """The panel's title and the query's expression."""
    return [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]


def filled(expr: str, interval: str = "10s", **chosen: str) -> str:
    """The expression as Grafana sends it; variables that are not chosen stand for everything."""
    expr = expr.replace("$__rate_interval", interval)
    return re.sub(r"\$(\w+)", lambda found: chosen.get(found[1], ".+"), expr)


def walk(node: Any, parents: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Every node of an expression, with those above it."""
    yield node, parents
    below = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "vector_selector", "param")]
    for child in (*below, *(getattr(node, "args", None) or ())):
        if child is not None:
            yield from walk(child, (*parents, node))


def selectors(expr: str) -> list[tuple[Any, tuple[Any, ...]]]:
    """Its vector selectors, with what is above each."""
    return [found for found in walk(promql.parse(filled(expr))) if isinstance(found[0], promql.VectorSelector)]

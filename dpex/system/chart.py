"""Charts over time for saved pages and notebooks, drawn by uPlot in the reader's browser.

The HTML holds the data, uPlot and its style, so that it loads nothing. Where scripts do not run, as in a notebook that
is not trusted, the chart's text is shown in its place. All text is escaped.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from html import escape
from importlib.resources import files

_TOUCH = 0.003
"""Stretches that are less than this share of the time apart are drawn without a gap."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A name, a colour, and one value per stretch of time."""

    name: str
    colour: str
    values: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Series over one scale, which starts at 0 and reaches ``least_top`` at least; shares are shown as percentages."""

    title: str
    series: Sequence[Series]
    least_top: float = 1.0
    is_share: bool = False
    height: int = 170


@dataclass(frozen=True, kw_only=True)
class Event:
    """A numbered line across all panels."""

    at_s: float
    number: int


def chart(
    stretches: Sequence[tuple[float, float]], panels: Sequence[Panel], events: Sequence[Event] = (), *, label: str
) -> str:
    """Return the HTML of panels below each other, over the same time.

    Args:
        stretches: Start and end in seconds of each stretch of time that has values.
        label: The content of the chart in words.

    Returns:
        The HTML, or "" if there are no stretches.
    """
    if not stretches:
        return ""
    times, places = _steps(stretches)
    content = {
        "times": times,
        "panels": [
            asdict(panel) | {"series": [asdict(one) | {"values": _at(one.values, places)} for one in panel.series]}
            for panel in panels
        ],
        "events": [asdict(event) for event in events],
    }
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    name = hashlib.sha256(data.encode()).hexdigest()[:12]
    return (
        f"<style>{_static('uPlot.min.css')}{_STYLE}</style>\n"
        f'<div class="dpex-chart" data-chart="{name}" role="img" aria-label="{escape(label)}">{escape(label)}</div>\n'
        f"<script>(() => {{\n{_static('uPlot.iife.min.js')}\n{_static('saved.js')}\n"
        f'drawAll("{name}", {data});\n}})();</script>'
    )


def _steps(stretches: Sequence[tuple[float, float]]) -> tuple[list[float], list[int | None]]:
    """Return the times at which values change, and which value holds from each on; None: none."""
    gap_s = _TOUCH * (stretches[-1][1] - stretches[0][0])
    times: list[float] = []
    places: list[int | None] = []
    for place, (start_s, end_s) in enumerate(stretches):
        times.append(round(start_s, 3))
        places.append(place)
        following = stretches[place + 1][0] if place + 1 < len(stretches) else math.inf
        if following - end_s > gap_s:
            times += [round(end_s, 3), round(end_s + gap_s / 2, 3)]
            places += [place, None]
    return times[:-1], places[:-1]


def _at(values: Sequence[float], places: Sequence[int | None]) -> list[float | None]:
    return [None if place is None else round(values[place], 4) for place in places]


@cache
def _static(name: str) -> str:
    return (files("dpex") / "telemetry" / "static" / name).read_text(encoding="utf-8")


_STYLE = """
.dpex-chart { max-width: 62rem; } .dpex-chart h3 { font: 600 13px system-ui, sans-serif; margin: .9rem 0 0; }
.dpex-chart .uplot { font-family: system-ui, sans-serif; }
.dpex-chart .u-legend { font-size: 12px; text-align: left; background: none; }
.dpex-chart .u-legend th, .dpex-chart .u-legend td { background: none; border: 0; padding: 0 .3rem 0 0; }
"""

"""Charts over time as SVG that inherits the page's colours, for notebooks and pages. PURE; all text is escaped.

A chart has panels, one above the other, over the same seconds. Each series is drawn in steps: a value holds for the
stretch that it was measured in, and where nothing was measured nothing is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 920
"""Of a chart, in its own units; it is scaled to the space that there is."""
_LEFT, _RIGHT, _TITLE, _FOOT = 52, 12, 34, 26
_TICKS = 5
"""Steps on an axis, about."""
_NICE = (1.0, 2.0, 5.0, 10.0)
_TOUCH = 3.0
"""Stretches that are less than that apart are drawn as one line."""
_KEY, _LETTER = 30, 6
"""Of a legend: what an entry takes beside its name, and a letter of that."""
_MARK = 9
"""Radius of the number of an event."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """From when to when, in seconds, and what is said of it where the pointer rests on it."""

    start_s: float
    end_s: float
    told: str = ""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A value for each stretch. below: of each value, what it stands on; one of 0 is not drawn there."""

    name: str
    colour: str
    values: Sequence[float]
    below: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Some series over one scale, which reaches ``least_top`` at least. shown: a value on the axis."""

    title: str
    series: Sequence[Series]
    least_top: float = 1.0
    shown: Callable[[float], str] = "{:g}".format
    height: int = 130


@dataclass(frozen=True, kw_only=True)
class Event:
    """A line across all panels, with a number on top."""

    at_s: float
    number: int
    told: str = ""


def nice_step(span: float, count: int = _TICKS) -> float:
    """A round step that parts a span into about so many."""
    rough = max(span, 1e-9) / count
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in _NICE if factor * power >= rough * (1 - 1e-9))


def chart(stretches: Sequence[Stretch], panels: Sequence[Panel], events: Sequence[Event], *, label: str) -> str:
    """The SVG; ``label`` says in words what it shows. "" where there is nothing to draw."""
    if not stretches:
        return ""
    axis = _TimeAxis(stretches)
    top, parts = (2 * _MARK + 4 if events else 2), []
    for panel in panels:
        parts.append(_panel(panel, stretches, axis, top + _TITLE))
        top += _TITLE + panel.height
    parts += [_time_axis(axis, top), *(_event(event, axis, top) for event in events), _told(stretches, axis, top)]
    height = top + _FOOT
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}" class="dpex-chart">\n'
        + "\n".join(parts)
        + "\n</svg>"
    )


class _TimeAxis:
    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self.start_s = min(stretch.start_s for stretch in stretches)
        self.end_s = max(stretch.end_s for stretch in stretches)

    def x(self, at_s: float) -> float:
        span = max(1e-9, self.end_s - self.start_s)
        ratio = min(1.0, max(0.0, (at_s - self.start_s) / span))
        return round(_LEFT + ratio * (WIDTH - _LEFT - _RIGHT), 1)

    def ticks(self) -> list[float]:
        step = nice_step(self.end_s - self.start_s, 2 * _TICKS)
        first = math.ceil(self.start_s / step - 1e-9)
        return [step * number for number in range(first, math.floor(self.end_s / step + 1e-9) + 1)]


def _panel(panel: Panel, stretches: Sequence[Stretch], axis: _TimeAxis, top: float) -> str:
    tops = [value + below for one in panel.series for value, below in _stacked(one)]
    step = nice_step(max(panel.least_top, *tops))
    most = step * math.ceil(max(panel.least_top, *tops) / step - 1e-9)

    def y(value: float) -> float:
        return round(top + panel.height * (1 - value / most), 1)

    lines = [f'<text x="{_LEFT}" y="{top - 9}" class="title">{escape(panel.title)}</text>', _legend(panel, top)]
    for number in range(round(most / step) + 1):
        at = y(number * step)
        lines.append(f'<path d="M{_LEFT} {at}H{WIDTH - _RIGHT}" class="grid"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{at + 4}" class="value">{escape(panel.shown(number * step))}</text>')
    return "\n".join([*lines, *(_drawn(one, stretches, axis, y) for one in panel.series)])


def _stacked(series: Series) -> list[tuple[float, float]]:
    return list(zip(series.values, series.below or [0.0] * len(series.values), strict=True))


def _legend(panel: Panel, top: float) -> str:
    if len(panel.series) < 2:
        return ""
    parts, x = [], WIDTH - _RIGHT
    for one in reversed(panel.series):
        x -= _KEY + _LETTER * len(one.name)
        parts.append(f'<rect x="{x}" y="{top - 19}" width="11" height="11" rx="2" fill="{one.colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{top - 9}" class="key">{escape(one.name)}</text>')
    return "".join(parts)


def _drawn(series: Series, stretches: Sequence[Stretch], axis: _TimeAxis, y: Callable[[float], float]) -> str:
    """The space below the values, and a line through stretches that touch; a new one begins after each gap."""
    line, area, last = [], [], -math.inf
    for stretch, (value, below) in zip(stretches, _stacked(series), strict=True):
        if series.below and not value:
            continue
        left, right, at = axis.x(stretch.start_s), axis.x(stretch.end_s), y(value + below)
        area.append(f"M{left} {y(below)}V{at}H{right}V{y(below)}Z")
        line.append(f"V{at}H{right}" if left - last < _TOUCH else f"M{left} {at}H{right}")
        last = right
    return (
        f'<path d="{"".join(area)}" fill="{series.colour}" class="area"/>'
        f'<path d="{"".join(line)}" stroke="{series.colour}" class="line"/>'
    )


def _time_axis(axis: _TimeAxis, top: float) -> str:
    base = f'<path d="M{_LEFT} {top}H{WIDTH - _RIGHT}" class="base"/>'
    ticks = [f'<text x="{axis.x(at_s)}" y="{top + 17}" class="time">{at_s:g} s</text>' for at_s in axis.ticks()]
    return "\n".join([base, *ticks])


def _event(event: Event, axis: _TimeAxis, bottom: float) -> str:
    x = axis.x(event.at_s)
    return (
        f'<g class="event"><title>{escape(event.told)}</title><path d="M{x} {2 * _MARK + 2}V{bottom}"/>'
        f'<circle cx="{x}" cy="{_MARK + 1}" r="{_MARK}"/><text x="{x}" y="{_MARK + 5}">{event.number}</text></g>'
    )


def _told(stretches: Sequence[Stretch], axis: _TimeAxis, bottom: float) -> str:
    """Invisible columns that say what was measured."""
    parts = []
    for stretch in stretches:
        left, right = axis.x(stretch.start_s), axis.x(stretch.end_s)
        width = round(max(1.0, right - left), 1)
        parts.append(
            f'<rect x="{left}" y="{2 * _MARK + 4}" width="{width}" height="{bottom - 2 * _MARK - 4}" class="told">'
            f"<title>{escape(stretch.told)}</title></rect>"
        )
    return "".join(parts)


STYLE = """
.dpex-chart { width: 100%; height: auto; display: block; font: 12px system-ui, sans-serif; overflow: visible; }
.dpex-chart text { fill: currentColor; }
.dpex-chart .title { font-weight: 600; font-size: 13px; }
.dpex-chart .value { text-anchor: end; opacity: .65; } .dpex-chart .time { text-anchor: middle; opacity: .65; }
.dpex-chart .grid { stroke: currentColor; opacity: .12; } .dpex-chart .base { stroke: currentColor; opacity: .4; }
.dpex-chart .line { fill: none; stroke-width: 1.6; stroke-linejoin: round; } .dpex-chart .area { opacity: .28; }
.dpex-chart .event path { stroke: currentColor; stroke-dasharray: 3 4; opacity: .45; }
.dpex-chart .event circle { fill: #4a5a8f; }
.dpex-chart .event text { fill: #fff; text-anchor: middle; font-weight: 600; }
.dpex-chart .told { fill: currentColor; opacity: 0; } .dpex-chart .told:hover { opacity: .08; }
"""
"""For the page or the fragment that a chart is in."""

"""A run as HTML: rate, wait and workers over time, and each decision with its reasons. All text is escaped.

The fragment has its own style and takes the colours of the page that it is in. `page` puts it into a page that loads
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from dpex.autotune.course import CoursePoint, wait_ratio
from dpex.autotune.types import Decision
from dpex.autotune.wording import named
from dpex.core.readable import duration, fine_percent, percent, rounded
from dpex.system.chart import Event, Panel, Series, chart

WAIT, RATE, LOCAL, REMOTE = "#c9574a", "#3f7fb5", "#4a8f5a", "#8a63b8"
"""Colours that are visible on white and on black."""
_ENDS = 5
"""Parts of a run without decisions, of which the first and the last are "at first" and "at last"."""
NOTHING = "Nothing was measured yet."
_STYLE = """
.dpex-run { max-width: 62rem; line-height: 1.5; }
.dpex-run .tiles { display: flex; flex-wrap: wrap; gap: .4rem 2.2rem; margin: .8rem 0 1.2rem; }
.dpex-run .tiles div { display: flex; flex-direction: column-reverse; }
.dpex-run .tiles b { font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.dpex-run .tiles span, .dpex-run .faint { opacity: .65; font-size: .85rem; }
.dpex-run ol { list-style: none; margin: 0; padding: 0; }
.dpex-run li { display: grid; grid-template-columns: 2.2rem 1fr; margin: 0 0 .9rem; break-inside: avoid; }
.dpex-run li > i { width: 1.4rem; height: 1.4rem; border-radius: 50%; background: #4a5a8f; color: #fff; font: 600 .8rem
  system-ui, sans-serif; display: grid; place-items: center; margin-top: .1rem; }
.dpex-run li p { margin: 0; }
.dpex-run .kept, .dpex-run .undone { color: #4a8f5a; font-size: .85rem; font-weight: 600; }
.dpex-run .undone { color: #c9574a; }
"""


@dataclass(frozen=True, kw_only=True)
class RunStory:
    """The content of the page of a run. ``title`` names the loader; ``facts`` describe it in a few words each."""

    title: str
    points: tuple[CoursePoint, ...] = ()
    decisions: tuple[Decision, ...] = ()
    facts: tuple[str, ...] = ()


def fragment(story: RunStory) -> str:
    """Return the HTML for a notebook or the body of a page."""
    parts = [f"<style>{_STYLE}</style>", f"<h1>{escape(story.title)}</h1>"]
    if story.facts:
        parts.append(f'<p class="faint">{escape(", ".join(story.facts))}</p>')
    parts += [f"<p>{escape(sentence(story))}</p>", _tiles(story), run_chart(story), *_decisions(story.decisions)]
    return '<section class="dpex-run">\n' + "\n".join(part for part in parts if part) + "\n</section>"


def page(story: RunStory) -> str:
    """Return the HTML as a page of its own."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>dpex: {escape(story.title)}</title>\n<style>{_PAGE_STYLE}</style>\n</head>\n"
        f"<body>\n{fragment(story)}\n</body>\n</html>\n"
    )


_PAGE_STYLE = """
:root { color-scheme: light dark; }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .8rem; }
@media print { body { margin: 0; max-width: none; font-size: 11pt; } }
"""


# -- in words ----------------------------------------------------------------------------------------------------------


def ends(story: RunStory) -> tuple[float, float]:
    """Return the wait ratio before the first decision and after the last one, or of the first and the last part."""
    points = story.points
    part = max(1, len(points) // _ENDS)
    times = [decision.at for decision in story.decisions if points and decision.at <= points[-1].at]
    first = [point for point in points if point.at <= times[0]] if times else []
    last = [point for point in points if point.at > times[-1]] if times else []
    return wait_ratio(first or points[:part]), wait_ratio(last or points[-part:])


def sentence(story: RunStory) -> str:
    """Return the run in a sentence."""
    points = story.points
    if not points:
        return NOTHING
    first, last = ends(story)
    whole = f"{fine_percent(wait_ratio(points))} of the training loop's time was lost to loading"
    return f"{whole}: {fine_percent(first)} at first, {fine_percent(last)} at last."


def _tiles(story: RunStory) -> str:
    points = story.points
    if not points:
        return ""
    measured_s, batches = sum(point.seconds for point in points), sum(point.batches for point in points)
    undone = sum(decision.outcome is not None and not decision.outcome.kept for decision in story.decisions)
    tiles = [
        ("of the run", duration(points[-1].at - points[0].at + points[0].seconds)),
        ("batches", f"{batches:,}"),
        ("batches/s", rounded(batches / measured_s) if measured_s > 0 else "0"),
        ("workers at last", str(points[-1].workers)),
        ("decisions" + (f", {undone} undone" if undone else ""), str(len(story.decisions))),
    ]
    inside = "".join(f"<div><span>{escape(name)}</span><b>{escape(value)}</b></div>" for name, value in tiles)
    return f'<div class="tiles">{inside}</div>'


def _decisions(decisions: Sequence[Decision]) -> Iterator[str]:
    if not decisions:
        yield '<p class="faint">Nothing was decided.</p>'
        return
    yield "<h2>Decisions</h2>"
    yield "<ol>" + "\n".join(decided(number, one) for number, one in enumerate(decisions, 1)) + "</ol>"


def decided(number: int, decision: Decision) -> str:
    """Return a decision as an item of a list."""
    return (
        f"<li><i>{number}</i><div><p><strong>{escape(named(decision.new))}</strong> "
        f'<span class="faint">after {duration(decision.at)}, {escape(decision.reason)}</span></p>'
        f"<p>{escape(decision.text)}</p>{_outcome(decision)}</div></li>"
    )


def _outcome(decision: Decision) -> str:
    """Return the expected and the measured effect; "" if none was expected."""
    if decision.predicted_rate <= 0:
        return ""
    expected = f"Expected {rounded(decision.predicted_rate)} batches/s, {percent(decision.predicted_wait)} lost"
    outcome = decision.outcome
    if outcome is None:
        return f'<p class="faint">{escape(expected)}; what it brought was not measured.</p>'
    word = "kept" if outcome.kept else "undone"
    brought = f"measured {rounded(outcome.rate)} batches/s, {percent(outcome.wait)} lost"
    told = f'<span class="faint">{escape(expected)}; {escape(brought)}:</span>'
    return f'<p>{told} <span class="{word}">{word}</span></p>'


# -- drawn -------------------------------------------------------------------------------------------------------------


def run_chart(story: RunStory) -> str:
    """Return the chart of wait, rate and workers over time, with the decisions."""
    points = story.points
    workers = [Series(name="on this machine", colour=LOCAL, values=[point.local for point in points])]
    if any(point.remote for point in points):
        workers.insert(0, Series(name="all workers", colour=REMOTE, values=[one.workers for one in points]))
    rates = [point.rate for point in points]
    panels = [
        _wait_panel(points),
        Panel(title="Batches per second", series=[Series(name="rate", colour=RATE, values=rates)]),
        Panel(title="Workers", series=workers, height=130),
    ]
    return chart(_stretches(points), panels, _events(story), label=sentence(story))


def wait_chart(story: RunStory, height: int = 130) -> str:
    """Return the chart of the wait alone."""
    return chart(_stretches(story.points), [_wait_panel(story.points, height)], _events(story), label=sentence(story))


def _wait_panel(points: Sequence[CoursePoint], height: int = 170) -> Panel:
    series = Series(name="wait", colour=WAIT, values=[point.wait_ratio for point in points])
    title = "Wait: the training loop's time that was lost to loading"
    return Panel(title=title, series=[series], is_share=True, height=height)


def _events(story: RunStory) -> list[Event]:
    return [Event(at_s=round(one.at, 3), number=number) for number, one in enumerate(story.decisions, 1)]


def _stretches(points: Sequence[CoursePoint]) -> list[tuple[float, float]]:
    return [(point.at - point.seconds, point.at) for point in points]

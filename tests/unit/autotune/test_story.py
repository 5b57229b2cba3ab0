"""A run drawn: its points, its chart, and its page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpex.autotune.course import Course, CoursePoint, halved, joined, wait_ratio
from dpex.autotune.run_plot import RunPlot
from dpex.autotune.trace.story import NOTHING, RunStory, ends, fragment, page, run_chart, sentence
from dpex.autotune.types import Decision, Outcome, Sample, Settings
from dpex.core.svg import Event, Panel, Series, Stretch, chart, nice_step
from dpex.measure.samples import PoolSample
from tests.unit.diagnose.test_report import HOSTILE, Tags


def sample(number: int, wait_ratio: float = 0.5, local: int = 2) -> Sample:
    return Sample(
        at=number + 1.0,
        seconds=1.0,
        settings=Settings(local=local, prefetch=2 * local),
        batches=10,
        wait_s=wait_ratio / 2,
        own_s=wait_ratio / 2,
        work_s=1 - wait_ratio,
        local=PoolSample(running=local),
    )


def points_of(*waits: float) -> tuple[CoursePoint, ...]:
    course = Course()
    for number, wait in enumerate(waits):
        course.add(sample(number, wait))
    return course.points


def decision(at: float, text: str = "Because.", outcome: Outcome | None = None) -> Decision:
    old, new = Settings(local=2, prefetch=4), Settings(local=7, prefetch=14)
    return Decision(
        at=at,
        old=old,
        new=new,
        reason="too few",
        text=text,
        evidence={},
        predicted_rate=20.0,
        predicted_wait=0.02,
        outcome=outcome,
    )


# -- points ------------------------------------------------------------------------------------------------------------


def test_a_point_is_what_a_window_measured() -> None:
    (point,) = points_of(0.25)
    assert (point.at, point.rate, point.wait_ratio, point.workers, point.prefetch) == (1.0, 10.0, 0.25, 2, 4)


def test_joining_keeps_sums_and_the_latest_levels() -> None:
    first, second = points_of(1.0, 0.0)
    both = joined(first, replace(second, local=5))
    assert (both.at, both.seconds, both.batches, both.wait_ratio, both.workers) == (2.0, 2.0, 20, 0.5, 5)
    assert [point.at for point in halved(points_of(0, 0, 0))] == [2.0, 3.0]


@pytest.mark.parametrize("windows", [1, 7, 8, 9, 100, 1001])
def test_a_long_run_has_few_points_and_loses_nothing(windows: int) -> None:
    course = Course(most=8)
    for number in range(windows):
        course.add(sample(number, wait_ratio=(number % 3) / 2))
        assert len(course.points) <= 9
    points = course.points
    assert sum(point.batches for point in points) == 10 * windows
    assert sum(point.seconds for point in points) == windows
    assert (points[0].at - points[0].seconds, points[-1].at) == (0.0, windows)
    assert wait_ratio(points) == pytest.approx(sum((n % 3) / 2 for n in range(windows)) / windows)


# -- the chart ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("span", "step"), [(1.0, 0.2), (7.0, 2.0), (100.0, 20.0), (0.03, 0.01), (0.0, 2e-10)])
def test_steps_of_an_axis_are_round(span: float, step: float) -> None:
    assert nice_step(span) == pytest.approx(step)


def drawn(stretches: list[Stretch], values: list[float], events: list[Event] | None = None, **panel: Any) -> str:
    series = [Series(name="one", colour="#123456", values=values)]
    return chart(stretches, [Panel(title="T", series=series, **panel)], events or [], label=HOSTILE)


def test_nothing_is_drawn_of_nothing() -> None:
    assert drawn([], []) == ""


def test_values_are_drawn_to_scale_and_gaps_stay_empty() -> None:
    touching = [Stretch(start_s=0, end_s=5), Stretch(start_s=5, end_s=10)]
    apart = [Stretch(start_s=0, end_s=2), Stretch(start_s=8, end_s=10)]
    line = re.compile(r'<path d="(M[^"]+)" stroke="#123456"')
    (path,) = line.findall(drawn(touching, [0.0, 1.0], height=100))
    assert path == "M52.0 136.0H480.0V36.0H908.0"
    (path,) = line.findall(drawn(apart, [0.0, 1.0], height=100))
    assert path.count("M") == 2


def test_what_is_said_is_escaped_and_events_are_numbered() -> None:
    text = drawn([Stretch(start_s=0, end_s=1, told=HOSTILE)], [0.5], [Event(at_s=0.5, number=3, told=HOSTILE)])
    assert "<script>" not in text
    assert '<text x="480.0" y="14">3</text>' in text
    Tags().feed(text)


# -- the page ----------------------------------------------------------------------------------------------------------


def story(**other: Any) -> RunStory:
    kept = decision(2.0, HOSTILE, Outcome(rate=19.0, wait=0.03, kept=True, at=4.0))
    undone = decision(3.5, outcome=Outcome(rate=9.0, wait=0.3, kept=False, at=4.0))
    return RunStory(
        title=HOSTILE, points=points_of(0.8, 0.6, 0.2, 0.04), decisions=(kept, undone), facts=(HOSTILE,), **other
    )


def test_the_wait_before_the_first_decision_and_after_the_last() -> None:
    assert ends(story()) == (pytest.approx(0.7), pytest.approx(0.04))
    assert ends(RunStory(title="", points=points_of(*[0.8] * 5, *[0.1] * 5))) == (0.8, pytest.approx(0.1))
    assert sentence(story()).endswith(": 70 % at first, 4.0 % at last.")


def test_the_page_is_whole_escaped_and_loads_nothing(tmp_path: Path) -> None:
    text = RunPlot(story()).write_html(tmp_path / "run.html").read_text()
    assert text == page(story())
    Tags().feed(text)
    assert "<script" not in text
    assert re.findall(r"(?:src|href|@import|url)\W", text) == []
    assert text.count('<g class="event">') == 2
    assert ("measured 19 batches/s, 3 % lost" in text, '<span class="undone">undone</span>' in text) == (True, True)


def test_a_run_without_anything_says_so() -> None:
    empty = RunStory(title="x")
    assert str(RunPlot(empty)) == NOTHING
    assert NOTHING in fragment(empty)
    assert "Nothing was decided." in fragment(empty)
    assert run_chart(empty) == ""


def test_workers_on_the_cluster_are_drawn_on_top() -> None:
    points = tuple(replace(point, remote=3) for point in points_of(0.1, 0.1))
    text = run_chart(RunStory(title="x", points=points))
    assert ("on the cluster" in text, "5 workers" in text) == (True, True)
    assert "on the cluster" not in run_chart(RunStory(title="x", points=points_of(0.1)))

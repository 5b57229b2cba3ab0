"""A run drawn: its points, its chart, and its page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpex.autotune.course import Course, CoursePoint, halved, joined, wait_ratio
from dpex.autotune.run_plot import RunPlot
from dpex.autotune.trace.story import NOTHING, RunStory, ends, fragment, page, run_chart, sentence
from dpex.autotune.types import Decision, Outcome, Sample, Settings
from dpex.measure.samples import PoolSample
from dpex.system.chart import Event, Panel, Series, chart
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


def test_nothing_is_drawn_of_nothing() -> None:
    assert chart([], [], label="x") == ""


def drawn(text: str) -> dict[str, Any]:
    """The data of the only chart in a text."""
    (found,) = re.findall(r'^drawAll\("\w+", (.*)\);$', text, re.MULTILINE)
    return json.loads(found)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("stretches", "times", "values"),
    [
        ([(0.0, 5.0), (5.0, 10.0)], [0, 5, 10], [0.25, 1, 1]),
        ([(0.0, 2.0), (8.0, 10.0)], [0, 2, 2.015, 8, 10], [0.25, 0.25, None, 1, 1]),
        ([(0.0, 4.99), (5.0, 10.0)], [0, 5, 10], [0.25, 1, 1]),
    ],
)
def test_a_value_holds_for_its_stretch_and_gaps_stay_empty(
    stretches: list[tuple[float, float]], times: list[float], values: list[float | None]
) -> None:
    panel = Panel(title="T", series=[Series(name="one", colour="#123456", values=[0.25, 1.0])])
    found = drawn(chart(stretches, [panel], label="x"))
    assert (found["times"], found["panels"][0]["series"][0]["values"]) == (times, values)


def test_what_is_said_is_escaped_and_events_are_numbered() -> None:
    panel = Panel(title=HOSTILE, series=[Series(name=HOSTILE, colour="#123456", values=[0.5])])
    text = chart([(0.0, 1.0)], [panel], [Event(at_s=0.5, number=3)], label=HOSTILE)
    assert (text.count("<script>"), text.count("</script>")) == (1, 1)
    assert drawn(text)["events"] == [{"at_s": 0.5, "number": 3}]
    assert drawn(text)["panels"][0]["title"] == HOSTILE
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
    assert text.count("<script") == 1
    assert re.findall(r"(?:src|href|@import|url)\s*[=(\"']", text) == []
    assert [event["number"] for event in drawn(text)["events"]] == [1, 2]
    assert ("measured 19 batches/s, 3 % lost" in text, '<span class="undone">undone</span>' in text) == (True, True)


def test_a_run_without_anything_says_so() -> None:
    empty = RunStory(title="x")
    assert str(RunPlot(empty)) == NOTHING
    assert NOTHING in fragment(empty)
    assert "Nothing was decided." in fragment(empty)
    assert run_chart(empty) == ""


def test_workers_on_the_cluster_are_drawn_with_the_others() -> None:
    points = tuple(replace(point, remote=3) for point in points_of(0.1, 0.1))
    both, local = drawn(run_chart(RunStory(title="x", points=points)))["panels"][2]["series"]
    assert (both["name"], both["values"]) == ("all workers", [5, 5, 5])
    assert local["values"] == [2, 2, 2]
    assert len(drawn(run_chart(RunStory(title="x", points=points_of(0.1))))["panels"][2]["series"]) == 1

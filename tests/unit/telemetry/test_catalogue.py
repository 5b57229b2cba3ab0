"""The catalogue keeps Prometheus's rules to the letter, and the documentation is made from it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from dashboards.pages import PAGE, VERDICTS, with_lists, with_verdicts
from dpex.measure.wait_causes import CAUSES
from dpex.telemetry.catalog import BY_NAME, METRICS, STATES, Metric

ROOT = Path(__file__).parents[3]
BASE_UNITS = ("seconds", "bytes", "ratio")
OTHER_UNITS = ("milliseconds", "microseconds", "minutes", "hours", "kilobytes", "megabytes", "mib", "bits", "percent")
RESERVED_ENDINGS = ("_count", "_sum", "_bucket", "_created")
EVERY = pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)


def labels_of(metric: Metric) -> list[str]:
    return [label.name for label in metric.labels]


def test_no_name_twice() -> None:
    assert [name for name, count in Counter(metric.name for metric in METRICS).items() if count > 1] == []
    assert list(BY_NAME) == [metric.name for metric in METRICS]


@EVERY
def test_names_are_valid_and_have_the_one_word_prefix(metric: Metric) -> None:
    assert re.fullmatch(r"dpex(_[a-z0-9]+)+", metric.name)


@EVERY
def test_a_counter_ends_in_total_behind_its_unit_and_nothing_else_does(metric: Metric) -> None:
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.name.endswith("_info") == (metric.kind == "info")
    stem = metric.name.removesuffix("_total")
    assert not metric.unit or stem.endswith(f"_{metric.unit}")
    assert not stem.endswith(RESERVED_ENDINGS)


@EVERY
def test_a_unit_in_the_name_is_the_metrics_and_a_base_unit(metric: Metric) -> None:
    words = metric.name.split("_")
    assert not set(words) & set(OTHER_UNITS)
    if "per" not in words:
        named = [unit for unit in BASE_UNITS if unit in words]
        assert named == ([metric.unit] if metric.unit else [])


@EVERY
def test_times_are_points_not_distances(metric: Metric) -> None:
    assert "since" not in metric.name
    assert "timestamp" not in metric.name or metric.name.endswith("_timestamp_seconds")


@EVERY
def test_no_label_name_or_value_is_in_the_name(metric: Metric) -> None:
    """But for what the metric is about: a GPU metric is labelled by the GPU, a loader's information by the loader."""
    words = set(metric.name.split("_"))
    assert words.isdisjoint(set(labels_of(metric)) - {"gpu", "loader"})
    assert words.isdisjoint(value for label in metric.labels for value in label.values)


@EVERY
def test_labels_are_valid_few_and_name_nothing_that_grows(metric: Metric) -> None:
    names = labels_of(metric)
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z][a-z_]*", name) for name in names)
    assert set(names).isdisjoint({"le", "quantile", "job", "instance", "run_id", "rank", "node"})  # the scrape target's
    assert set(names).isdisjoint({"worker", "host", "pid", "epoch", "batch", "path_name", "file"})
    assert all(len(set(label.values)) == len(label.values) for label in metric.labels)


@EVERY
def test_series_are_few(metric: Metric) -> None:
    """Under a dozen per loader or GPU; a histogram of one pool has at most 14 buckets, a sum and a count."""
    if metric.kind == "histogram":
        assert metric.series <= 3 * 16
    else:
        assert metric.series < 12


def test_all_of_them_are_few() -> None:
    assert sum(metric.series for metric in METRICS) < 200


@EVERY
def test_buckets_rise_and_are_fourteen_at_most(metric: Metric) -> None:
    assert (len(metric.buckets) > 0) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert len(metric.buckets) + 1 <= 14


@EVERY
def test_each_says_what_it_is_and_how_to_read_it(metric: Metric) -> None:
    assert metric.help.endswith(".")
    assert metric.how_to_read.endswith(".")
    assert "\n" not in metric.help + metric.how_to_read


@EVERY
def test_metrics_named_in_texts_exist(metric: Metric) -> None:
    named = re.findall(r"dpex_\w+", metric.help + metric.how_to_read)
    assert {re.sub(r"_(count|sum|bucket)$", "", name) for name in named} <= set(BY_NAME)


def test_states_and_causes_are_those_of_the_issue() -> None:
    assert STATES == ("wait", "transfer", "work")
    assert set(CAUSES) == {
        *("read", "transform", "collate", "encode", "transit"),
        *("h2d", "straggler", "startup", "sampler", "dispatch", "unknown"),
    }


@pytest.mark.parametrize(
    ("page", "written"), [(PAGE, with_lists), (VERDICTS, with_verdicts)], ids=["metrics", "causes"]
)
def test_the_documentation_is_made_from_the_code(page: Path, written: Callable[[str], str]) -> None:
    assert page.read_text() == written(page.read_text()), "python -m dashboards.pages"

"""The catalogue keeps Prometheus's rules to the letter, and the documentation is made from it."""

import math
import re
from pathlib import Path

import pytest

from dashboards.pages import WRITERS
from dpex.telemetry.catalog import BY_NAME, METRICS, Metric

BASE_UNITS = ("seconds", "bytes", "ratio")
OTHER_UNITS = {"milliseconds", "microseconds", "minutes", "hours", "kilobytes", "megabytes", "mib", "bits", "percent"}
RESERVED_ENDINGS = ("_count", "_sum", "_bucket", "_created")
TARGETS_OWN = {"le", "quantile", "job", "instance", "run_id", "rank", "node"}
GROWING = {"worker", "host", "pid", "epoch", "batch", "path_name", "file"}
EVERY = pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)


def series(metric: Metric) -> int:
    """The largest number of series for one loader or GPU, a histogram's buckets included."""
    each = len(metric.buckets) + 3 if metric.buckets else 1
    return each * math.prod(len(label.values) or 1 for label in metric.labels)


def test_no_name_twice_and_few_series_in_all() -> None:
    assert len(BY_NAME) == len(METRICS)
    assert sum(map(series, METRICS)) < 200


@EVERY
def test_a_name_is_valid_and_says_kind_and_unit(metric: Metric) -> None:
    assert re.fullmatch(r"dpex(_[a-z0-9]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.name.endswith("_info") == (metric.kind == "info")
    stem, words = metric.name.removesuffix("_total"), metric.name.split("_")
    assert not metric.unit or stem.endswith(f"_{metric.unit}")
    assert not stem.endswith(RESERVED_ENDINGS)
    assert not set(words) & (OTHER_UNITS | {"since"})  # times are points, not distances
    if "per" not in words:
        assert [unit for unit in BASE_UNITS if unit in words] == ([metric.unit] if metric.unit else [])


@EVERY
def test_labels_are_valid_few_and_name_nothing_that_grows(metric: Metric) -> None:
    """A GPU metric may name the GPU, and a loader's information the loader; no other label is in a name."""
    names, words = metric.label_names, set(metric.name.split("_"))
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z][a-z_]*", name) for name in names)
    assert set(names).isdisjoint(TARGETS_OWN | GROWING)
    assert words.isdisjoint(set(names) - {"gpu", "loader"})
    assert words.isdisjoint(value for label in metric.labels for value in label.values)
    assert all(len(set(label.values)) == len(label.values) for label in metric.labels)
    assert series(metric) <= 3 * 16 if metric.kind == "histogram" else series(metric) <= 12


@EVERY
def test_buckets_rise_and_help_names_existing_metrics(metric: Metric) -> None:
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert len(metric.buckets) + 1 <= 14
    assert metric.help.endswith(".")
    assert metric.how_to_read.endswith(".")
    named = re.findall(r"dpex_\w+", metric.help + metric.how_to_read)
    assert {re.sub(r"_(count|sum|bucket)$", "", name) for name in named} <= set(BY_NAME)


@pytest.mark.parametrize("page", WRITERS, ids=lambda page: page.stem)
def test_the_documentation_is_made_from_the_code(page: Path) -> None:
    """White space aside: versions of Python break the usage of a command in other places."""
    assert page.read_text().split() == WRITERS[page](page.read_text()).split(), "python -m dashboards.pages"

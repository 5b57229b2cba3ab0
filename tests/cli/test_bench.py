"""``dpex bench``: what it finds, measures and tells; and the forecast's arithmetic."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from torch.utils.data import default_collate

from dpex.cli.bench.forecast import MeasuredWork, fastest, need, rates
from dpex.cli.bench.measure import BenchError, DatasetTimes
from dpex.cli.bench.target import subject
from dpex.profile.spans import Spans
from tests.cli.commands import SCRIPTS, dpex


@pytest.fixture
def _beside_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


# -- finding -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_beside_the_scripts")
def test_datasets_loaders_classes_and_functions() -> None:
    for name in ("Images", "images", "loader.dataset"):
        found = subject(f"material:{name}")
        assert (type(found.dataset).__name__, found.batch_size, found.iterable) == ("Images", 32, False)
        assert found.collate_fn is default_collate
    assert subject("material:loader").batch_size == 5
    assert subject("material:loader", batch_size=9).batch_size == 9
    assert subject("material:Stream").iterable
    assert subject("material:Images", None, "material:doubled").collate_fn([1, 2]) == 4


@pytest.mark.usefixtures("_beside_the_scripts")
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("material", "give module:attribute"),
        ("material_that_is_not:there", "there is no module 'material_that_is_not'"),
        ("material.sub:there", "there is no module 'material.sub'"),
        ("material:nothing", r"material has no 'nothing'; it has .*Images.*loader"),
        ("material:THREE", "a int is no dataset; give one with __getitem__ and __len__"),
        ("material:waits", "cannot be called without arguments .*'image'"),
        ("material:empty", "the dataset has no samples"),
    ],
)
def test_what_cannot_be_measured(target: str, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        subject(target)


# -- the forecast ------------------------------------------------------------------------------------------------------


def work(**changes: Any) -> MeasuredWork:
    return MeasuredWork(**({"here_s": 0.1, "cpu_s": 0.1, "wait_s": 0.0, "batch_bytes": 1e6, "cpus": 4.0} | changes))


def test_work_that_needs_cpus_scales_to_the_cpus() -> None:
    found = {row.workers: row.rate for row in rates(work())}
    assert list(found) == [0, 1, 2, 4]
    assert found[0] == pytest.approx(10, rel=0.01)
    assert found[2] == pytest.approx(20, rel=0.02)
    assert found[4] == pytest.approx(40, rel=0.05)
    settings, rate = fastest(work())
    assert settings.local == 4
    assert rate == pytest.approx(40, rel=0.05)


def test_work_that_waits_scales_beyond_them() -> None:
    waiting = work(cpu_s=0.001, wait_s=0.099)
    assert max(row.rate for row in rates(waiting)) > 300


def test_threads_of_a_library_take_their_cpus() -> None:
    """A decoder that keeps four CPUs busy: one worker of it is as fast as the machine."""
    threaded = work(here_s=0.025, at_once=4.0)
    assert {round(row.rate) for row in rates(threaded)} == {40}
    assert fastest(threaded)[0].workers == 1


def measured(**changes: float) -> DatasetTimes:
    stages = {"load_s": 0.05, "load_cpu_s": 0.05, "collate_s": 0.0, "collate_cpu_s": 0.0}
    queued = {"queued_s": 0.0, "fetch_queued_s": 0.0, "encode_queued_s": 0.0}
    rest = {"encode_s": 0.0, "encode_cpu_s": 0.0, "batch_bytes": 1e6, "cpus": 4.0, "others": 0.0}
    return DatasetTimes(
        batches=9,
        seconds=1.0,
        first_s=0.1,
        walls_s=(0.05,) * 9,
        timed_batches=3,
        spans=Spans(),
        **stages | queued | rest | changes,
    )


def test_what_was_measured_is_told_as_work() -> None:
    one = measured().work()
    assert (one.at_once, one.cpu_s, one.here_s, one.wait_s) == (1.0, 0.05, 0.05, 0.0)
    several = measured(load_cpu_s=0.15).work()
    assert (several.at_once, several.cpu_s, several.wait_s) == (pytest.approx(3.0), 0.15, 0.0)
    assert several.here_s == pytest.approx(0.05)
    few = measured(load_cpu_s=0.1, queued_s=0.1, cpus=2.0).work()
    assert few.at_once == pytest.approx(4.0)
    assert few.here_s == pytest.approx(0.05)  # four threads on two CPUs
    assert measured(load_cpu_s=0.01, fetch_queued_s=0.01).work().wait_s == pytest.approx(0.03)


def test_only_what_the_making_thread_queued_is_taken_off_its_wall_time() -> None:
    """Other threads queue beside it, and it queues between two batches."""
    beside = measured(load_cpu_s=0.01, queued_s=0.04).work()
    assert (beside.here_s, beside.wait_s) == (0.05, pytest.approx(0.04))
    itself = measured(load_cpu_s=0.01, queued_s=0.04, fetch_queued_s=0.03, encode_s=0.01, encode_queued_s=0.005).work()
    assert (itself.here_s, itself.wait_s) == (pytest.approx(0.02), pytest.approx(0.015))


def test_needs() -> None:
    light = need(work(), 0.2)
    assert (light.suffices, light.here.local, light.here.remote, light.remote_cpus) == (True, 1, 0, 0)
    assert light.anywhere == light.here
    heavy = need(work(), 0.01)
    assert not heavy.suffices
    assert heavy.wait > 0.5
    assert heavy.here.remote == 0
    assert 6 <= heavy.anywhere.remote <= 12
    assert heavy.remote_cpus == heavy.anywhere.remote
    assert heavy.anywhere_wait < 0.05


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_json() -> None:
    done = dpex("bench", "material:Images", "--batch-size", "8", "--seconds", "0.5", "--step-ms", "1e4", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    measured, sample = told["measured"], told["sample"]
    steps = {step["path"][-1]: step for step in measured["spans"]["steps"]}
    assert list(steps) == ["Images.__getitem__", "Compose", "waits", "computes", "collate"]
    samples = measured["spans"]["samples"]
    assert samples == 8 * measured["timed_batches"] == steps["computes"]["calls"]
    assert steps["waits"]["wall_s"] >= 0.004 * samples > 4 * steps["waits"]["cpu_s"]
    assert steps["computes"]["cpu_s"] >= 0.003 * samples
    assert 0.007 <= sample["p50_s"] <= sample["p95_s"] <= sample["p99_s"]
    assert sample["cpu_s"] < sample["wall_s"]
    assert told["work"]["wait_s"] > 0.02  # a batch sleeps for 0.032 s; what queues meanwhile is taken off the wall time
    assert 8 * 3 * 32 * 32 * 4 <= measured["batch_bytes"] < 1.1 * 8 * 3 * 32 * 32 * 4
    assert [row["workers"] for row in told["rates"]][:2] == [0, 1]
    assert told["rates"][0]["rate"] < 1 / (8 * 0.008)
    assert [(row["step_s"], row["suffices"]) for row in told["needs"]] == [(10.0, True)]
    assert all(slow["index"] in range(40) for slow in measured["spans"]["slowest"])


@pytest.mark.long
def test_text() -> None:
    done = dpex("bench", "material:Stream", "--seconds", "0.1", "--collate", "material:doubled")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("material:Stream: Stream, batches of 32\n")
    assert re.search(r"^  Stream\.__iter__ +[\d,]+ .*%$", done.stdout, re.MULTILINE)
    assert re.search(r"^  workers  batches/s  samples/s$", done.stdout, re.MULTILINE)
    assert re.search(r"^  none +[\d,.]+ +[\d,.]+$", done.stdout, re.MULTILINE)
    assert re.findall(r"^  (5 ms|20 ms|100 ms) ", done.stdout, re.MULTILINE) == ["5 ms", "20 ms", "100 ms"]


def test_an_error_is_a_line() -> None:
    done = dpex("bench", "material:nothing")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dpex bench: 'material:nothing': material has no 'nothing'")
    assert done.stderr.count("\n") == 1

"""The works of the benchmark: every dataset gives samples of one shape, pickles, and reads files made once."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from benchmarks import tables
from benchmarks.contestants import LIMIT, Contestant
from benchmarks.limit import bare_batches, limit
from benchmarks.measure import Request, measure
from benchmarks.tables import Blobs
from benchmarks.works import WORKS, Work
from benchmarks.works.audio import _resampled
from benchmarks.works.waits import SHARD_BATCH, SHARD_BATCHES, SHIFTING_WAITS_S, Shifting, Waits

EXTRA = {"compressed": "numcodecs", "tokens": "tokenizers"}
"""Works that need more than dpex is developed with."""


@pytest.fixture(autouse=True)
def small_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files for a tiny cache, in a folder of their own."""
    monkeypatch.setenv("DPEX_BENCH_DATA", str(tmp_path))
    monkeypatch.setattr(tables, "last_level_cache_bytes", lambda: 2**16)
    monkeypatch.setattr("benchmarks.works.tensors.LEAST_SMALL_IMAGES", 100)
    return tmp_path


@pytest.fixture(params=list(WORKS))
def work(request: pytest.FixtureRequest) -> Work:
    if request.param in EXTRA:
        pytest.importorskip(EXTRA[request.param])
    return WORKS[request.param]


def shapes(sample: Any) -> Any:
    if isinstance(sample, torch.Tensor):
        return tuple(sample.shape), sample.dtype
    if isinstance(sample, dict):
        return {name: shapes(value) for name, value in sample.items()}
    return tuple(map(shapes, sample)) if isinstance(sample, tuple) else type(sample)


def test_samples_have_one_shape_and_files_are_made_once(work: Work, small_data: Path) -> None:
    with work.opened(count=30) as dataset:
        made = {path.name: path.stat().st_mtime_ns for path in small_data.iterdir()}
        again = pickle.loads(pickle.dumps(dataset))
        assert shapes(dataset[7]) == shapes(again[8]) == shapes(dataset[0])
        default_collate([dataset[7], again[8]])
        assert len(next(bare_batches(again, 2))) == 2
    with work.opened(count=30):
        assert {path.name: path.stat().st_mtime_ns for path in small_data.iterdir()} == made


def test_all_files_of_a_work_are_read_before_its_row(
    work: Work, small_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: dict[Path, None] = {}
    monkeypatch.setattr(tables, "_in_use", used)
    with work.opened(count=30):
        assert set(small_data.iterdir()) - {path.with_suffix(".ends") for path in used} == set(used)
    read, files = bytes_read(), sum(path.stat().st_size for path in used)
    tables.read_files_in_use()
    assert bytes_read() - read >= files


def bytes_read() -> int:
    """What this process has read by system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_blobs_come_back_as_they_were_made(small_data: Path) -> None:
    texts = [b"", b"one", b"twenty-two"]
    blobs = Blobs.made("b", 3, lambda count: texts[:count])
    again = pickle.loads(pickle.dumps(Blobs.made("b", 3, lambda _: pytest.fail("they are there"))))
    assert [again[number].tobytes() for number in range(len(blobs))] == texts


def test_half_made_blobs_are_made_again(small_data: Path) -> None:
    (small_data / "b-1.blobs").write_bytes(b"half")
    assert Blobs.made("b", 1, lambda _: [b"whole"])[0].tobytes() == b"whole"


def waits_of(dataset: Any, indices: Any, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waits: list[float] = []
    monkeypatch.setattr("benchmarks.works.waits.time.sleep", waits.append)
    for index in indices:
        dataset[index]
    return waits


def test_the_shifting_work_has_as_many_batches_of_each_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Shifting(150)
    assert waits_of(dataset, range(len(dataset)), monkeypatch) == [
        wait_s for wait_s in SHIFTING_WAITS_S for _ in range(len(dataset) // 3)
    ]


def test_shards_are_as_slow_within_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = SHARD_BATCHES * SHARD_BATCH
    with WORKS["slow-shards"].opened() as dataset:
        assert isinstance(dataset, Waits)
        waits = waits_of(dataset, range(0, 4 * shard, shard // 4), monkeypatch)
    assert [len(set(waits[start : start + 4])) for start in range(0, 16, 4)] == [1, 1, 1, 1]
    assert len(set(waits)) == 4


def test_resampling_keeps_a_tone() -> None:
    tone, fewer = (np.sin(2 * np.pi * 50 * np.arange(size) / size) for size in (4410, 1600))
    assert np.allclose(_resampled(tone, 1600), fewer, atol=1e-5)


def test_the_limit_is_what_several_processes_really_make() -> None:
    with WORKS["wait"].opened() as dataset:
        one, three = (limit(dataset, 2, processes, 0.3, "read") for processes in (1, 3))
    assert 0 < one.batches < three.batches  # they wait, so they do not share processors


def test_a_measurement_of_the_limit_is_a_course() -> None:
    course = measure(Request(work="floats", contestant=Contestant(engine=LIMIT, workers=2), window_s=0.05))
    assert course.batches > 0
    assert course.seconds == 0.05


@pytest.mark.parametrize("name", ["http", "sqlite"])
def test_connections_are_not_taken_across_a_fork(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with WORKS[name].opened() as dataset:
        dataset[0]
        before = dataset.local
        with monkeypatch.context() as forked:
            forked.setattr("os.getpid", lambda: -1)
            dataset[1]
        assert dataset.local is not before

"""Works of the benchmark give batches of one shape, from files that are made once, and a measurement of them counts."""

import asyncio
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from benchmarks import tables
from benchmarks.contestants import Contestant
from benchmarks.measure import Request, measure
from benchmarks.works import WORKS


@pytest.fixture(autouse=True)
def small_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for files that are large enough for a tiny cache."""
    monkeypatch.setenv("DPEX_BENCH_DATA", str(tmp_path))
    monkeypatch.setattr(tables, "last_level_cache_bytes", lambda: 2**16)
    monkeypatch.setattr("benchmarks.works.tensors.LEAST_SMALL_IMAGES", 100)
    return tmp_path


def shapes(sample: Any) -> Any:
    if isinstance(sample, torch.Tensor):
        return tuple(sample.shape), sample.dtype
    if isinstance(sample, dict):
        return {name: shapes(value) for name, value in sample.items()}
    return tuple(map(shapes, sample)) if isinstance(sample, tuple) else type(sample)


async def loaded(*wanted: tuple[Any, int]) -> list[Any]:
    """The samples of these datasets, synchronous or not."""
    samples = [dataset[index] for dataset, index in wanted]
    found = [await sample if inspect.isawaitable(sample) else sample for sample in samples]
    for dataset in {id(dataset): dataset for dataset, _ in wanted}.values():
        if hasattr(dataset, "aclose"):
            await dataset.aclose()
    return found


@pytest.mark.parametrize(("name", "form"), [(name, form) for name in WORKS for form in (None, *WORKS[name].forms)])
def test_samples_have_one_shape_and_files_are_made_once(name: str, form: str | None, small_data: Path) -> None:
    with WORKS[name].opened(30, form) as dataset:
        made = {path.name: path.stat().st_mtime_ns for path in small_data.iterdir()}
        again = pickle.loads(pickle.dumps(dataset))
        first, eighth, ninth = asyncio.run(loaded((dataset, 0), (dataset, 7), (again, 8)))
        assert shapes(eighth) == shapes(ninth) == shapes(first)
        default_collate([eighth, ninth])
    with WORKS[name].opened(30, form):
        assert {path.name: path.stat().st_mtime_ns for path in small_data.iterdir()} == made


@pytest.mark.parametrize(("name", "form"), [(name, form) for name in ("wait", "http") for form in WORKS[name].forms])
def test_a_form_has_the_samples_of_the_synchronous_dataset(name: str, form: str) -> None:
    found = []
    for each in (None, form):
        with WORKS[name].opened(form=each) as dataset:
            found += asyncio.run(loaded((dataset, 7)))
    assert torch.equal(*found)


@pytest.mark.parametrize("engine", ["torch", "dpex"])
def test_a_measurement_is_a_course_with_batches(engine: Any) -> None:
    course = measure(Request(row="floats", contestant=Contestant(engine=engine, workers=1), window_s=0.05))
    assert course.batches > 0
    assert course.seconds >= 0.05

"""An attribute that is set after samples were cached is an error that names it; other changes give right samples."""

import threading
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset, Subset

import dpex
from dpex.cache import memory_store
from dpex.errors import CacheError
from dpex.transport.pickling import pack, unpack


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the caches of a test in a folder of its own."""
    monkeypatch.setattr(memory_store, "SHARED_MEMORY", tmp_path)


class Scaled(Dataset[Any]):
    """Opens something at its first sample."""

    size = 1

    def __init__(self) -> None:
        self.scale: Any = 1
        self._file: Any = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if self._file is None:
            self._file = [index]
        return index * self.scale * self.size

    def double(self) -> None:
        self.scale *= 2

    @cached_property
    def labels(self) -> list[int]:
        return [0]


def cached(dataset: Any = None, **options: Any) -> Any:
    return dpex.cached(dataset or Scaled(), **{"memory": "1MB", **options})


def test_an_attribute_set_before_a_sample_is_one_of_the_dataset() -> None:
    found = cached()
    found.scale = 3
    found.note = "new"
    assert (found.dataset.scale, found.dataset.note, found.note) == (3, "new", "new")
    del found.note
    assert not hasattr(found.dataset, "note")
    assert found[2] == 6


@pytest.mark.parametrize("how", ["set", "method", "inside", "delete", "new"])
def test_a_change_after_a_sample_is_an_error_that_names_it(how: str) -> None:
    def change(found: Any) -> None:
        if how == "set":
            found.scale = 2
        elif how == "method":
            found.double()
        elif how == "inside":
            found.dataset.scale = 2
        elif how == "delete":
            del found.scale
        else:
            found.size = 2
        found[2]

    found = cached()
    assert found[2] == 2
    with pytest.raises(
        CacheError, match=f"attribute '{'size' if how == 'new' else 'scale'}' of Scaled .*before the first"
    ):
        change(found)
    if how in ("set", "delete", "new"):
        assert (found.scale, found.size, found[2], found[3]) == (1, 1, 2, 3), "it was not set"
    else:
        for index in (2, 3):  # one that is kept, and one that is not
            with pytest.raises(CacheError, match="attribute 'scale'"):
                found[index]


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_another_process_with_another_value_is_refused(where: str, tmp_path: Path) -> None:
    pytest.importorskip("lmdb")
    on_disk = {"memory": 0, "disk": tmp_path / "disk", "version": 1}
    found = cached(**(on_disk if where == "disk" else {}))
    found.scale = 2
    found[1]
    other, third = (unpack(*pack(found)) for _ in range(2))
    assert other[1] == 2
    other.scale = 2
    assert other[2] == 4
    with pytest.raises(CacheError, match="attribute 'scale'"):
        other.scale = 3
    third.dataset.scale = 1
    for index in (1, 5):
        with pytest.raises(CacheError, match="attribute 'scale'"):
            third[index]


def test_own_assignments_and_equal_values_are_no_change(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("text")
    found = cached()
    found.table = np.arange(3)
    found.handle = (tmp_path / "data").open()
    found.lock, found.rng = threading.Lock(), np.random.default_rng(1)
    assert found[1] == 1  # which opens a file
    assert found.labels == [0]
    found.scale, found.size, found.table = 1, 1, np.arange(3)
    found.handle = (tmp_path / "data").open()
    found.lock, found.rng = threading.Lock(), np.random.default_rng(2)
    assert [found[1], found[2]] == [1, 2]
    with pytest.raises(CacheError, match="attribute 'table'"):
        found.table = np.arange(4)


def test_a_closed_file_may_be_opened_again() -> None:
    found = cached()
    for index in (1, 2):
        assert found[index] == index
        found.dataset._file = None
        assert found[index] == index


def test_an_attribute_of_a_dataset_within_counts_too() -> None:
    inner = Scaled()
    found = cached(Subset(inner, [4, 5]))
    inner.scale = 2
    assert found[0] == 8
    inner.scale = 3
    with pytest.raises(CacheError, match=r"attribute 'dataset\.scale' of Subset"):
        found[0]


def test_a_cache_within_counts_nothing_of_its_own() -> None:
    class Around(Dataset[int]):
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            return int(self.inner[index])

    inner = cached()
    found = cached(Around(inner))
    assert [found[1], inner[2], found[1]] == [1, 2, 1]


def test_names_of_the_cache_cannot_be_set() -> None:
    with pytest.raises(AttributeError, match="'key' belongs to the cache of Scaled"):
        cached().key = "other"


def test_many_changes_fit_into_the_cache() -> None:
    found = cached()
    for number in range(300):
        setattr(found, f"attribute_{number}", number)
    assert found[1] == 1
    other = unpack(*pack(found))
    assert other[1] == 1
    other.dataset.attribute_7 = 8
    with pytest.raises(CacheError, match="another value"):
        other[1]


def test_a_failed_sample_notes_nothing() -> None:
    class Closed(Scaled):
        data: Any = None

        def __getitem__(self, index: int) -> Any:
            return self.data[index]

    found = cached(Closed())
    with pytest.raises(TypeError):
        found[1]
    found.data = list(range(8))
    assert found[1] == 1

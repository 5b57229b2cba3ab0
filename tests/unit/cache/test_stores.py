"""The two stores of encoded samples: what they keep, what they refuse, and what is left of damaged and cut files."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpex.cache import disk_store, memory_store
from dpex.cache.disk_store import DiskStore
from dpex.cache.encoding import decoded, encoded
from dpex.cache.memory_store import MemoryStore
from dpex.errors import CacheError, OptionError

MANY = 100
NOISE = np.random.default_rng(0).integers(0, 256, 20_000, dtype=np.uint8)


@pytest.fixture(params=["memory", "disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Open a store of one kind, again and again; ``budget`` is in bytes."""
    if request.param == "disk":
        pytest.importorskip("lmdb")
        return lambda budget=1 << 26: DiskStore(tmp_path / "cache" / "key", budget, "Data", MANY)
    return lambda budget=1 << 26: MemoryStore(tmp_path / "cache" / "key.samples", MANY, budget, "Data")


def sample(index: int, size: int = 1000) -> Any:
    return {"index": index, "array": np.full(size, index, np.uint8)}


def value(found: Any) -> int:
    assert found is not None
    return int(decoded(found[0])["array"][-1])


@pytest.mark.parametrize("size", [10, 1000, 300_000, 2_000_000])
def test_what_is_put_in_comes_out_with_its_cost(place: Any, size: int) -> None:
    store = place()
    assert store.get(7) is None
    assert store.put(7, encoded(sample(7, size)), 1234)
    assert value(store.get(7)) == 7
    assert store.get(7)[1] == 1234
    assert store.get(8) is None
    stored = store.stored()
    assert (stored.samples, stored.kept) == (MANY, 1)
    assert size <= stored.nbytes <= size + 20_000


@pytest.mark.parametrize("size", [20_000, 100_000, 1_600_000, 12_000_000])
def test_huge_pages_are_made_once_and_ahead_of_what_is_written(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, made = MemoryStore(tmp_path / "cache" / "key.samples", MANY, 45_000_000, "Data"), []

    def advise(_memory: Any, advice: int, start: int, nbytes: int) -> bool:
        if advice == memory_store._MADV_COLLAPSE:
            made.append((start, start + nbytes))
        return True

    monkeypatch.setattr(memory_store, "advise", advise)
    kept = [index for index in range(MANY) if store.put(index, encoded(sample(index, size)), 1)]
    used = store.stored().nbytes
    end = made[-1][1] if made else 0
    assert [start for start, _ in made] == [0, *(end for _, end in made)][: len(made)], "each part once"
    assert min(2 * used - (4 << 20), 44_000_000 // (2 << 20) * (2 << 20)) <= end
    assert end <= min(2 * used + memory_store.PAGE * 2, store._table.nbytes)
    assert [value(store.get(index)) for index in kept] == kept


def test_the_budget_is_kept_and_what_came_first_stays(place: Any) -> None:
    store = place(2_000_000)
    kept = [index for index in range(MANY) if store.put(index, encoded(sample(index, 100_000)), 1)]
    assert kept == list(range(len(kept)))
    assert 12 <= len(kept) < 20
    assert not store.put(99, encoded(sample(99, 10)), 1)
    assert store.stored().nbytes <= 2_000_000
    assert [value(store.get(index)) for index in kept] == kept


@pytest.mark.parametrize("size", [1000, 2_000_000])
def test_a_change_of_a_sample_reaches_no_other_reader(place: Any, size: int) -> None:
    store = place()
    store.put(3, encoded(sample(3, size)), 1)
    decoded(store.get(3)[0])["array"][:] = 0
    assert value(store.get(3)) == 3


def test_a_store_of_no_samples_is_described(tmp_path: Path) -> None:
    stored = MemoryStore(tmp_path / "cache" / "key.samples", 0, 1000, "Data").stored()
    assert (stored.samples, stored.kept, stored.nbytes) == (0, 0, 0)


def test_a_held_file_outlives_its_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_store, "memory_folder", lambda: tmp_path / "own")
    path = memory_store.path_of("key")
    store = MemoryStore(path, MANY, 1 << 20, "Data")
    store.put(1, encoded(sample(1)), 1)
    held = memory_store.hold_all()
    del store
    assert value(MemoryStore(path, MANY, 1 << 20, "Data").get(1)) == 1
    del held
    assert not path.exists()


def test_files_that_killed_processes_left_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    store = MemoryStore(folder / "store.samples", MANY, 1 << 20, "Data")
    store.put(1, encoded(sample(1)), 1)
    for name in ("left", "again"):
        (folder / f"{name}.samples").write_bytes((folder / "store.samples").read_bytes())
    del store
    store = MemoryStore(folder / "again.samples", MANY, 1 << 20, "Data")
    assert store.get(1) is None
    assert [path.name for path in folder.glob("*.samples")] == ["again.samples"]


def test_an_entry_that_is_half_seen_is_no_sample(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path / "own" / "key.samples", MANY, 1 << 20, "Data")
    store.put(5, encoded(sample(5)), 1)
    store._table[memory_store.PAGE + 5 * memory_store._ENTRY.size + 8] ^= 1
    assert store.get(5) is None


@pytest.mark.parametrize("length", [0, 100, memory_store.PAGE + 50])
def test_a_file_that_was_cut_off_begins_anew(tmp_path: Path, length: int) -> None:
    path = tmp_path / "own" / "key.samples"
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"\xff" * length)
    store = MemoryStore(path, MANY, 1 << 20, "Data")
    assert store.get(1) is None
    assert store.put(1, encoded(sample(1)), 1)


def test_samples_that_were_cut_off_are_not_there(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path / "own" / "key.samples", MANY, 1 << 23, "Data")
    for index, size in ((1, 1000), (2, 2_000_000)):
        store.put(index, encoded(sample(index, size)), 1)
    os.truncate(tmp_path / "own" / "key.samples", store._begins + 100)
    assert store.get(1) is None
    assert store.get(2) is None


def test_a_small_shared_memory_is_found_out_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_store, "room", lambda: 300_000)
    store = MemoryStore(tmp_path / "own" / "key.samples", MANY, 8 << 30, "Data")
    assert store.stored().budget <= 300_000
    assert "--shm-size" in caplog.text
    assert MemoryStore(tmp_path / "own" / "other.samples", MANY, None, "Data").stored().budget <= 150_000


def test_a_folder_that_others_can_change_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(CacheError, match="other users can change"):
        MemoryStore(folder / "key.samples", MANY, 1 << 20, "Data")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("lmdb")
    return tmp_path / "cache" / "key"


def test_a_cache_on_disk_is_there_in_the_next_run(folder: Path) -> None:
    store = DiskStore(folder, 1 << 24, "Data", MANY)
    store.put(1, encoded(sample(1)), 1)
    del store
    assert value(DiskStore(folder, 1 << 24, "Data", MANY).get(1)) == 1


@pytest.mark.parametrize("damage", ["a bit", "exchanged"])
def test_a_damaged_sample_is_not_read_and_made_again(folder: Path, damage: str) -> None:
    store = DiskStore(folder, 1 << 24, "Data", MANY)
    for index in range(5):
        store.put(index, encoded({"array": np.full(50_000, index, np.uint8), "noise": NOISE}), 1)
    del store
    data = bytearray((folder / "data.mdb").read_bytes())
    at = data.find(b"\3" * 40_000)
    assert at > 0
    if damage == "a bit":
        data[at] ^= 1
    else:
        noise = data.find(NOISE.tobytes(), at)
        one, other = (slice(start, start + 4096) for start in (noise, noise + 8192))
        data[one], data[other] = data[other], data[one]
    (folder / "data.mdb").write_bytes(data)
    store = DiskStore(folder, 1 << 24, "Data", MANY)
    assert [index for index in range(5) if store.get(index) is None] == [3]
    assert store.put(3, encoded(sample(3, 50_000)), 1)
    assert value(store.get(3)) == 3


@pytest.mark.parametrize("kept_bytes", [0, 100, 200_000])
def test_a_cut_off_file_on_disk_begins_anew(folder: Path, kept_bytes: int) -> None:
    store = DiskStore(folder, 1 << 24, "Data", MANY)
    for index in range(10):
        store.put(index, encoded(sample(index, 50_000)), 1)
    del store
    os.truncate(folder / "data.mdb", kept_bytes)
    store = DiskStore(folder, 1 << 24, "Data", MANY)
    assert [index for index in range(10) if store.get(index) is not None] == []
    assert store.put(3, encoded(sample(3)), 1)


def test_one_folder_of_two_names_has_one_store(folder: Path, tmp_path: Path) -> None:
    one = disk_store.opened(folder, 1 << 24, "Data", MANY)
    (tmp_path / "link").symlink_to(folder.parent)
    assert disk_store.opened(tmp_path / "link" / folder.name, 1 << 24, "Data", MANY) is one


def test_a_folder_that_was_removed_ends_the_filling(folder: Path) -> None:
    store = DiskStore(folder, 1 << 24, "Data", MANY)
    shutil.rmtree(folder)
    assert not store.put(3, encoded(sample(3)), 1)
    assert "cannot be written" in store.why_full


def test_the_error_without_lmdb_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(OptionError, match=r"pip install 'dpex\[cache\]'"):
        DiskStore(tmp_path / "cache" / "key", 1 << 24, "Data", MANY)

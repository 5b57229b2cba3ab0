"""The store of encoded samples in memory and on disk: what it keeps and refuses, and what is left of damaged files."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpex.cache import files
from dpex.cache import store as store_module
from dpex.cache.encoding import decoded, encoded
from dpex.cache.store import MemoryStore, Store
from dpex.errors import CacheError

MANY = 100
NOISE = np.random.default_rng(0).integers(0, 256, 20_000, dtype=np.uint8)


@pytest.fixture(params=["memory", "disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Open a store of one kind, again and again; ``budget`` is in bytes."""
    kind = Store if request.param == "disk" else MemoryStore
    return lambda budget=1 << 26: kind(tmp_path / "cache" / "key.samples", MANY, budget, "Data")


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
    assert size <= stored.nbytes <= size + 1000


@pytest.mark.parametrize("size", [20_000, 100_000, 1_600_000, 12_000_000])
def test_huge_pages_are_made_once_and_ahead_of_what_is_written(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, made = MemoryStore(tmp_path / "cache" / "key.samples", MANY, 45_000_000, "Data"), []

    def advise(_memory: Any, advice: int, start: int, nbytes: int) -> bool:
        if advice == store_module._MADV_COLLAPSE:
            made.append((start, start + nbytes))
        return True

    monkeypatch.setattr(store_module, "advise", advise)
    kept = [index for index in range(MANY) if store.put(index, encoded(sample(index, size)), 1)]
    used = store.stored().nbytes
    end = made[-1][1] if made else 0
    assert [start for start, _ in made] == [0, *(end for _, end in made)][: len(made)], "each part once"
    assert min(2 * used - (4 << 20), 44_000_000 // (2 << 20) * (2 << 20)) <= end
    assert end <= min(2 * used + store_module.PAGE * 2, store._table.nbytes)
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
    monkeypatch.setattr(files, "memory_folder", lambda: tmp_path / "own")
    path = files.path_of("key")
    store = MemoryStore(path, MANY, 1 << 20, "Data")
    store.put(1, encoded(sample(1)), 1)
    held = files.hold_all_stores()
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
    store._table[store_module.PAGE + 5 * store_module._ENTRY.size + 8] ^= 1
    assert store.get(5) is None


@pytest.mark.parametrize("length", [0, 100, store_module.PAGE + 50])
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
    monkeypatch.setattr(files, "store_room", lambda: 300_000)
    store = MemoryStore(tmp_path / "own" / "key.samples", MANY, 8 << 30, "Data")
    assert store.stored().budget <= 300_000
    assert "only 300,000 bytes are free" in caplog.text
    assert "or give disk=" in caplog.text
    assert MemoryStore(tmp_path / "own" / "other.samples", MANY, None, "Data").stored().budget <= 150_000


def test_a_folder_that_others_can_change_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(CacheError, match="other users can change"):
        MemoryStore(folder / "key.samples", MANY, 1 << 20, "Data")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "key" / "samples"


def noisy(index: int) -> Any:
    return encoded({"array": np.full(50_000, index, np.uint8), "noise": NOISE})


def filled(path: Path) -> list[bytes]:
    """Keep five samples on disk; return the bytes of the file and of one sample in it."""
    store = Store(path, MANY, 1 << 24, "Data")
    for index in range(5):
        store.put(index, noisy(index), 1)
    return [path.read_bytes(), b"\3" * 40_000]


def kept(store: Any) -> list[int]:
    return [index for index in range(5) if store.get(index) is not None]


def test_a_cache_on_disk_is_there_in_the_next_run(path: Path) -> None:
    filled(path)
    store = Store(path, MANY, 1 << 24, "Data")
    assert [value(store.get(index)) for index in range(5)] == list(range(5))


def flipped(data: bytearray, at: int) -> None:
    data[at] ^= 1


def exchanged(data: bytearray, at: int) -> None:
    """Exchange two blocks of noise."""
    noise = data.find(NOISE.tobytes(), at)
    one, other = (slice(start, start + 4096) for start in (noise, noise + 8192))
    data[one], data[other] = data[other], data[one]


def of_another(data: bytearray, at: int) -> None:
    """Have the entry of one sample stand for another one."""
    entry = store_module._ENTRY.size
    one, other = (store_module.PAGE + index * entry for index in (3, 4))
    data[one : one + entry] = data[other : other + entry]


@pytest.mark.parametrize("damage", [flipped, exchanged, of_another])
def test_a_damaged_sample_is_not_read_and_made_again(path: Path, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    data, sought = filled(path)
    changed = bytearray(data)
    damage(changed, changed.find(sought))
    path.write_bytes(changed)
    store = Store(path, MANY, 1 << 24, "Data")
    assert [kept(store), kept(store)] == [[0, 1, 2, 4]] * 2
    assert caplog.text.count(f"{path} is damaged or was cut off: sample 3") == 1
    assert store.put(3, encoded(sample(3, 50_000)), 1)
    assert value(store.get(3)) == 3


@pytest.mark.parametrize(("cut", "left"), [(0, []), (100, []), (5000, []), (250_000, [0, 1, 2])])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_cut_off_file_gives_only_whole_samples(
    path: Path, cut: int, left: list[int], is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is cut off between two runs, or while a process reads it."""
    filled(path)
    store = Store(path, MANY, 1 << 24, "Data") if is_open else None
    os.truncate(path, cut)
    store = store or Store(path, MANY, 1 << 24, "Data")
    assert kept(store) == left
    is_usable = not is_open or cut > 5000
    assert store.put(3, encoded(sample(3)), 1) is is_usable
    assert store.why_full == ("" if is_usable else "it was cut off, or its disk fails")
    if is_usable:
        assert f"{path} is damaged or was cut off" in caplog.text or cut == 0
        assert value(Store(path, MANY, 1 << 24, "Data").get(3)) == 3


def test_an_older_end_of_the_space_gives_no_wrong_sample(path: Path) -> None:
    """As a machine that failed leaves it: the header is older than the entries, so new samples overwrite others."""
    filled(path)
    with path.open("r+b") as file:
        file.seek(store_module._AT["used"])
        file.write(bytes(8))
    store = Store(path, MANY, 1 << 24, "Data")
    for index in range(10, 13):
        assert store.put(index, noisy(index), 1)  # exactly where another sample was
    assert [value(store.get(index)) for index in [*kept(store), 10, 11, 12]] == [3, 4, 10, 11, 12]


def test_counts_of_events_end_with_the_last_user(path: Path) -> None:
    store = Store(path, MANY, 1000, "Data")
    assert not store.put(1, encoded(sample(1, 5000)), 1)
    assert [store.is_first("left_out") for _ in range(2)] == [True, False]
    assert not Store(path, MANY, 1 << 20, "Data").is_first("left_out"), "a budget of others counts"
    del store
    store = Store(path, MANY, 1 << 20, "Data")
    assert store.is_first("left_out")
    assert store.put(1, encoded(sample(1, 5000)), 1)


def test_a_folder_that_was_removed_serves_its_users(path: Path) -> None:
    store = Store(path, MANY, 1 << 24, "Data")
    shutil.rmtree(path.parent)
    assert store.put(3, encoded(sample(3)), 1)
    assert value(store.get(3)) == 3
    assert not path.parent.exists()


def test_a_file_of_another_length_is_not_replaced_in_use(path: Path) -> None:
    store = Store(path, MANY, 1 << 24, "Data")
    with pytest.raises(CacheError, match=f"{path} is damaged, or is no cache of {MANY + 1} samples"):
        Store(path, MANY + 1, 1 << 24, "Data")
    assert store.put(3, encoded(sample(3)), 1)


@pytest.mark.parametrize("where", [".", "0123456789abcdef" * 2])
def test_what_lmdb_wrote_is_refused_by_name(where: str, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "data.mdb").touch()  # of a user's own, in another folder
    files.folder_of(tmp_path, "f" * 32)
    (tmp_path / where).mkdir(exist_ok=True)
    (tmp_path / where / "data.mdb").touch()
    with pytest.raises(CacheError, match=r"data\.mdb was written by LMDB, .*; give another disk=, or remove "):
        files.folder_of(tmp_path, "f" * 32)

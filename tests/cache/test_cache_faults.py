"""`dpex.cached` with real workers and trainings: torch's batches, one copy for all, and each fault of a cache."""

import contextlib
import logging
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import Of, seeded
from forks import ended, in_a_child, started
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info
from waiting import meet, until
from workload import wait_as_work

import dpex
from dpex import DpexDataLoader
from dpex.cache import files
from dpex.cache import store as store_module
from dpex.cache.encoding import decoded, encoded
from dpex.cache.store import MemoryStore, Store
from dpex.errors import CacheError

only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
LENGTH = 24
NOBODY = 65534


class Images(Dataset[torch.Tensor]):
    """Notes each sample that is prepared as a file in ``made``, if given."""

    def __init__(self, made: Path | None = None) -> None:
        self.made = made

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        image = torch.full((30_000,), float(index))
        if self.made is not None:
            (self.made / f"{index} {uuid.uuid4().hex}").touch()
        return image


class Augmented(Dataset[torch.Tensor]):
    """Draws from all generators."""

    def __init__(self, images: Any) -> None:
        self.images = images

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        image: torch.Tensor = self.images[index]
        image += torch.rand(1) + random.random() + np.random.rand()  # in place: no other epoch may see it
        return image


def cached(dataset: Any, **options: Any) -> Any:
    return dpex.cached(dataset, **{"memory": "20MB", "version": uuid.uuid4().hex, **options})


def batches(make: Callable[..., Any], dataset: Any, **options: Any) -> list[torch.Tensor]:
    """Return the batches of two epochs, and numbers that the trainer draws afterwards."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    loader = make(dataset, batch_size=4, shuffle=True, generator=seeded(), **options)
    found = [batch for _ in range(2) for batch in loader]
    return [*found, torch.tensor([random.random(), np.random.rand(), torch.rand(1)])]


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.smoke
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_torchs_and_the_second_epoch_is_read(workers: int, tmp_path: Path) -> None:
    expected = batches(DataLoader, Augmented(Images()), num_workers=workers)
    dataset = cached(Images(tmp_path))
    assert_same(expected, batches(DpexDataLoader, Augmented(dataset), num_workers=workers))
    checked = 2 * (workers or 1)
    assert len(list(tmp_path.iterdir())) == LENGTH + checked
    assert dataset.stored()["memory"].kept == LENGTH


def test_seeding_by_batch_is_as_without_a_cache(tmp_path: Path) -> None:
    options = {"num_workers": 2, "seeding": "batch"}
    dataset = cached(Images(), disk=tmp_path, memory=0)
    plain, found = (batches(DpexDataLoader, Augmented(one), **options) for one in (Images(), dataset))
    assert_same(plain, found)
    assert {where: stored.kept for where, stored in dataset.stored().items()} == {"disk": LENGTH}


def test_spawned_workers_share_the_cache(tmp_path: Path) -> None:
    dataset = cached(Images(tmp_path))
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    with DpexDataLoader(dataset, batch_size=4, **options) as loader:
        for misses in (LENGTH, 0):
            list(loader)
            pool = loader.stats().pools["local"]
            assert (pool.cache_hits, pool.cache_misses) == (LENGTH - misses, misses)
    assert len(list(tmp_path.iterdir())) == LENGTH + 2


class Opened(Dataset[torch.Tensor]):
    handle: Any = None
    scale = 1

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.handle[index] * self.scale)

    def open(self) -> None:
        self.handle = list(range(LENGTH))


def opened_dataset() -> Any:
    dataset: Any = get_worker_info()
    return dataset.dataset


def opens(_: int) -> None:
    opened_dataset().handle = list(range(LENGTH))


def opens_by_method(_: int) -> None:
    opened_dataset().open()


def opens_and_scales(worker: int) -> None:
    opened_dataset().open()
    opened_dataset().scale = 2


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize(("init", "scale"), [(opens, 1), (opens_by_method, 1), (opens_and_scales, 2)])
def test_worker_init_fn_sets_attributes_of_the_dataset(init: Any, scale: int, start: str) -> None:
    dataset = cached(Opened())
    shape: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "multiprocessing_context": start}
    with DpexDataLoader(dataset, **shape, worker_init_fn=init) as loader:
        for _ in range(3 if start == "fork" else 2):
            assert torch.equal(torch.cat(list(loader)), scale * torch.arange(LENGTH))
        assert loader.stats().pools["local"].cache_misses == 0


def test_another_attribute_in_the_second_epoch_is_an_error() -> None:
    dataset = cached(Opened())
    dataset.scale = 2
    with DpexDataLoader(dataset, batch_size=4, num_workers=1, worker_init_fn=opens) as loader:
        list(loader)
        dataset.scale = 2
        with pytest.raises(CacheError, match="attribute 'scale' of Opened"):
            dataset.scale = 3
        assert torch.equal(torch.cat(list(loader)), 2 * torch.arange(LENGTH))


class Batched(Dataset[torch.Tensor]):
    """Loads samples together only, and notes each request."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __len__(self) -> int:
        return LENGTH

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        (self.made / f"{len(indices)} {uuid.uuid4().hex}").touch()
        return [torch.tensor(index) for index in indices]


@pytest.mark.parametrize("make", [DataLoader, DpexDataLoader])
@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(LENGTH))], ids=["alone", "subset"])
def test_what_is_missing_in_a_batch_is_loaded_at_once(make: Any, wrap: Any, tmp_path: Path) -> None:
    loader = make(cached(wrap(Batched(tmp_path))), batch_size=6, num_workers=1)
    for _ in range(2):
        assert torch.equal(torch.cat(list(loader)), torch.arange(LENGTH))
    assert sorted(path.name[:2] for path in tmp_path.iterdir()) == ["2 ", *["6 "] * 4], "two samples are prepared twice"


def late_at(index: int) -> int:
    """Takes more than half of a time limit for a sample. The rest is for the start of a worker on a busy machine."""
    wait_as_work(2.6)
    return index


def test_a_second_preparation_counts_against_no_policy() -> None:
    policy = dpex.SamplePolicy(timeout_s=5)
    loader = DpexDataLoader(cached(Of(late_at, 2)), batch_size=1, num_workers=2, sample_policy=policy)
    assert torch.cat(list(loader)).tolist() == [0, 1]


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_worker_killed_while_writing_leaves_no_partial_sample(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed with half of the sample written."""
    killed = tmp_path / "killed"
    write = store_module._write_all

    def half_written(fd: int, at: int, parts: Any) -> None:
        if at > store_module.PAGE + LENGTH * store_module._ENTRY.size:  # a sample, not an entry
            with contextlib.suppress(FileExistsError):
                killed.touch(exist_ok=False)
                os.pwrite(fd, bytes(parts[0])[:60_000] + b"\xff" * 1000, at)
                os.kill(os.getpid(), signal.SIGKILL)
        write(fd, at, parts)

    monkeypatch.setattr(store_module, "_write_all", half_written)
    dataset = cached(Images(), **({} if kind == "memory" else {"memory": 0, "disk": tmp_path / "disk"}))
    with DpexDataLoader(dataset, batch_size=2, num_workers=2) as loader:
        for _ in range(2):
            with warnings.catch_warnings(action="ignore"):  # of the worker that was killed
                found = torch.cat(list(loader))
            assert torch.equal(found, torch.arange(float(LENGTH)).repeat_interleave(30_000).view(LENGTH, -1))
        assert loader.stats().pools["local"].cache_misses == 0
    assert killed.exists()
    assert dataset.stored()[kind].kept == LENGTH


def test_kills_at_any_moment_of_writing_leave_whole_samples(tmp_path: Path) -> None:
    """Two processes fill a file on disk in turns, and are killed where they are, again and again."""
    path, many = tmp_path / "disk" / "key" / "samples", 4000

    def fill(step: int) -> None:
        store = Store(path, many, 1 << 30, "Images")
        for index in range(many)[::step]:
            if store.get(index) is None:
                store.put(index, encoded(np.full(20_000, index % 251, np.uint8)), 1)

    kept = 0
    for _ in range(5):
        fillers = [started(partial(fill, step)) for step in (1, -1)]
        store = Store(path, many, 1 << 30, "Images")
        until(lambda: store.stored().kept >= kept + 50)  # noqa: B023
        for pid in fillers:
            os.kill(pid, signal.SIGKILL)
            ended(pid)
        del store
        store = Store(path, many, 1 << 30, "Images")
        found = {index: store.get(index) for index in range(many)}
        whole = {index: decoded(one[0]) for index, one in found.items() if one is not None}
        assert all(len(one) == 20_000 and (one == index % 251).all() for index, one in whole.items())
        assert len(whole) > kept
        kept = len(whole)


def test_two_trainings_fill_one_cache_and_the_last_removes_it(tmp_path: Path) -> None:
    made, met = tmp_path / "made", tmp_path / "met"
    made.mkdir()
    met.mkdir()
    options = {"disk": tmp_path / "disk", "name": "images", "version": uuid.uuid4().hex}

    def train(step: int) -> None:
        dataset = cached(Images(made), **options)
        meet(met, 2)
        for _ in range(3):
            for index in range(LENGTH)[::step]:
                assert (dataset[index] == index).all()
        assert dataset.stored()["memory"].kept == LENGTH

    assert [ended(pid) for pid in [started(partial(train, step)) for step in (1, -1)]] == [0, 0]
    assert LENGTH <= len(list(made.iterdir())) <= 2 * LENGTH
    again = cached(Images(made), **options)
    assert (again.stored()["memory"].kept, again.stored()["disk"].kept) == (0, LENGTH)
    path = files.path_of(again.key)
    assert path.exists()
    del again
    assert not path.exists()


def test_two_processes_samples_survive_the_move_to_huge_pages() -> None:
    """Each writes every second sample while the other one has the kernel move pages."""
    path = files.path_of(uuid.uuid4().hex)
    store = MemoryStore(path, 100, 1 << 25, "Data")

    def write(first: int) -> None:
        for index in range(first, 100, 2):
            store.put(index, encoded(np.full(200_000, index, np.uint8)), 1)

    assert [ended(pid) for pid in [started(partial(write, first)) for first in range(2)]] == [0, 0]
    for index in range(100):
        found = store.get(index)
        assert found is not None
        assert (decoded(found[0]) == index).all()
    unit = store_module.HUGE_PAGE
    if not store_module.advise(store._memory, store_module._MADV_COLLAPSE, unit, unit):
        pytest.skip("this kernel makes no huge pages of shared memory")
    (mapped,) = (part for part in Path("/proc/self/smaps").read_text().split("VmFlags") if f"{path.name}\n" in part)
    huge_kb = re.search(r"ShmemPmdMapped: +(\d+) kB", mapped)
    assert huge_kb is not None
    assert int(huge_kb[1]) >= 16 << 10, "most of 20 MB"


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[Path]:
    """The file with what this process and its workers log."""
    handler = logging.FileHandler(tmp_path / "log")
    logging.getLogger("dpex").addHandler(handler)
    yield tmp_path / "log"
    logging.getLogger("dpex").removeHandler(handler)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    place = tmp_path / "small"
    place.mkdir()
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", place], check=False).returncode:
        pytest.skip("only root can mount a file system")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_full_disk_ends_filling_with_one_warning_not_reading(small_disk: Path, logged: Path) -> None:
    dataset = cached(Images(), memory=0, disk=small_disk, disk_budget="100MB")
    with DpexDataLoader(dataset, batch_size=4, num_workers=2) as loader:
        for _ in range(2):
            assert [batch[:, 0].tolist() for batch in loader] == torch.arange(float(LENGTH)).view(-1, 4).tolist()
        kept = dataset.stored()["disk"].kept
        assert 10 <= kept < LENGTH
        assert loader.stats().pools["local"].cache_hits == kept
    text = logged.read_text()
    file = small_disk / dataset.key / "samples"
    assert text.count("and no more: No space left on device") == text.count("and no more") == text.count(str(file)) == 1


class Endless(Images):
    def __len__(self) -> int:
        return 10**12


def test_a_table_beyond_all_memory_is_refused_before_it_is_made() -> None:
    """To take shared memory until there is no more makes the kernel end other processes."""
    with pytest.raises(CacheError, match="no room for the table of 1000000000000 samples"):
        cached(Endless(), memory="1MB")


def test_a_full_shared_memory_ends_the_filling(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when others take it after the cache was made: the budget is not used up."""
    monkeypatch.setattr(files, "SHARED_MEMORY", small_disk)
    monkeypatch.setattr(files, "store_room", lambda: 1 << 30)
    dataset = cached(Images(), memory="100MB")
    for _ in range(2):
        assert [dataset[index][0].item() for index in range(LENGTH)] == list(range(LENGTH))
    assert 10 <= dataset.stored()["memory"].kept < LENGTH


@only_root
@pytest.mark.parametrize("place", ["disk", "disk/key", "memory"])
def test_a_folder_of_another_user_is_refused(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = cached(Images(), name="images", version="1", disk=tmp_path / "disk")
    dataset[0]
    key = dataset.key
    del dataset
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path / "shm")
    files.own_folder(files.memory_folder())
    folders = {"disk": tmp_path / "disk", "disk/key": tmp_path / "disk" / key, "memory": files.memory_folder()}
    os.chown(folders[place], NOBODY, NOBODY)
    with pytest.raises(CacheError, match=f"user {NOBODY}"):
        cached(Images(), name="images", version="1", disk=tmp_path / "disk")


@pytest.mark.parametrize("damage", ["", "cut off in a sample", "cut off in the table"])
def test_a_read_only_file_system_is_read(small_disk: Path, damage: str, logged: Path) -> None:
    options: dict[str, Any] = {"memory": 0, "disk": small_disk, "disk_budget": "2MB", "version": "1"}
    dataset = cached(Images(), **options)
    for index in range(11 if damage else 10):
        dataset[index]
    file = small_disk / dataset.key / "samples"
    del dataset
    if damage:
        os.truncate(file, 100 if damage.endswith("table") else file.stat().st_size - 1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    if damage.endswith("table"):
        with pytest.raises(CacheError, match=f"{file} is damaged, .* as it is read-only"):
            cached(Images(), **options)
        return
    dataset = cached(Images(), **options)
    with DpexDataLoader(dataset, batch_size=4, num_workers=1) as loader:
        for _ in range(2):
            assert [batch[:, 0].tolist() for batch in loader] == torch.arange(float(LENGTH)).view(-1, 4).tolist()
            assert loader.stats().pools["local"].cache_hits == 10
    assert f"{file} takes no samples: it is read-only" in logged.read_text()
    assert (f"{file} is damaged or was cut off: sample 10" in logged.read_text()) is bool(damage)


def test_a_limit_of_file_sizes_ends_the_filling(tmp_path: Path, logged: Path) -> None:
    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, 700_000))
        dataset = cached(Images(), memory=0, disk=tmp_path / "disk", version="1")
        for _ in range(2):
            assert [dataset[index][0].item() for index in range(LENGTH)] == list(range(LENGTH))
        assert dataset.stored()["disk"].kept == 5

    in_a_child(fill)
    assert logged.read_text().count("/samples keeps 5 of 24 samples") == logged.read_text().count("File too large") == 1
    dataset = cached(Images(), memory=0, disk=tmp_path / "disk", version="1")
    assert [dataset[index][0].item() for index in range(LENGTH)] == list(range(LENGTH))
    assert dataset.stored()["disk"].kept == LENGTH


def test_a_random_sample_sets_aside_what_earlier_runs_stored(tmp_path: Path, logged: Path) -> None:
    """The samples that two trainings share stay on disk, and no later run reads them."""
    drawn = tmp_path / "drawn"
    drawn.mkdir()
    options: dict[str, Any] = {"memory": 0, "disk": tmp_path / "disk", "version": "1", "on_random": "skip"}
    other = cached(Noted(drawn), **options)
    for index in range(10):
        other[index]
    (drawn / "now").touch()
    dataset = cached(Noted(drawn), **options)
    with DpexDataLoader(dataset, batch_size=4, num_workers=2) as loader:
        assert [batch[:, 0].tolist() for batch in loader] == torch.arange(float(LENGTH)).view(-1, 4).tolist()
    aside = tmp_path / "disk" / f"{dataset.key}.aside"
    assert dataset.is_random
    assert other.is_random
    text = logged.read_text()
    assert text.count("is not cached, as its sample") == text.count(f"they were set aside, in {aside}") == 1
    later = cached(Noted(drawn), **options)
    assert later.stored() == {}
    assert later[3][0] == 3
    assert f"remove {aside} to begin anew, rename it to {dataset.key} to read it" in logged.read_text()
    with pytest.raises(CacheError, match=f"remove {aside}"):
        cached(Noted(drawn), **{**options, "on_random": "raise"})
    del dataset, other
    aside.rename(aside.with_suffix(""))
    assert cached(Noted(drawn), **options).stored()["disk"].kept >= 10


class Noted(Images):
    """Draws a random number once there is a file ``now`` in ``made``."""

    def __getitem__(self, index: int) -> torch.Tensor:
        assert self.made is not None
        if (self.made / "now").exists():
            torch.rand(1)
        return torch.full((30_000,), float(index))


def test_a_process_forked_after_file_removal_shares_the_lock(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path / "cache" / "key.samples", 100, 1 << 20, "Data")
    shutil.rmtree(tmp_path / "cache")  # as systemd does when the user logs out
    lock = os.fstat(store._claims._fd)

    def fill() -> None:
        assert store.put(3, encoded(3), 1)
        assert os.path.samestat(os.fstat(store._claims._fd), lock)

    in_a_child(fill)
    assert store.put(4, encoded(4), 1)
    assert [decoded(store.get(index)[0]) for index in (3, 4)] == [3, 4]  # type: ignore[index]


def test_a_process_forked_after_removal_of_the_disk_works_on(tmp_path: Path) -> None:
    dataset = cached(Images(), disk=tmp_path / "disk")
    dataset[0]
    shutil.rmtree(tmp_path / "disk")
    in_a_child(lambda: [dataset[index] for index in range(4)])


def test_a_dataset_with_a_set_has_the_same_cache_in_the_next_run() -> None:
    """Texts have other hashes in each process, so a set of them has another order."""
    program = """
from types import SimpleNamespace
from dpex.cache.fingerprint import fingerprint
names = [f".{number}" for number in range(20)]
parts = {"kinds": set(names), "pairs": frozenset((name, 1) for name in names), "nested": [{frozenset(names[:3]), 4}]}
print(fingerprint(SimpleNamespace(**parts), 3, ()))
"""
    found = {
        subprocess.check_output([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in "12"
    }
    assert len(found) == 1

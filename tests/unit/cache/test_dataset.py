"""A deterministic dataset is prepared once; generators and samples are those of the dataset without a cache."""

import copy
import pickle
import random
import resource
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

import dpex
from dpex.cache import files
from dpex.cache.dataset import CHECKED_FIRST
from dpex.cache.within import bytes_of, caches_in
from dpex.errors import CacheError, OptionError
from dpex.measure.batch_times import CACHE_USE
from dpex.transport.pickling import pack, unpack


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have the caches of a test in a folder of its own."""
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path)
    return tmp_path


class Compose:
    """As torchvision's."""

    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for step in self.transforms:
            image = step(image)
        return image


class Decode:
    def __call__(self, value: float) -> Any:
        return torch.full((3, 8, 8), float(value))


class Resize:
    def __call__(self, image: Any) -> Any:
        return image[:, ::2, ::2]


class Jitter:
    def __call__(self, image: Any) -> Any:
        return image + torch.rand(3, 1, 1) + random.random() + np.random.rand()


class Images(Dataset[Any]):
    """Counts the samples that it prepares."""

    def __init__(self, steps: list[Any] | None = None, change: Callable[[Any], Any] | None = None) -> None:
        self.transform = Compose(steps if steps is not None else [Decode(), Resize()])
        self.change = change
        self.made: list[int] = []
        self.label_of_first = "zero"

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        if index >= len(self):
            raise IndexError(index)
        self.made.append(index)
        image = self.transform(float(index))
        return {"image": image if self.change is None else self.change(image), "label": index}


def cached(dataset: Any, **options: Any) -> Any:
    return dpex.cached(dataset, **{"memory": "1MB", "version": uuid.uuid4().hex, **options})


def generators() -> tuple[Any, ...]:
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_each_sample_is_prepared_once_and_two_are_checked() -> None:
    images = Images()
    found = cached(images)
    for _ in range(3):
        assert [int(found[index]["label"]) for index in range(20)] == list(range(20))
    assert len(images.made) == 20 + CHECKED_FIRST
    assert torch.equal(found[5]["image"], torch.full((3, 4, 4), 5.0))
    assert found.stored()["memory"].kept == 20


def test_it_behaves_as_the_dataset_within() -> None:
    found = cached(Images())
    assert len(found) == 20
    assert found.label_of_first == "zero"
    assert found[-1]["label"] == found[np.int64(19)]["label"] == 19
    with pytest.raises(IndexError):
        found[20]
    with pytest.raises(AttributeError, match="missing"):
        found.missing  # noqa: B018
    assert cached([1, 2, 3])[2] == 3
    assert Subset(found, [4])[0]["label"] == 4


def test_an_index_that_is_no_number_goes_to_the_dataset() -> None:
    class Batches:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: Any) -> Any:
            return index

    assert cached(Batches())[[1, 2]] == [1, 2]


def test_a_dataset_with_set_epoch_is_refused() -> None:
    class Curriculum(Images):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    with pytest.raises(OptionError, match=r"Curriculum has set_epoch, so its samples may differ between epochs"):
        cached(Curriculum())


@pytest.mark.parametrize("is_joined", [False, True])
def test_an_attribute_keeps_the_value_of_cached_samples(is_joined: bool) -> None:
    found = cached(Images(), **({"name": "images", "version": 1} if is_joined else {}))
    found.note = "new"
    assert (found.dataset.note, found.note) == ("new", "new")
    if not is_joined:
        found.note = "other"
        found[3]
    found.note = found.dataset.note
    for change in (lambda: setattr(found, "note", "third"), lambda: delattr(found, "note")):
        with pytest.raises(CacheError, match=r"attribute 'note' of Images .* before dpex\.cached"):
            change()
    assert found.note == ("new" if is_joined else "other")
    with pytest.raises(AttributeError, match="'key' belongs to the cache of Images"):
        found.key = "other"


def test_a_shallow_copy_has_the_cache_and_attributes_of_its_own() -> None:
    found = cached(Images())
    found.label_of_first = "one"
    found[3]
    other = copy.copy(found)
    assert (other.key, other.stored()["memory"].kept) == (found.key, 1)
    assert other[3]["label"] == 3
    assert other.made.count(3) == len(found.made)
    with pytest.raises(CacheError, match="attribute 'label_of_first'"):
        other.label_of_first = "two"
    assert found[3]["label"] == 3


def shipped(dataset: Any) -> Any:
    return unpack(*pack(dataset))


@pytest.mark.parametrize(
    ("copied", "kept"),
    [(copy.deepcopy, 0), (lambda one: pickle.loads(pickle.dumps(one)), 0), (shipped, 1)],
    ids=["copy", "pickle", "for a worker"],
)
def test_only_the_loaders_of_a_dataset_have_its_cache(copied: Callable[[Any], Any], kept: int) -> None:
    found = cached(Images())
    found[3]
    assert copied(found).stored()["memory"].kept == kept
    named = cached(Images(), name="images")
    named[3]
    assert copied(named).stored()["memory"].kept == 1


def test_another_dataset_has_its_own_cache_unless_it_is_named() -> None:
    version = uuid.uuid4().hex
    for names, kept in (({}, 0), ({"name": "images"}, 1)):
        one, other = (cached(Images(), version=version, **names) for _ in range(2))
        one[3]
        assert other.stored()["memory"].kept == kept


def test_a_named_cache_of_another_state_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    names = {"name": "images", "version": 2}
    one = cached(Images(), **names)
    one[3]
    other = cached(Images([Decode()]), **names)
    assert other.stored()["memory"].kept == 0
    assert other[3]["image"].shape == (3, 8, 8)
    assert f"{one.key}.samples" in caplog.text
    assert caplog.text.count("A cache with name='images', version=2 exists") == 1


def test_hits_misses_and_what_they_saved_are_counted() -> None:
    found = cached(Images())
    CACHE_USE.take()
    for index in (1, 2, 3, 1, 2):
        found[index]
    assert CACHE_USE.take()[:2] == (2, 3)
    assert CACHE_USE.take() == (0, 0, 0.0)


def test_bytes_of_inner_caches_count_and_keep_no_dataset_alive() -> None:
    class Outer:
        def __init__(self, inner: Any) -> None:
            self.parts = [inner, inner]

    found = cached(Images())
    found[0]
    told = bytes_of(Outer(found))
    assert told() == {"cache_memory_bytes": found.stored()["memory"].nbytes}
    del found
    assert told() == {}
    assert bytes_of(Outer(3))() == {}


class Part(list[Any]):
    """Counts the visits to its items."""

    visits = 0

    def __getitem__(self, index: Any) -> Any:
        Part.visits += 1
        return super().__getitem__(index)


def test_a_search_for_caches_makes_a_bounded_number_of_visits() -> None:
    """Lists of lists of lists, and objects that name each other, are looked at up to one number in all."""
    images = Images()
    images.all = Part([Part([Part([0] * 64) for _ in range(64)]) for _ in range(64)])  # type: ignore[attr-defined]
    images.within = [cached(Images())]  # type: ignore[attr-defined]
    images.own = images  # type: ignore[attr-defined]
    assert caches_in(images) == images.within  # type: ignore[attr-defined]
    assert 65 <= Part.visits <= 1000


def seeded_samples(dataset: Any) -> list[Any]:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    return [dataset[index]["image"] for _ in range(2) for index in (3, 1, 4)] + [generators()]


class OwnGenerator:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, image: Any) -> Any:
        self.rng.random()  # drawn, and not used
        return image


RANDOM = {
    "torch": Jitter(),
    "drawn and not used": lambda image: (np.random.rand(), image)[1],
    "unseeded": lambda image: image + float(np.random.default_rng().random()),
    "own generator": OwnGenerator(),
}


@pytest.mark.parametrize("name", RANDOM)
def test_a_random_sample_is_an_error(name: str) -> None:
    found = cached(Images([Decode(), Resize(), RANDOM[name]]))
    with pytest.raises(CacheError, match=r"sample 3 of Images is random.*: put the random part into a dataset around"):
        found[3]
    assert found.stored()["memory"].kept == 0


def test_a_draw_is_seen_in_samples_that_are_not_prepared_twice() -> None:
    found = cached(Images([], change=lambda index: index if index < 10 else random.random()))
    for index in range(10):
        found[index]
    with pytest.raises(CacheError, match="sample 10 of Images is random"):
        found[10]


@pytest.mark.parametrize("steps", [[Decode(), Jitter()], [Decode(), OwnGenerator(), Jitter()]])
def test_what_is_skipped_gives_the_batches_of_the_dataset_alone(
    steps: list[Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    disk = {} if steps[1:] == [] else {"disk": tmp_path / "disk"}
    plain = seeded_samples(Images(copy.deepcopy(steps)))
    found = seeded_samples(cached(Images(steps), on_random="skip", **disk))
    assert plain[-1] == found[-1]
    assert all(torch.equal(*pair) for pair in zip(plain[:-1], found[:-1], strict=True))
    assert caplog.text.count("is not cached, as its sample 3 is random") == 1
    assert list((tmp_path / "disk").glob("*.aside")) == [], "there was no sample to set aside"


def test_another_bit_generator_of_numpy_stays() -> None:
    numpys: Any = np.random
    before = numpys.get_bit_generator()
    try:
        numpys.set_bit_generator(np.random.Philox(3))
        expected = [np.random.rand() for _ in range(2)]
        numpys.set_bit_generator(np.random.Philox(3))
        found = [np.random.rand(), cached(Images())[0], np.random.rand()]
        assert [found[0], found[2]] == expected
    finally:
        numpys.set_bit_generator(before)


class Together(Dataset[int]):
    """Loads samples together only."""

    def __len__(self) -> int:
        return 20

    def __getitems__(self, indices: list[int]) -> Any:
        return indices


def test_what_is_loaded_together_must_be_a_list() -> None:
    class Collated(Together):
        def __getitems__(self, indices: list[int]) -> Any:
            return torch.tensor(indices)

    with pytest.raises(CacheError, match="__getitems__ returned a Tensor for 2 indices"):
        cached(Collated()).__getitems__([1, 2])


def test_the_log_says_how_much_fits(caplog: pytest.LogCaptureFixture) -> None:
    images = Images([lambda index: torch.zeros(100_000)])
    found = cached(images, memory=1_000_000)
    for _ in range(2):
        for index in range(20):
            found[index]
    assert found.stored()["memory"].kept == 2
    assert caplog.text.count("keeps 2 of 20 samples") == 1
    assert len(images.made) == CHECKED_FIRST + 20 + 18, "samples that fit are prepared once, the others in each epoch"


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("huge_at", [0, 2, 17])
def test_one_huge_sample_leaves_the_cache_open(
    huge_at: int, where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    places: dict[str, Any] = {
        "memory": {"memory": "1MB"},
        "disk": {"memory": 0, "disk": tmp_path / "disk", "disk_budget": "1MB"},
    }

    def step(index: float) -> torch.Tensor:
        return torch.full((1_000_000 if index == huge_at else 1000 * (int(index) % 5 + 1),), index)

    found = cached(Images([step]), **places[where])
    for _ in range(2):
        assert [found[index]["image"][-1] for index in range(20)] == list(range(20))
    assert found.stored()[where].kept == 19
    assert caplog.text.count(f"and not sample {huge_at}, of") == caplog.text.count("and not sample") == 1


def test_memory_of_nothing_needs_no_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path / "missing")
    found = cached(Images(), memory=0, disk=tmp_path / "disk")
    assert [found[index]["label"] for index in (3, 3)] == [3, 3]
    assert found.stored().keys() == {"disk"}
    assert not (tmp_path / "missing").exists()


def test_samples_come_from_disk_where_memory_is_full(tmp_path: Path) -> None:
    images = Images([lambda index: torch.full((50_000,), float(index))])
    found = cached(images, memory=600_000, disk=tmp_path / "disk", disk_budget="100MB")
    for _ in range(2):
        assert [found[index]["image"][-1].item() for index in range(20)] == list(range(20))
    assert len(images.made) == CHECKED_FIRST + 20
    assert (found.stored()["memory"].kept, found.stored()["disk"].kept) == (2, 20)
    again = cached(images, memory=600_000, disk=tmp_path / "disk", version="other")
    assert again.stored()["disk"].kept == 0


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Stream(), {}, "a Stream has no __getitem__ or __getitems__"),
        (object(), {}, "a object has no __getitem__ or __getitems__"),
        ([1], {"on_random": "ignore"}, "give 'raise' or 'skip'"),
        ([1], {"memory": "much"}, "memory='much'"),
        ([1], {"disk_budget": -1}, "disk_budget=-1"),
        ([1], {"memory": 0}, "memory=0 without disk="),
        ([1], {"version": None, "disk": "/nowhere"}, "disk='/nowhere' needs version="),
        ([1], {"version": None, "name": "photos"}, "name='photos' needs version="),
        ([1], {"version": ""}, "version=''"),
        ([1], {"name": object()}, "name=<object"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_options_that_make_no_sense_are_refused(dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        cached(dataset, **options)


def test_a_limit_of_the_process_is_an_error_with_the_remedy() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(CacheError, match=r"a cache of Images cannot be made: .*; give a smaller memory="):
            cached(Images(), memory="2MB")
        assert cached(Images(), memory=1000)[1]["label"] == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_cached_sample_of_a_removed_class_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cached(Images([lambda index: Stream()]))
    found[0]
    monkeypatch.delitem(globals(), "Stream")
    with pytest.raises(CacheError, match=r"sample 0 of Images cannot be read .* give another version="):
        found[0]


def test_a_sample_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(CacheError, match="cannot be cached"):
        cached(Images([lambda index: lambda: index]))[0]

"""``stats()`` speaks of the latest iterator, and keeps its figures however that ends."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from families import Augmented
from torch.utils.data import IterableDataset, get_worker_info

from dpex import DpexDataLoader, StreamStats, decode_in_workers
from dpex.stats import LoaderStats

LOADERS: dict[str, dict[str, Any]] = {
    "workers": {"num_workers": 1, "seeding": "batch"},
    "logical workers": {"num_workers": 1, "seeding": "worker"},
    "in-process": {"num_workers": 0, "seeding": "batch"},
    "torch's in-process": {"num_workers": 0},
    "torch's in-process, measured": {"num_workers": 0, "measured": True},
}


def loader(name: str) -> DpexDataLoader[Any]:
    options = dict(LOADERS[name])
    measured = options.pop("measured", False)
    made: DpexDataLoader[Any] = DpexDataLoader(Augmented(40), batch_size=2, **options)
    if measured:
        made.diagnose()
    return made


def take(iterator: Any, count: int) -> None:
    for _ in range(count):
        next(iterator)


@pytest.mark.parametrize("name", LOADERS)
def test_the_figures_stay_however_a_pass_ends(name: str) -> None:
    """By break, by close, or by no call at all, as Lightning's, which stops after ``len(loader)`` batches."""
    loading = loader(name)
    for number, _ in enumerate(loading):
        if number == 6:
            break
    gc.collect()
    assert loading.stats().batches == 7
    iterator = iter(loading)
    take(iterator, len(loading))
    assert loading.stats().batches == 20
    del iterator
    gc.collect()
    assert loading.stats().batches == 20
    iterator = iter(loading)
    take(iterator, 5)
    loading.close()
    assert loading.stats().batches == 5


@pytest.mark.parametrize("name", LOADERS)
def test_the_latest_iterator_is_told_of_and_not_the_longest(name: str) -> None:
    loading = loader(name)
    older = iter(loading)
    take(older, 9)
    latest = iter(loading)
    take(latest, 3)
    assert loading.stats().batches == 3
    take(older, 2)
    del older
    gc.collect()
    assert loading.stats().batches == 3
    loading.close()
    assert loading.stats().batches == 3


def test_times_are_known_of_what_was_measured() -> None:
    loading = loader("torch's in-process, measured")
    take(iter(loading), 20)
    stats = loading.stats()
    assert stats.pools["inline"].tickets == 20
    assert stats.wait_s > 0
    assert stats.wait_s >= stats.pools["inline"].load_s + stats.pools["inline"].collate_s
    assert 0 < stats.first_batch_s <= stats.wait_s


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}, {"num_workers": "auto"}],
    ids=str,
)
def test_epochs_are_those_of_the_loader(options: dict[str, Any]) -> None:
    with DpexDataLoader(range(4), **options) as loader:
        for epoch in range(3):
            for _ in loader:
                assert loader.stats().epoch == epoch
            assert repr(loader.stats()).startswith(f"LoaderStats(epoch {epoch + 1}; ")
        next(iter(loader))
        assert loader.stats().epoch == 3


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_epochs_of_a_split_stream_are_those_of_the_loader() -> None:
    stream = decode_in_workers(Numbers(), str)
    with DpexDataLoader(stream, num_workers=1, seeding="batch", persistent_workers=True) as loader:
        for epoch in range(3):
            assert len(list(loader)) == 4
            assert loader.stats().epoch == epoch


def test_persistent_workers_end_if_their_number_is_assigned() -> None:
    with DpexDataLoader(range(40), num_workers="auto", persistent_workers=True) as loader:
        assert len(list(loader)) == 40
        with pytest.warns(UserWarning, match="from the next iter"):
            loader.num_workers = 1
        assert len(list(loader)) == 40
        assert repr(loader.stats().pools["local"]).startswith("PoolReading(1 of 1 workers run; 40 batches")


def test_a_pool_is_shown_in_one_short_line() -> None:
    with DpexDataLoader(range(300), num_workers=1) as loader:
        assert len(list(loader)) == 300
        shown = repr(loader.stats().pools["local"])
    assert shown.startswith("PoolReading(1 of 1 workers run; 300 batches of ")
    assert len(shown) < 100


def test_before_the_first_iterator_there_is_nothing() -> None:
    assert loader("workers").stats() == LoaderStats()


class ThreeShards(IterableDataset[int]):
    """Shards 0, 1 and 2 of four samples each, dealt to the workers in turn."""

    num_shards = 3

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        for shard in range(worker.id, self.num_shards, worker.num_workers) if worker is not None else range(3):
            yield from range(4 * shard, 4 * shard + 4)


def as_it_is(sample: int) -> int:
    return sample


@pytest.mark.parametrize("is_split", [False, True])
def test_the_streams_are_counted_one_by_one(is_split: bool) -> None:
    dataset: Any = decode_in_workers(ThreeShards(), as_it_is) if is_split else ThreeShards()
    options: dict[str, Any] = {"seeding": "batch"} if is_split else {}
    with DpexDataLoader(dataset, batch_size=2, num_workers=2, **options) as loading:
        iterator = iter(loading)
        assert loading.stats().streams == (StreamStats(2, 0, False), StreamStats(1, 0, False))
        assert len(list(iterator)) == 6
        assert loading.stats().streams == (StreamStats(2, 4, True), StreamStats(1, 2, True))
        assert "streams 2, 2 of them ended" in repr(loading.stats())


def test_a_map_style_dataset_has_no_streams() -> None:
    with loader("logical workers") as loading:
        take(iter(loading), 2)
        assert loading.stats().streams == ()

"""How many streams an iterable dataset is read in, and that nothing changes it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dpex import AutotuneConfig, DpexDataLoader
from dpex.loader.sizing import choose_streams, named_shards


class Shards(IterableDataset[torch.Tensor]):
    """As webdataset reads: a stream takes every so-manyth shard, and one that gets none is an error."""

    def __init__(self, n_shards: int = 6, each: int = 16) -> None:
        self.n_shards = n_shards
        self.each = each

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        mine = range(0 if worker is None else worker.id, self.n_shards, 1 if worker is None else worker.num_workers)
        if not mine:
            raise ValueError("you have fewer shards than workers")
        for shard in mine:
            for number in range(self.each):
                yield torch.tensor([shard * self.each + number])


class Numbers(IterableDataset[torch.Tensor]):
    """Every stream reads its part, but the dataset names no shards."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        for number in range(0 if worker is None else worker.id, 10, 1 if worker is None else worker.num_workers):
            yield torch.tensor([number])


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda count: monkeypatch.setattr("dpex.loader.sizing.rank_cpus", lambda: count)


# -- the rule ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "machine", "most", "count", "reason"),
    [
        (None, 4, None, 4, "this rank has 4 CPUs"),
        (None, 1, None, 1, "this rank has 1 CPU."),
        (6, 42, None, 6, "the dataset names 6 shards"),
        (6, 2, None, 2, "this rank has 2 CPUs"),
        (6, 2, 4, 4, "max_streams=4 says so"),
        (6, 2, 20, 6, "the dataset names 6 shards"),
        (None, 42, 3, 3, "max_streams=3 says so"),
    ],
)
def test_how_many(shards: int | None, machine: int, most: int | None, count: int, reason: str) -> None:
    dataset: Any = Numbers() if shards is None else Shards(shards)
    found = choose_streams(dataset, machine, most, {})
    assert found.count == count
    assert reason in found.why


def test_ranks_on_several_machines_are_told_how_to_agree() -> None:
    elsewhere = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    assert "AutotuneConfig(max_streams=...)" in choose_streams(Numbers(), 4, None, elsewhere).why
    for known in (choose_streams(Numbers(), 4, 3, elsewhere), choose_streams(Shards(2), 4, None, elsewhere)):
        assert "AutotuneConfig" not in known.why
    assert "AutotuneConfig" not in choose_streams(Numbers(), 4, None, {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}).why


class Odd:
    def __init__(self, value: Any) -> None:
        self.num_shards = value


class Broken:
    n_shards = 3

    @property
    def num_shards(self) -> int:
        raise RuntimeError("not yet")


@pytest.mark.parametrize("value", [None, True, 0, -1, 2.0, "6", len])
def test_what_is_no_number_of_shards_is_passed_over(value: Any) -> None:
    assert named_shards(Odd(value)) is None


def test_shards_are_named_in_either_way() -> None:
    assert named_shards(Odd(5)) == 5
    assert named_shards(Shards(6)) == 6
    assert named_shards(Broken()) == 3


class ResampledShards:
    """webdataset's that draws URLs without an end."""

    def __init__(self, count: int) -> None:
        self.urls = [f"{number}.tar" for number in range(count)]


class SimpleShardList(ResampledShards):
    """webdataset's that lists each URL once."""

    def __len__(self) -> int:
        return len(self.urls)


def split_by_node(urls: Any) -> Any:
    return urls


class Pipeline:
    def __init__(self, *stages: Any) -> None:
        self.pipeline = list(stages)


@pytest.mark.parametrize(
    ("stages", "count"),
    [
        ([SimpleShardList(5)], 5),
        ([SimpleShardList(5), split_by_node], 2),
        ([SimpleShardList(1), split_by_node], 1),
        ([ResampledShards(5)], None),
        ([], None),
    ],
)
def test_the_urls_of_a_pipeline_are_its_shards_as_many_as_every_rank_has(stages: list[Any], count: int | None) -> None:
    assert named_shards(Pipeline(*stages), ranks=2) == count
    chosen = choose_streams(Pipeline(*stages), 42, None, {"WORLD_SIZE": "2"})
    assert chosen.count == (42 if count is None else count)


# -- the loader --------------------------------------------------------------------------------------------------------


def test_auto_has_one_stream_for_each_cpu_and_at_most_one_for_each_shard(cpus: Any) -> None:
    cpus(3)
    assert DpexDataLoader(Numbers(), num_workers="auto").num_workers == 3
    cpus(42)
    loader: Any = DpexDataLoader(Shards(), num_workers="auto")
    assert loader.num_workers == 6
    more = AutotuneConfig(max_streams=50)
    assert DpexDataLoader(Numbers(), num_workers="auto", autotune=more).num_workers == 50
    assert DpexDataLoader(Numbers(), num_workers="auto", autotune=False).num_workers == 42
    again: Any = DpexDataLoader(loader.dataset, num_workers=loader.num_workers, timeout=loader.timeout)
    assert (again._is_auto, again.num_workers) == (True, 6)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_number_is_the_users_whatever_the_dataset_says() -> None:
    assert DpexDataLoader(Shards(2), num_workers=5, autotune=AutotuneConfig(max_streams=1)).num_workers == 5


def test_shards_are_read_once_each_and_the_number_of_streams_stays(cpus: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dpex")
    cpus(42)
    with DpexDataLoader(Shards(), batch_size=4, num_workers="auto", autotune=AutotuneConfig(interval_s=0.05)) as loader:
        for _ in range(4):
            assert sorted(torch.cat(list(loader)).flatten().tolist()) == list(range(96))
            assert loader.stats().pools["local"].wanted == 6
        assert {decision.new.workers for decision in loader.decisions} == {6}
        first = loader.decisions[0]
    assert (first.reason, first.old, first.at) == ("start", first.new, 0.0)
    said = [record.message for record in caplog.records if "the dataset names 6 shards" in record.message]
    assert len(said) == 1
    assert first.text in said[0]


def test_what_a_dataset_yields_is_what_torch_yields_with_as_many_workers(cpus: Any) -> None:
    cpus(2)
    with DpexDataLoader(Numbers(), batch_size=4, num_workers="auto") as loader:
        for _ in range(3):
            ours = torch.cat(list(loader))
            assert torch.equal(ours, torch.cat(list(DataLoader(Numbers(), batch_size=4, num_workers=2))))


@pytest.mark.parametrize("dataset", [[1, 2], Numbers()])
def test_torchs_warning_of_many_workers_is_about_the_users_number_only(
    monkeypatch: pytest.MonkeyPatch, dataset: Any
) -> None:
    for name in ("sizing.static_worker_count", "sizing.rank_cpus"):
        monkeypatch.setattr(f"dpex.loader.{name}", lambda: 1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DpexDataLoader(dataset, num_workers="auto").num_workers == 1000
    with pytest.warns(UserWarning, match="will create 1000 worker processes"):
        DpexDataLoader(dataset, num_workers=1000)

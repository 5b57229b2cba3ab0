"""How many streams an iterable dataset is read in under "auto", and that each sample comes once, split or not.

A dataset that names its shards has a stream for each, at most 8 or one for each CPU. Any other has one, and a warning
names the number of workers to give.
"""

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from checkpoints import kept
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from dpex import AutotuneConfig, DpexDataLoader, StateError, decode_in_workers
from dpex.loader.streams import choose_streams, named_shards


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
    return lambda count: monkeypatch.setattr("dpex.loader.streams.rank_cpus", lambda: count)


@pytest.mark.parametrize(
    ("shards", "machine", "most", "count", "reason"),
    [
        (None, 4, None, 1, "it names no shards"),
        (None, 1, None, 1, "it names no shards"),
        (6, 42, None, 6, "the dataset names 6 shards"),
        (6, 2, None, 6, "the dataset names 6 shards"),
        (64, 2, None, 8, "8 streams for its 64 shards, as that is the larger of 8 and this rank's 2 CPUs"),
        (64, 12, None, 12, "the larger of 8 and this rank's 12 CPUs; AutotuneConfig(max_streams=...) sets another"),
        (6, 2, 4, 4, "4 streams for its 6 shards, as max_streams=4 says so"),
        (6, 2, 20, 6, "the dataset names 6 shards"),
        (None, 42, 3, 1, "it names no shards"),
    ],
)
def test_how_many(shards: int | None, machine: int, most: int | None, count: int, reason: str) -> None:
    dataset: Any = Numbers() if shards is None else Shards(shards)
    found = choose_streams(dataset, machine, most, {})
    assert found.count == count
    assert reason in found.why
    limit = machine if most is None else most
    assert ("Numbers names no shards" in found.warning) == (f"give num_workers={limit}." in found.warning)
    assert bool(found.warning) == (shards is None and limit > 1)


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
def test_the_urls_of_a_pipeline_are_its_shards_per_rank(stages: list[Any], count: int | None) -> None:
    assert named_shards(Pipeline(*stages), ranks=2) == count
    chosen = choose_streams(Pipeline(*stages), 42, None, {"WORLD_SIZE": "2"})
    assert chosen.count == (1 if count is None else count)


def test_auto_has_one_stream_per_shard_up_to_eight_or_the_cpus(cpus: Any) -> None:
    cpus(3)
    assert DpexDataLoader(Numbers(), num_workers="auto").num_workers == 1
    assert DpexDataLoader(Shards(), num_workers="auto").num_workers == 6
    assert DpexDataLoader(Shards(60), num_workers="auto").num_workers == 8
    cpus(42)
    loader: Any = DpexDataLoader(Shards(), num_workers="auto")
    assert loader.num_workers == 6
    more = AutotuneConfig(max_streams=50)
    assert DpexDataLoader(Shards(60), num_workers="auto", autotune=more).num_workers == 50
    assert DpexDataLoader(Shards(60), num_workers="auto", autotune=False).num_workers == 42


def test_a_number_is_the_users_whatever_the_dataset_says() -> None:
    assert DpexDataLoader(Shards(2), num_workers=5, autotune=AutotuneConfig(max_streams=1)).num_workers == 5


def test_each_shard_is_read_once_by_a_constant_number_of_streams(cpus: Any, caplog: pytest.LogCaptureFixture) -> None:
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


@pytest.mark.parametrize("dataset", [[1, 2], Shards(1000)])
def test_torch_warns_of_many_workers_only_for_a_given_number(monkeypatch: pytest.MonkeyPatch, dataset: Any) -> None:
    for name in ("dataloader.static_worker_count", "loader.streams.rank_cpus"):
        monkeypatch.setattr(f"dpex.{name}", lambda: 1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DpexDataLoader(dataset, num_workers="auto").num_workers == 1000
    with pytest.warns(UserWarning, match="will create 1000 worker processes"):
        DpexDataLoader(dataset, num_workers=1000)


# -- datasets that split themselves, and those that do not -------------------------------------------------------------


LENGTH = 40
STREAMS = 3
AUTO = AutotuneConfig(max_streams=STREAMS)


class Plain(IterableDataset[torch.Tensor]):
    """It knows of no workers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(number) for number in range(LENGTH))


class SplitsAtOnce(Plain):
    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (torch.tensor(number) for number in range(first, LENGTH, step))


class NextOnly(Plain):
    """The iterator cannot be iterated itself, which torch does not need."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        class Following:
            def __init__(self, numbers: Iterator[int]) -> None:
                self.numbers = numbers

            def __next__(self) -> torch.Tensor:
                return torch.tensor(next(self.numbers))

        return Following(iter(range(LENGTH)))  # type: ignore[return-value]


class NamesShards(SplitsAtOnce):
    num_shards = 5


KINDS = (Plain, NextOnly, SplitsAtOnce, NamesShards)


def auto(dataset: Any, **options: Any) -> DpexDataLoader[Any]:
    return DpexDataLoader(dataset, num_workers="auto", **{"batch_size": 4, "autotune": AUTO, **options})


def samples(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch.reshape(-1)]


def wanted(loader: DpexDataLoader[Any]) -> int:
    return loader.stats().pools["local"].wanted


@pytest.mark.parametrize(
    "options", [{}, {"persistent_workers": True}, {"batch_size": None, "in_order": False}], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_comes_once_in_each_epoch(kind: Any, options: dict[str, Any]) -> None:
    with auto(kind(), **options) as loader:
        for _ in range(3):
            assert sorted(samples(loader)) == list(range(LENGTH))
            assert wanted(loader) == (STREAMS if kind is NamesShards else 1)


def test_what_splits_itself_comes_in_torchs_order() -> None:
    with auto(NamesShards()) as loader:
        assert samples(loader) == samples(DataLoader(NamesShards(), batch_size=4, num_workers=STREAMS))


def test_a_warning_at_iter_names_the_number_of_workers_once(cpus: Any) -> None:
    class ReadHere(SplitsAtOnce):
        """A class of which no other test has seen the warning."""

    cpus(6)
    loader: Any = auto(ReadHere(), autotune=None)
    text = r"ReadHere names no shards.* one worker reads it.*give num_workers=6\."
    with pytest.warns(UserWarning, match=text) as said:
        list(loader)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)


@pytest.mark.parametrize("kind", [Plain, NamesShards])
def test_no_warning_where_the_number_is_known(kind: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(auto(kind(), autotune=AutotuneConfig(max_streams=1)))
        list(auto(NamesShards()))


class Stateful(Plain):
    def __init__(self) -> None:
        self.at = self.begin = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        begin, self.begin = self.begin, 0
        for self.at in range(begin + 1, LENGTH + 1):
            yield torch.tensor(self.at - 1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


class StatefulSplit(Stateful):
    """It reads its place at its beginning, and not where it goes on."""

    num_shards = 5
    part = (0, 1)

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.begin:
            info = get_worker_info()
            self.part = (0, 1) if info is None else (info.id, info.num_workers)
        begin, self.begin = self.begin or self.part[0], 0
        for number in range(begin, LENGTH, self.part[1]):
            self.at = number + self.part[1]
            yield torch.tensor(number)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "part": list(self.part)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin, self.part = state["at"], tuple(state["part"])


@pytest.mark.parametrize(
    ("kind", "batches"),
    [*((kind, 7) for kind in (Plain, Stateful, NamesShards, StatefulSplit)), (Stateful, 1), (StatefulSplit, 0)],
)
def test_a_later_run_goes_on_in_as_many_streams(kind: Any, batches: int) -> None:
    with auto(kind()) as loader:
        whole = list(loader)
    with auto(kind()) as loader:
        iterator = iter(loader)
        first = [next(iterator) for _ in range(batches)]
        state = kept(loader.state_dict())
    with auto(kind()) as loader:
        loader.load_state_dict(state)
        assert samples(first + list(loader)) == samples(whole)
        assert sorted(samples(loader)) == list(range(LENGTH))


@pytest.mark.parametrize("kind", [Plain, NamesShards])
def test_a_resumed_persistent_epoch_has_the_chosen_streams(kind: Any) -> None:
    with auto(kind(), persistent_workers=True) as loader:
        list(loader)
        state = loader.state_dict()
    with auto(kind(), persistent_workers=True) as loader:
        loader.load_state_dict(state)
        assert sorted(samples(loader)) == list(range(LENGTH))
        assert wanted(loader) == (STREAMS if kind is NamesShards else 1)


def state_after(batches: int, dataset: Any) -> dict[str, Any]:
    with auto(dataset) as loader:
        iterator = iter(loader)
        for _ in range(batches):
            next(iterator)
        return loader.state_dict()


@pytest.mark.parametrize(
    "options", [{"autotune": AutotuneConfig(max_streams=5)}, {"num_workers": 1, "seeding": "batch", "autotune": None}]
)
@pytest.mark.parametrize("kind", [Plain, Stateful])
def test_a_one_stream_state_resumes_with_any_number_of_cpus(kind: Any, options: dict[str, Any]) -> None:
    state = state_after(3, kind())
    with DpexDataLoader(kind(), **{"batch_size": 4, "num_workers": "auto", **options}) as loader:
        loader.load_state_dict(state)
        assert samples(loader) == list(range(12, LENGTH))


def test_a_state_of_another_number_of_streams_is_refused() -> None:
    state = state_after(3, Plain())
    with pytest.raises(StateError, match=r"num_workers=1.*num_workers=2"):
        DpexDataLoader(Plain(), batch_size=4, num_workers=2, seeding="batch").load_state_dict(state)
    state = state_after(3, NamesShards())
    with pytest.raises(StateError, match=r"num_workers=3.*num_workers=5"):
        auto(NamesShards(), autotune=AutotuneConfig(max_streams=5)).load_state_dict(state)


def test_a_stream_that_others_decode_goes_on_in_one() -> None:
    state = state_after(3, decode_in_workers(Plain(), int))
    with auto(decode_in_workers(Plain(), int), autotune=AutotuneConfig(max_streams=5)) as loader:
        loader.load_state_dict(state)
        assert samples(loader) == list(range(12, LENGTH))


def test_torchs_workers_read_one_stream_unless_shards_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(SplitsAtOnce):
        num_shards = 2

    monkeypatch.setattr("sys.platform", "darwin")
    for kind, streams in ((Plain, 1), (SplitsAtOnce, 1), (Named, 2)):
        loader: Any = auto(kind())
        assert loader.num_workers == streams
        assert sorted(samples(loader)) == list(range(LENGTH))


class AsksItself(IterDataPipe[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(first, LENGTH, step)


def numbers(count: int = LENGTH) -> Any:
    return IterableWrapper(range(count))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("pipe", [numbers, lambda: numbers().sharding_filter(), AsksItself])
def test_a_datapipe_has_one_stream(pipe: Any) -> None:
    loader: Any = auto(pipe())
    assert loader.num_workers == 1
    assert sorted(samples(loader)) == list(range(LENGTH))

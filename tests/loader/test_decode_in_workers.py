"""A stream that some workers read and others decode: what it yields, who decodes, and what follows from failures."""

import os
import random
import signal
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from families import is_alive, outcomes, setup_of
from inspection import workers_of
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from waiting import meet, until

from dpex import AutotuneConfig, DpexDataLoader, OptionError, decode_in_workers
from dpex._torch import set_worker_info
from dpex.measure.settings import Settings
from dpex.options import WorkerConfig
from dpex.schedule.prefetch import PrefetchRules
from dpex.worker.core import WorkerCore
from dpex.worker.decoded_stream import raw_stream_of

DEADLINE_S = 60.0


class Shards(IterableDataset[bytes]):
    """Two shards of encoded numbers, of which worker k reads every so-manyth. ``fails_at``: what cannot be read."""

    num_shards = 2

    def __init__(self, each: int = 11, fails_at: int | None = None) -> None:
        self.each = each
        self.fails_at = fails_at
        self.first = 0

    def __iter__(self) -> Iterator[bytes]:
        worker = get_worker_info()
        for shard in range(0 if worker is None else worker.id, 2, 1 if worker is None else worker.num_workers):
            for number in range(100 * shard + self.first, 100 * shard + self.first + self.each):
                if number == self.fails_at:
                    raise OSError(f"shard {shard} is broken")
                yield str(number).encode()


def decoded(raw: bytes) -> torch.Tensor:
    return torch.tensor([int(raw)])


def by_torch(dataset: Any, **options: Any) -> list[Any]:
    return [batch.tolist() for batch in DataLoader(dataset, num_workers=2, **options)]


def ours(dataset: Any, **options: Any) -> DpexDataLoader[Any]:
    return DpexDataLoader(dataset, num_workers=2, seeding="batch", **options)


@pytest.mark.parametrize(
    "options", [{"batch_size": 3}, {"batch_size": 4, "drop_last": True}, {"batch_size": None}], ids=str
)
def test_batches_match_torch_with_one_worker_per_stream(options: dict[str, Any]) -> None:
    dataset = decode_in_workers(Shards(), decoded)
    expected = by_torch(dataset, **options)
    with ours(dataset, persistent_workers=True, **options) as loader:
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == expected
        next(iter(loader))  # an epoch that is broken off
        assert [batch.tolist() for batch in loader] == expected


def drawn(_: bytes) -> float:
    return random.random()


def test_random_numbers_depend_on_the_batch_not_the_decoder() -> None:
    def numbers(workers: int) -> list[Any]:
        torch.manual_seed(3)
        with ours(decode_in_workers(Shards(), drawn), batch_size=4) as loader:
            loader.resize(local=workers)
            return [batch.tolist() for batch in loader]

    one, three = numbers(1), numbers(3)
    assert one == three
    assert len({number for batch in one for number in batch}) == 22


def begin_at_five(_: int) -> None:
    worker = get_worker_info()
    assert worker is not None
    worker.dataset.source.first = 5


def test_the_workers_dataset_is_the_users() -> None:
    dataset = decode_in_workers(Shards(3), decoded)
    expected = by_torch(dataset, worker_init_fn=begin_at_five)
    with ours(dataset, worker_init_fn=begin_at_five) as loader:
        assert [batch.tolist() for batch in loader] == expected


def test_attributes_and_length_are_the_sources() -> None:
    class Sized(Shards):
        def __len__(self) -> int:
            return 22

    dataset = decode_in_workers(Sized(), decoded)
    assert (dataset.num_shards, dataset.each, len(DpexDataLoader(dataset, 4))) == (2, 11, 6)
    assert not hasattr(decode_in_workers(Shards(), decoded), "__len__")
    for wrong in ({"source": 3, "fn": str}, {"source": [3], "fn": 3}):
        with pytest.raises(OptionError, match="decode_in_workers"):
            decode_in_workers(**wrong)  # type: ignore[arg-type]


class Countdown(IterableDataset[int]):
    """A stream that is its own iterator: its place is an attribute."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        assert worker is not None
        self.number, self.step = worker.id, worker.num_workers
        return self

    def __next__(self) -> int:
        self.number += self.step
        return self.number


@pytest.mark.parametrize("dataset", [raw_stream_of, lambda dataset: dataset], ids=["read", "read and decoded"])
def test_streams_that_share_a_process_have_a_source_each(dataset: Any) -> None:
    core = WorkerCore(setup_of(dataset(decode_in_workers(Countdown(), int)), num_workers=2, iterable=True))
    try:
        core.adopt(0)
        core.adopt(1)
        made = [core.make(number, [None, None], number % 2, 0)[0].tolist() for number in range(4)]
    finally:
        set_worker_info(None)
    assert made == [[2, 4], [3, 5], [6, 8], [7, 9]]


def decoded_together(place: Path, many: int, raw: bytes) -> int:
    """Decode only once so many workers decode at the same time."""
    meet(place, many)
    return os.getpid()


def test_more_workers_decode_than_there_are_shards(tmp_path: Path) -> None:
    dataset = decode_in_workers(Shards(), partial(decoded_together, tmp_path, 4))
    with ours(dataset, batch_size=1) as loader:
        loader.resize(local=4, prefetch=8)
        pids = {pid for batch in loader for pid in batch.tolist()}
    assert len(pids) >= 4


def test_auto_chooses_streams_and_tunes_the_decoding_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpex.loader.streams.rank_cpus", lambda: 5)
    dataset = decode_in_workers(Shards(), decoded)
    with DpexDataLoader(dataset, 3, num_workers="auto", autotune=AutotuneConfig(min_local=3)) as loader:
        assert [batch.tolist() for batch in loader] == by_torch(dataset, batch_size=3)
        assert loader.num_workers == 2
        assert loader.stats().pools["local"].wanted >= 3
        text = loader.decisions[0].text
    assert "read in 2 streams, as the dataset names 2 shards" in text
    assert "Other workers, whose number is tuned, decode" in text


def die_once(mark: Path, raw: bytes) -> torch.Tensor:
    if raw == b"105":
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return decoded(raw)
        os.kill(os.getpid(), signal.SIGKILL)
    return decoded(raw)


def test_the_death_of_a_worker_that_decodes_loses_nothing(tmp_path: Path) -> None:
    dataset = decode_in_workers(Shards(), partial(die_once, tmp_path / "died"))
    expected = by_torch(decode_in_workers(Shards(), decoded), batch_size=2)
    with ours(dataset, batch_size=2) as loader:
        assert [batch.tolist() for batch in loader] == expected
    assert (tmp_path / "died").exists()


def fail(raw: bytes) -> torch.Tensor:
    if raw == b"4":
        raise ValueError("4 cannot be decoded")
    return decoded(raw)


def lists_of(loader: Any) -> list[Any]:
    return [one if isinstance(one, type) else one.tolist() for one in outcomes(iter(loader))]


def test_a_stream_error_comes_in_place_and_others_continue() -> None:
    dataset = decode_in_workers(Shards(fails_at=5), decoded)
    expected = lists_of(DataLoader(dataset, batch_size=2, num_workers=2))
    assert OSError in expected
    with ours(dataset, batch_size=2) as loader:
        assert lists_of(loader) == expected


def test_an_error_of_decoding_costs_its_batch_alone() -> None:
    every = by_torch(decode_in_workers(Shards(), decoded), batch_size=2)
    expected = [ValueError if [4] in batch else batch for batch in every]
    with ours(decode_in_workers(Shards(), fail), batch_size=2) as loader:
        assert lists_of(loader) == expected


def test_a_memory_budget_counts_what_tickets_carry() -> None:
    rules = PrefetchRules(logical=False, may_group=False, memory_budget=100)
    sizes = Settings(local=10, prefetch=20)
    rules.add_batch(1.0, 10)
    assert (rules.prefetch(sizes), rules.within_budget(20, sizes, 1, 20)) == (10, 7)
    rules.carried_bytes = 10
    assert (rules.prefetch(sizes), rules.within_budget(20, sizes, 1, 20)) == (5, 3)


class Endless(IterableDataset[bytes]):
    def __iter__(self) -> Iterator[bytes]:
        return (str(number).encode() for number in count())


def pids_of(iterator: Any) -> list[int | None]:
    """Of its workers, of which some may not be known yet: news of them are taken in by ``next()``."""
    return [worker.pid for worker in workers_of(iterator)]


def test_an_endless_stream_ends_with_the_loader() -> None:
    with ours(
        decode_in_workers(Endless(), decoded), batch_size=2, worker_config=WorkerConfig(memory_budget=1 << 20)
    ) as loader:
        assert len(list(islice(loader, 5))) == 5
        iterator = iter(loader)
        workers = until(lambda: next(iterator) is not None and all(pids := pids_of(iterator)) and pids)
    until(lambda: not any(map(is_alive, workers)))

"""A plain loader that was made from one of dpex's attributes has all of its options, and shows there what it does.

Here the attributes are copied as frameworks copy them; with the frameworks themselves it is tried beside this file.
"""

import copy
import gc
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from inspection import workers_of
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler, TensorDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from dpex import AutotuneConfig, DpexDataLoader, OptionError, loader_behind, serve
from dpex.loader import proxies
from dpex.loader.proxies import known_proxy
from dpex.options import WorkerConfig

DATA = TensorDataset(torch.arange(60))
ACCELERATES = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "in_order"),
)
RAYS = ("num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "generator", "batch_size")


def as_accelerate(loader: Any) -> Any:
    kept = {name: getattr(loader, name) for name in ACCELERATES}
    return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, **kept)


def as_ray_train(loader: Any) -> Any:
    kept = {name: getattr(loader, name) for name in RAYS}
    return DataLoader(loader.dataset, shuffle=False, sampler=SequentialSampler(loader.dataset), **kept)


REBUILT: dict[str, Callable[[Any], Any]] = {"Accelerate": as_accelerate, "Ray Train": as_ray_train}


def numbers(loader: Any) -> list[int]:
    return [int(number) for (batch,) in loader for number in batch]


@pytest.mark.parametrize("how", REBUILT)
@pytest.mark.parametrize("workers", [0, 2])
def test_fixed_workers_give_torchs_batches_and_stats_count_them(how: str, workers: int) -> None:
    torchs = DataLoader(DATA, 7, num_workers=workers)
    loader = DpexDataLoader(DATA, 7, num_workers=workers, seeding="batch")
    plain = REBUILT[how](loader)
    expected = [batch.tolist() for (batch,) in torchs]
    for _ in range(2):
        assert [batch.tolist() for (batch,) in plain] == expected
    assert loader.stats().batches == len(expected)
    assert not loader._is_auto


def test_what_ray_train_leaves_out_comes_from_the_own_loader() -> None:
    loader = DpexDataLoader(DATA, num_workers=2, prefetch_factor=5, in_order=False)
    plain = as_ray_train(loader)
    assert sorted(numbers(plain)) == list(range(60))
    proxy = known_proxy(plain)
    assert (proxy.prefetch_factor, proxy.in_order) == (5, False)
    assert proxy._current_settings().prefetch == 10


@pytest.mark.parametrize("how", REBUILT)
def test_persistent_workers_are_kept(how: str) -> None:
    loader = DpexDataLoader(DATA, 4, num_workers=1, persistent_workers=True)
    plain = REBUILT[how](loader)
    assert numbers(plain) == list(range(60))
    (iterator,) = loader._runtime.iterators
    assert numbers(plain) == list(range(60))
    assert list(loader._runtime.iterators) == [iterator]
    loader.close()


def test_resize_and_close_reach_the_rebuilt_loaders_workers() -> None:
    loader = DpexDataLoader(DATA, num_workers=1, seeding="batch")
    plain = as_accelerate(loader)
    iterator = iter(plain)
    next(iterator)
    loader.resize(local=2, prefetch=6)
    assert len(list(iterator)) == 59
    iterator = iter(plain)
    next(iterator)
    assert loader.stats().pools["local"].wanted == 2
    loader.close()
    assert not any(worker.is_alive() for worker in workers_of(iterator))  # type: ignore[attr-defined]


def test_options_that_are_assigned_later_count() -> None:
    loader = DpexDataLoader(DATA, num_workers=1)
    loader.worker_config, loader.timeout = WorkerConfig(memory_budget=1 << 20), 30
    plain = as_accelerate(loader)
    assert len(numbers(plain)) == 60
    assert (plain.timeout, known_proxy(plain).timeout, known_proxy(plain).worker_config.memory_budget) == (
        30,
        30,
        1 << 20,
    )


def test_a_number_that_the_plain_loader_was_given_is_kept() -> None:
    loader = DpexDataLoader(DATA, num_workers="auto")
    plain = as_accelerate(loader)
    plain.num_workers = loader.num_workers + 1
    iter(plain)
    assert (known_proxy(plain)._is_auto, known_proxy(plain).num_workers) == (False, loader.num_workers + 1)


def test_a_loader_of_another_dataset_or_timeout_stays_pytorchs() -> None:
    """So is one that the user makes beside, such as for a comparison."""
    loader = DpexDataLoader(DATA, num_workers=1)
    for other in (
        DataLoader(TensorDataset(torch.arange(5)), num_workers=1, timeout=loader.timeout),
        DataLoader(DATA, num_workers=1),
        DataLoader(DATA, num_workers=1, timeout=float(str(loader.timeout))),
    ):
        assert type(iter(other)).__module__ == "torch.utils.data.dataloader"


class Wrapped(Dataset[Any]):
    """As Accelerate's `IterableDatasetShard` keeps what it shards."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def test_a_loader_of_the_wrapped_dataset_uses_the_dpex_loader() -> None:
    loader = DpexDataLoader(DATA, num_workers=1)
    assert numbers(DataLoader(Wrapped(DATA), num_workers=1, timeout=loader.timeout)) == [0, 1, 2]
    assert loader.stats().batches == 3


def test_the_own_loader_need_not_live() -> None:
    plain = as_accelerate(DpexDataLoader(DATA, num_workers="auto", name="gone"))
    assert numbers(plain) == list(range(60))
    assert (known_proxy(plain)._is_auto, known_proxy(plain).name) == (True, "gone")


class Numbered(IterableDataset[int]):
    num_shards = 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Sharded(IterableDataset[int]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[int]:
        return iter(self.dataset)


def test_streams_stay_as_many_when_a_framework_wraps_the_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpex.loader.sizing.rank_cpus", lambda: 6)
    loader = DpexDataLoader(Numbered(), num_workers="auto")
    plain = DataLoader(Sharded(loader.dataset), num_workers=loader.num_workers, timeout=loader.timeout)
    assert [int(number) for number in plain] == list(range(10))
    assert known_proxy(plain).num_workers == 1
    assert "1 shard" in loader.decisions[0].text


def test_a_note_goes_with_the_dataset() -> None:
    dataset = TensorDataset(torch.arange(4))
    key = id(dataset)

    class Keeping(DpexDataLoader[Any]):
        """Has the dataset under a name of its own, too."""

        def __init__(self, data: Any) -> None:
            self.data = data
            super().__init__(data)

    for _ in range(100):  # a loader for each epoch
        kept = Keeping(dataset)
    assert len(proxies._notes[key]) == 16
    del kept, dataset
    gc.collect()
    assert key not in proxies._notes
    loader = DpexDataLoader([1, 2])  # a list has no weak references: its note goes with the loader
    key = id(loader.dataset)
    assert key in proxies._notes
    del loader
    gc.collect()
    assert key not in proxies._notes


@pytest.mark.parametrize("how", [copy.copy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_of_the_own_loader_is_a_loader_of_its_own(how: Callable[[Any], Any]) -> None:
    loader = DpexDataLoader(DATA, num_workers=1)
    again = how(loader)
    assert numbers(as_accelerate(again)) == list(range(60))
    assert (loader.stats().batches, again.stats().batches) == (0, 60)


def test_a_rebuilt_loader_of_dpexs_class_shares_what_is_shown() -> None:
    """Lightning and Fabric call the loader's own class again, with a `DistributedSampler`."""
    loader = DpexDataLoader(DATA, num_workers=1, seeding="batch")
    sampler = DistributedSampler(DATA, num_replicas=2, rank=0, shuffle=False)
    again = type(loader)(DATA, sampler=sampler, num_workers=loader.num_workers, timeout=loader.timeout)
    assert numbers(again) == list(range(0, 60, 2))
    assert loader.stats().batches == 30


def test_a_rebuilt_loader_of_dpexs_class_is_tuned_as_the_own_one() -> None:
    loader = DpexDataLoader(DATA, num_workers="auto")
    again = type(loader)(DATA, num_workers=loader.num_workers, timeout=loader.timeout)
    assert (again._is_auto, again.seeding, again._tuning() is loader._tuning()) == (True, "batch", True)
    assert not type(loader)(DATA, num_workers=loader.num_workers)._is_auto


def test_a_deleted_loader_of_a_list_lives_as_long_as_its_copies() -> None:
    data = list(range(8))
    loader: Any = DpexDataLoader(data, 4, num_workers=1, seeding="batch", name="list")
    loader.timeout = 30
    plain = DataLoader(data, 4, num_workers=1, timeout=loader.timeout)
    del loader
    gc.collect()
    assert [batch.tolist() for batch in plain] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    behind = loader_behind(plain)
    assert behind is not None
    assert (behind.name, behind.seeding, behind.timeout) == ("list", "batch", 30)
    assert id(data) in proxies._notes
    del plain, behind
    gc.collect()
    assert id(data) not in proxies._notes


# -- a loader that a framework makes itself, and finding the loader ---------------------------------------------------


def test_a_plain_loader_is_served_on_demand() -> None:
    plain = DataLoader(DATA, 4)
    behind = serve(Wrapper(plain), worker_config=WorkerConfig(memory_budget=1 << 20), name="served")
    assert loader_behind(plain) is behind
    plain.collate_fn = lambda samples: (torch.stack([number for (number,) in samples]),)
    assert [numbers(plain), numbers(plain)] == [list(range(60))] * 2
    assert (behind._is_auto, behind.seeding, behind.worker_config.memory_budget) == (True, "batch", 1 << 20)
    assert behind.stats().batches == 15
    behind.close()
    fixed = serve(DataLoader(DATA, 4, num_workers=3), 1, seeding="batch")
    assert (fixed._is_auto, fixed.num_workers, fixed.seeding, fixed._tuning()) == (False, 1, "batch", None)
    assert serve(fixed) is fixed
    assert serve(DataLoader(DATA, num_workers=1, prefetch_factor=8), 2).prefetch_factor == 8
    assert serve(DataLoader(DATA, num_workers=1, prefetch_factor=8), 0).prefetch_factor is None


def test_what_cannot_be_served_on_demand_is_refused() -> None:
    with pytest.raises(TypeError, match="workers"):
        serve(DataLoader(DATA), workers=2)
    with pytest.raises(OptionError, match="seeding='no'"):
        serve(DataLoader(DATA), seeding="no")
    with pytest.raises(OptionError, match=r"batch_size=8.*that of the loader holds"):
        serve(DataLoader(DATA, 4), batch_size=8)
    for loader in (OwnIterators(DATA), [1]):
        with pytest.raises(OptionError, match="its class makes iterators itself"):
            serve(loader)
    with pytest.raises(OptionError, match="its class defines _index_sampler"):
        serve(OwnSampler(DATA))


class Wrapper:
    """As Accelerate's `DataLoaderShard`: it has the loader, and looks like it."""

    def __init__(self, loader: Any) -> None:
        self.base_dataloader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base_dataloader, name)


def test_the_loader_behind_wrappers_is_found() -> None:
    loader = DpexDataLoader(DATA, num_workers=1)
    plain = as_accelerate(loader)
    for outer in (plain, Wrapper(plain), Wrapper(Wrapper(plain))):
        assert loader_behind(outer) is known_proxy(plain) is not None
    assert loader_behind(Wrapper(loader)) is loader
    for nothing in (DataLoader(DATA), OwnIterators(DATA, timeout=loader.timeout), [1], None):
        assert loader_behind(nothing) is None


class OwnIterators(DataLoader[Any]):
    """Makes torch's iterators itself, as torchdata's `StatefulDataLoader` does."""

    def _get_iterator(self) -> Any:
        from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

        return _SingleProcessDataLoaderIter(self)


class OwnSampler(DataLoader[Any]):
    @property
    def _index_sampler(self) -> Any:
        return [[1, 2], [3]]


def test_a_class_that_cannot_be_served_is_warned_of() -> None:
    loader = DpexDataLoader(DATA, num_workers=0)
    made = OwnSampler(DATA, batch_size=4, timeout=loader.timeout)
    with pytest.warns(RuntimeWarning, match="made from a DpexDataLoader: its class defines _index_sampler") as caught:
        assert numbers(made)
    assert "train with the DpexDataLoader itself" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_unrelated_loaders_and_datapipes_stay_torchs_silently() -> None:
    loader = DpexDataLoader(IterableWrapper([1, 2]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for other in (DataLoader(DATA, num_workers=1), OwnIterators(DATA), DataLoader(IterableWrapper([1, 2]))):
            assert type(iter(other)).__module__ == "torch.utils.data.dataloader"
        assert [int(v) for v in DataLoader(loader.dataset, batch_size=None, timeout=loader.timeout)] == [1, 2]


UNTOUCHED = """
from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter
before, init = DataLoader._get_iterator, _BaseDataLoaderIter.__init__
import dpex
dpex.DpexDataLoader
assert DataLoader._get_iterator is before
dpex.DpexDataLoader([1])
assert DataLoader._get_iterator.__wrapped__ is before
assert _BaseDataLoaderIter.__init__ is init
"""


def test_torch_is_untouched_until_there_is_a_loader() -> None:
    subprocess.run([sys.executable, "-c", UNTOUCHED], check=True, timeout=60)


def test_a_number_that_is_assigned_is_said_to_end_tuning() -> None:
    loader = DpexDataLoader(DATA, num_workers="auto")
    iter(loader)
    assert loader._runtime.tuner is not None
    with pytest.warns(UserWarning, match=r"num_workers=1 was assigned .*AutotuneConfig\(max_local=1\)") as caught:
        loader.num_workers = 1
    assert caught[0].filename == __file__
    iterator: Any = iter(loader)
    assert (loader._runtime.tuner, loader.stats().pools["local"].wanted) == (None, 1)
    assert len(list(iterator)) == 60
    plain = as_accelerate(loader)
    numbers(plain)
    assert not known_proxy(plain)._is_auto
    loader.close()


def test_an_assigned_number_overrules_resize_and_a_configuration() -> None:
    loader = DpexDataLoader(DATA, num_workers=1, autotune=AutotuneConfig(max_local=4))
    loader.resize(local=3)
    with pytest.warns(UserWarning, match="nothing is tuned any more"):
        loader.num_workers = 2
    assert (loader._current_settings().local, loader.autotune) == (2, False)
    loader.resize(local=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.num_workers = 1
    assert loader._current_settings().local == 1

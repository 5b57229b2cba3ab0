"""`dpex.serve`: a loader of torch's class has a DpexDataLoader's options, batches and figures, and no other loader has.

Here loaders are built as frameworks build them; with the frameworks themselves it is tried beside this file.
"""

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from inspection import settings_of, tuner_of
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from dpex import AutotuneConfig, DpexDataLoader, OptionError, loader_behind, serve
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
    behind = serve(plain, like=loader)
    expected = [batch.tolist() for (batch,) in torchs]
    for _ in range(2):
        assert [batch.tolist() for (batch,) in plain] == expected
    assert (behind.stats().batches, behind.num_workers, behind._is_auto) == (len(expected), workers, False)


@pytest.mark.parametrize("how", REBUILT)
def test_all_options_come_from_like(how: str) -> None:
    """Also those of torch's that Ray Train leaves out, and those that were assigned."""
    options: dict[str, Any] = {"prefetch_factor": 5, "in_order": False, "persistent_workers": True}
    loader = DpexDataLoader(DATA, num_workers=2, multiprocessing_context="fork", seeding="batch", **options)
    loader.worker_config, loader.timeout, loader.name = WorkerConfig(memory_budget=1 << 20), 30, "train"
    plain = REBUILT[how](loader)
    behind = serve(plain, like=loader)
    del loader
    assert sorted(numbers(plain)) == sorted(numbers(plain)) == list(range(60))
    assert {name: getattr(behind, name) for name in options} == options
    assert (behind.multiprocessing_context.get_start_method(), settings_of(behind).prefetch) == ("fork", 10)
    assert (behind.name, behind.timeout, behind.worker_config.memory_budget) == ("train", 30, 1 << 20)
    behind.close()


AUTO: dict[str, Any] = {"num_workers": "auto", "autotune": AutotuneConfig(max_local=2), "name": "mine"}
FIXED: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 7, "persistent_workers": True, "name": "mine"}
GIVEN: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (AUTO, {}, {"_is_auto": True, "autotune": AUTO["autotune"], "seeding": "batch", "name": "mine"}),
    (AUTO, {"name": "other", "num_workers": "auto"}, {"_is_auto": True, "autotune": AUTO["autotune"], "name": "other"}),
    (AUTO, {"num_workers": 3}, {"_is_auto": False, "num_workers": 3, "autotune": None, "seeding": "batch"}),
    (AUTO, {"num_workers": 3, "autotune": AUTO["autotune"]}, {"num_workers": 3, "autotune": AUTO["autotune"]}),
    (AUTO, {"autotune": AutotuneConfig(max_local=1)}, {"_is_auto": True, "autotune": AutotuneConfig(max_local=1)}),
    (FIXED, {}, {"num_workers": 2, "prefetch_factor": 7, "persistent_workers": True, "seeding": "worker"}),
    (FIXED, {"num_workers": 0}, {"num_workers": 0, "prefetch_factor": None, "name": "mine"}),
    (FIXED, {"prefetch_factor": 3, "in_order": False}, {"prefetch_factor": 3, "in_order": False, "num_workers": 2}),
    (FIXED, {"num_workers": "auto", "seeding": "batch"}, {"_is_auto": True, "prefetch_factor": 7}),
]


@pytest.mark.parametrize(("mine", "given", "expected"), GIVEN, ids=lambda value: ",".join(map(str, value)))
def test_what_is_given_wins_over_like(mine: Any, given: Any, expected: dict[str, Any]) -> None:
    like = DpexDataLoader(DATA, **mine)
    behind = serve(as_ray_train(like), like=like, **given)
    assert {name: getattr(behind, name) for name in expected} == expected


def test_the_loaders_data_counts_also_where_it_is_changed_later() -> None:
    like = DpexDataLoader(DATA, 5, drop_last=True, timeout=3)
    plain = DataLoader(TensorDataset(torch.arange(10)), 4, num_workers=1)
    behind = serve(Wrapper(plain), like=like)
    assert (behind.batch_size, behind.timeout, behind.drop_last) == (4, 0, False)
    assert numbers(plain) == list(range(10))
    plain.collate_fn = lambda samples: (-torch.stack([number for (number,) in samples]),)
    assert numbers(plain) == [-number for number in range(10)]
    assert behind.stats().batches == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_behind_may_be_closed_resumed_and_resized(workers: int) -> None:
    """Also where the framework's loader has persistent workers, which the loader behind keeps."""
    plain = DataLoader(DATA, 4, num_workers=1, persistent_workers=True)
    next(iter(plain))  # by torch's workers
    behind = serve(plain, workers, seeding="batch")
    assert (behind.persistent_workers, plain.persistent_workers) == (workers == 1, False)
    assert numbers(plain) == numbers(plain) == list(range(60))
    assert len(behind._runtime.iterators) == workers
    state, iterator = behind.state_dict(), iter(plain)
    next(iterator)
    middle = behind.state_dict()
    if workers:
        behind.resize(local=2)
        assert behind.stats().pools["local"].wanted == 2
    behind.close()
    for saved, first in ((state, 0), (middle, 4)):
        behind.load_state_dict(saved)
        assert numbers(plain) == list(range(first, 60))
    behind.close()


class Wrapped(Dataset[Any]):
    """As Accelerate's `IterableDatasetShard` keeps what it shards."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


class Numbered(IterableDataset[int]):
    num_shards = 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Sharded(IterableDataset[int]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[int]:
        return iter(self.dataset)


@pytest.mark.filterwarnings("error:.*names no shards")
def test_streams_stay_as_many_when_a_framework_wraps_the_dataset() -> None:
    loader = DpexDataLoader(Numbered(), num_workers="auto")
    plain = DataLoader(Sharded(loader.dataset), num_workers=loader.num_workers)
    behind = serve(plain, like=loader)
    assert sorted(int(number) for number in plain) == sorted(loader.num_workers * list(range(10)))
    assert behind.num_workers == loader.num_workers > 1
    assert tuner_of(behind) is not None


class Wrapper:
    """As Accelerate's `DataLoaderShard`: it has the loader, and looks like it."""

    def __init__(self, loader: Any) -> None:
        self.base_dataloader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base_dataloader, name)


class CopyingWrapper(DataLoader[Any]):
    """As Ray Train's `_WrappedDataLoader` and Fabric's: it copies all attributes."""

    def __init__(self, loader: Any) -> None:
        self.__dict__.update(loader.__dict__)
        self._dataloader = loader

    def __iter__(self) -> Any:
        return iter(self._dataloader)


@pytest.mark.parametrize("is_wrapped_first", [True, False])
def test_a_wrapper_that_copies_attributes_iterates_it(is_wrapped_first: bool) -> None:
    plain = DataLoader(DATA, 4)
    outer = CopyingWrapper(plain) if is_wrapped_first else None
    behind = serve(outer or plain, 1)
    outer = outer or CopyingWrapper(plain)
    assert numbers(outer) == numbers(CopyingWrapper(outer)) == list(range(60))
    assert behind.stats().batches == 15
    assert loader_behind(outer) is loader_behind(plain) is behind


def test_the_loader_behind_wrappers_is_found() -> None:
    loader = DpexDataLoader(DATA, num_workers=1)
    plain = as_accelerate(loader)
    behind = serve(plain, like=loader)
    for outer in (plain, Wrapper(plain), Wrapper(Wrapper(plain))):
        assert loader_behind(outer) is behind
    for own in (loader, Wrapper(loader), CopyingWrapper(loader)):
        assert loader_behind(own) is serve(own) is serve(own, like=loader) is loader
    for nothing in (DataLoader(DATA), OwnIterators(DATA), [1], None):
        assert loader_behind(nothing) is None


COPIES = (copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader)))


@pytest.mark.parametrize("copied", COPIES, ids=["deep copy", "pickle"])
def test_a_copy_of_a_served_loader_is_torchs_again(copied: Callable[[Any], Any]) -> None:
    plain = DataLoader(DATA, 4)
    behind = serve(plain, 1)
    again = copied(copied(plain))
    assert type(iter(again)).__module__ == "torch.utils.data.dataloader"
    assert numbers(again) == list(range(60))
    assert (behind.stats().batches, loader_behind(again)) == (0, None)
    assert serve(again, 1) is loader_behind(again) is not None


def test_all_ends_with_the_loader() -> None:
    plain: Any = DataLoader(DATA, 4)
    behind: Any = serve(plain, 1)
    iter(plain)
    ends = [weakref.ref(plain), weakref.ref(behind)]
    gc.disable()
    try:
        del plain, behind
        assert [end() for end in ends] == [None, None]
    finally:
        gc.enable()


class OwnIterators(DataLoader[Any]):
    """Makes torch's iterators itself, as torchdata's `StatefulDataLoader` does."""

    def _get_iterator(self) -> Any:
        from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

        return _SingleProcessDataLoaderIter(self)


class OwnSampler(DataLoader[Any]):
    @property
    def _index_sampler(self) -> Any:
        return [[1, 2], [3]]


PLAIN: Any = DataLoader(DATA, 4)
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: serve(PLAIN, seeding="no"), "seeding='no'"),
    (lambda: serve(PLAIN, batch_size=8), r"batch_size=8\): the loader's own value applies"),
    (lambda: serve(PLAIN, like=PLAIN), r"like=<torch.*>\): give a DpexDataLoader"),
    (lambda: serve(DpexDataLoader(DATA), 3), r"num_workers=3\): a DpexDataLoader has options of its own; give this"),
    (lambda: serve(OwnIterators(DATA)), "its class makes iterators itself. Train with a DpexDataLoader"),
    (lambda: serve([1]), "its class makes iterators itself"),
    (lambda: serve(OwnSampler(DATA)), "its class defines _index_sampler"),
    (lambda: serve(DataLoader(IterableWrapper([1, 2]))), "DataPipes are left to PyTorch"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_cannot_be_served_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        call()
    assert loader_behind(PLAIN) is None


def test_an_option_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="workers"):
        serve(PLAIN, workers=2)


UNTOUCHED = """
from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter
before = vars(DataLoader).copy(), vars(_BaseDataLoaderIter).copy()
import dpex
served, other = DataLoader([1]), DataLoader([1])
loader = dpex.DpexDataLoader([1])
dpex.serve(served, like=loader)
assert [len(list(each)) for each in (served, other, loader)] == [1, 1, 1]
assert (vars(DataLoader).copy(), vars(_BaseDataLoaderIter).copy()) == before
assert type(iter(other)).__module__ == "torch.utils.data.dataloader"
"""


def test_torchs_classes_are_untouched() -> None:
    subprocess.run([sys.executable, "-c", UNTOUCHED], check=True, timeout=60)

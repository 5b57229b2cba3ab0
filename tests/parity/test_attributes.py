"""Attributes, their freezing, copies and pickles, subclasses."""

import copy
import multiprocessing
import pickle
from typing import Any

import pytest
import torch
from inspection import base_seed_of, workers_of
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .datasets import Counting, as_is
from .harness import Loader, caught, parity

MAP = Counting(10)
PUBLIC = (
    "batch_size",
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "worker_init_fn",
    "in_order",
    "drop_last",
    "collate_fn",
    "persistent_workers",
)
PRIVATE = ("_iterator", "_dataset_kind", "_auto_collation", "_IterableDataset_len_called")
FROZEN = ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers")
FREE = (*(name for name in PUBLIC if name not in FROZEN), "generator", "multiprocessing_context", "anything_else")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "workers": {"num_workers": 2, "prefetch_factor": 5, "persistent_workers": True, "in_order": False, "timeout": 3},
    "single": {"batch_size": None},
    "batch_sampler": {"batch_sampler": [[1, 2]]},
    "callables": {"collate_fn": as_is, "worker_init_fn": print, "num_workers": 1},
}


@pytest.mark.parametrize("options", OPTIONS)
@parity
def test_attributes(cls: Loader, options: str) -> Any:
    loader = cls(MAP, **OPTIONS[options])
    return {name: getattr(loader, name) for name in PUBLIC + PRIVATE} | {
        "dataset": loader.dataset is MAP,
        "context": loader.multiprocessing_context is None,
        "generator": loader.generator,
        "index sampler": loader._index_sampler in (loader.batch_sampler, loader.sampler),
        "batched": loader._index_sampler is loader.batch_sampler,
    }


@parity
def test_multiprocessing_context_is_a_property(cls: Loader) -> Any:
    by_name = cls(MAP, num_workers=1, multiprocessing_context="spawn")
    context = multiprocessing.get_context("fork")
    by_object = cls(MAP, num_workers=1, multiprocessing_context=context)
    seen = [by_name.multiprocessing_context.get_start_method(), by_object.multiprocessing_context is context]
    by_name.multiprocessing_context = "fork"
    seen.append(by_name.multiprocessing_context.get_start_method())
    seen.append(caught(setattr, by_name, "multiprocessing_context", "bad"))
    seen.append(caught(setattr, by_name, "multiprocessing_context", 5))
    seen.append(by_name.multiprocessing_context.get_start_method())
    seen.append(caught(setattr, cls(MAP), "multiprocessing_context", "fork"))
    return seen


@pytest.mark.parametrize("name", FROZEN)
@parity
def test_frozen(cls: Loader, name: str) -> Any:
    loader = cls(MAP, batch_size=2)
    before = getattr(loader, name)
    return [caught(setattr, loader, name, {}), getattr(loader, name) is before]


@pytest.mark.parametrize("name", FREE)
@parity
def test_free(cls: Loader, name: str) -> Any:
    loader = cls(MAP, num_workers=1)
    setattr(loader, name, None)
    return getattr(loader, name)


def double(batch: list[Any]) -> list[Any]:
    return batch * 2


@parity
def test_free_attributes_have_effect_at_the_next_iter(cls: Loader) -> Any:
    loader = cls(MAP, batch_size=5)
    seen = [list(loader)]
    loader.collate_fn = double
    seen.append(list(loader))
    loader.num_workers = 1
    loader.prefetch_factor = 2
    seen.append(list(loader))
    loader.generator = torch.Generator().manual_seed(3)
    seen.append(list(loader))
    loader.num_workers = 0
    seen.append(list(loader))
    return [seen, loader.generator]


@pytest.mark.parametrize("workers", [0, 2])
@parity
def test_generator_set_afterwards(cls: Loader, workers: int) -> Any:
    """Lightning and accelerate do so; the sampler keeps the generator it was made with."""
    loader = cls(MAP, shuffle=True, num_workers=workers)
    loader.generator = torch.Generator().manual_seed(9)
    return [list(loader), list(loader), loader.generator]


@parity
def test_subscript(cls: Loader) -> Any:
    return [cls[int].__args__, cls[torch.Tensor].__args__, caught(lambda: list(cls[int](MAP, batch_size=5)))]


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


COPIES: dict[str, Any] = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": pickled}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("workers", [0, 1])
@parity
def test_copies(cls: Loader, how: str, workers: int) -> Any:
    loader = cls(MAP, batch_size=3, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(5))
    again = COPIES[how](loader)
    return [
        type(again) is cls,
        [getattr(again, name) for name in PUBLIC],
        list(again),
        again.generator,
        again.generator is again.sampler.generator,
        loader.generator,
        list(loader),
        loader.generator,
        caught(setattr, again, "batch_size", 3),
    ]


@parity
def test_copies_of_a_loader_that_was_used(cls: Loader) -> Any:
    loader = cls(MAP, batch_size=3, num_workers=1)
    next(iter(loader))
    return [list(copy.deepcopy(loader)), list(pickle.loads(pickle.dumps(loader)))]


@parity
def test_a_loader_with_live_persistent_workers_is_not_picklable(cls: Loader) -> Any:
    loader = cls(MAP, num_workers=1, persistent_workers=True)
    list(loader)
    return [caught(pickle.dumps, loader), caught(copy.deepcopy, loader), type(loader._iterator) is type(iter(loader))]


@pytest.mark.parametrize("workers", [0, 1])
@parity
def test_iterators(cls: Loader, workers: int) -> Any:
    loader = cls(MAP, num_workers=workers, batch_size=4)
    iterator = iter(loader)
    return [
        isinstance(iterator, _BaseDataLoaderIter),
        iter(iterator) is iterator,
        len(iterator),
        caught(pickle.dumps, iterator),
        caught(copy.deepcopy, iterator),
        loader._iterator,
        next(iterator),
        len(iterator),
        [
            getattr(iterator, name)
            for name in (
                *("_num_workers", "_num_yielded", "_drop_last", "_auto_collation", "_timeout", "_profile_name"),
                "_dataset",
            )
        ],
        base_seed_of(iterator),
    ]


@parity
def test_workers_of_an_iterator(cls: Loader) -> Any:
    """torch's tests and frameworks hold on to `_workers`: process-like objects, one per logical worker."""
    iterator = iter(cls(MAP, num_workers=2, batch_size=4))
    workers = workers_of(iterator)
    next(iterator)
    alive = [w.is_alive() for w in workers]
    rest = list(iterator)
    for worker in workers:
        worker.join(60.0)
    return [len(workers), alive, rest, [(w.is_alive(), w.exitcode) for w in workers], len(workers_of(iterator))]


@parity
def test_a_subclass_with_its_own_iter_and_len(cls: Loader) -> Any:
    class Mine(cls):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.before = "set before super().__init__"
            self.batch_size = 77
            super().__init__(*args, **kwargs)

        def __iter__(self) -> Any:
            return (("mine", batch) for batch in super().__iter__())

        def __len__(self) -> int:
            return 100 + super().__len__()  # type: ignore[no-any-return]

    return [(list(m), len(m), m.before, m.batch_size) for m in (Mine(MAP, 5), Mine(MAP, 5, num_workers=1))]


@parity
def test_a_subclass_with_its_own_get_iterator(cls: Loader) -> Any:
    class Mine(cls):  # type: ignore[misc]
        made = 0

        def _get_iterator(self) -> Any:
            self.made += 1
            return super()._get_iterator()

    seen = []
    for options in ({}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}):
        mine = Mine(MAP, batch_size=5, **options)
        seen.append([list(mine), list(mine), mine.made])
    return seen


@parity
def test_replaced_sampler_in_a_new_loader(cls: Loader) -> Any:
    """What Lightning and accelerate do: take a loader apart and build another of its class."""
    old = cls(MAP, batch_size=4, drop_last=True)
    sampler = BatchSampler(SequentialSampler(range(3, 9)), old.batch_sampler.batch_size, old.batch_sampler.drop_last)
    new = type(old)(old.dataset, batch_sampler=sampler, num_workers=old.num_workers, collate_fn=old.collate_fn)
    return [list(new), isinstance(new, DataLoader)]

"""The constructor: its signature, every refusal with its words, and what it does not do."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch_features import needs_cpu_count

from .datasets import Counting, SizedStream, Stream, pair
from .harness import Loader, candidate, caught, parity

# torch's half-built iterators complain in __del__
HALF_BUILT = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
MAP = Counting(10)
STREAM = SizedStream(pair, 10, 10)


def test_the_signature_begins_with_torch_s() -> None:
    theirs = list(inspect.signature(DataLoader.__init__).parameters.values())
    ours = {p.name: p for p in inspect.signature(candidate().__init__).parameters.values()}
    positional = [p.name for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    for parameter in theirs:
        assert ours[parameter.name].default == parameter.default, parameter.name
        assert ours[parameter.name].kind == parameter.kind, parameter.name


def test_what_torch_has_not_is_keyword_only() -> None:
    theirs = inspect.signature(DataLoader.__init__).parameters
    ours = inspect.signature(candidate().__init__).parameters.values()
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in ours if p.name not in theirs)


def test_it_is_a_true_subclass() -> None:
    assert issubclass(candidate(), DataLoader)


def batches_of_three() -> BatchSampler:
    return BatchSampler(SequentialSampler(MAP), 3, False)


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


REFUSED: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "prefetch_factor without workers": lambda: (MAP, {"prefetch_factor": 2}),
    "persistent_workers without workers": lambda: (MAP, {"persistent_workers": True}),
    "sampler and shuffle": lambda: (MAP, {"sampler": [1], "shuffle": True}),
    "batch_sampler and batch_size": lambda: (MAP, {"batch_sampler": batches_of_three(), "batch_size": 11}),
    "batch_sampler and shuffle": lambda: (MAP, {"batch_sampler": batches_of_three(), "shuffle": True}),
    "batch_sampler and sampler": lambda: (MAP, {"batch_sampler": batches_of_three(), "sampler": [1]}),
    "batch_sampler and drop_last": lambda: (MAP, {"batch_sampler": batches_of_three(), "drop_last": True}),
    "batch_size None and drop_last": lambda: (MAP, {"batch_size": None, "drop_last": True}),
    "batch_size 0": lambda: (MAP, {"batch_size": 0}),
    "batch_size a float": lambda: (MAP, {"batch_size": 1.5}),
    "batch_size a numpy integer": lambda: (MAP, {"batch_size": np.int64(2)}),
    "batch_size True": lambda: (MAP, {"batch_size": True}),
    "stream and shuffle": lambda: (STREAM, {"shuffle": True}),
    "stream and sampler": lambda: (STREAM, {"sampler": 3}),
    "stream and batch_sampler": lambda: (STREAM, {"batch_sampler": 3}),
    "stream is checked before the combination": lambda: (STREAM, {"shuffle": True, "sampler": 3, "batch_size": 0}),
    "start method unknown": lambda: (MAP, {"num_workers": 1, "multiprocessing_context": "bad"}),
    "context of a wrong type": lambda: (MAP, {"num_workers": 1, "multiprocessing_context": 5}),
    "context without workers": lambda: (MAP, {"multiprocessing_context": "fork"}),
    "unknown keyword": lambda: (MAP, {"zzz": 1}),
    "shuffle without a length": lambda: (NoLength(), {"shuffle": True}),
    "empty and shuffle": lambda: ([], {"shuffle": True}),
}


@pytest.mark.parametrize("case", REFUSED)
@parity
def test_refused(cls: Loader, case: str) -> Any:
    dataset, options = REFUSED[case]()
    made = caught(cls, dataset, **options)
    return made if not isinstance(made, DataLoader) else "accepted"


NAMED: dict[str, tuple[Any, dict[str, Any]]] = {
    "num_workers negative": (MAP, {"num_workers": -1}),
    "num_workers negative, before all others": (STREAM, {"num_workers": -2, "timeout": -1, "shuffle": True}),
    "num_workers a negative numpy integer": (MAP, {"num_workers": np.int64(-1)}),
    "timeout negative": (MAP, {"timeout": -1}),
    "prefetch_factor negative": (MAP, {"num_workers": 1, "prefetch_factor": -1}),
    "prefetch_factor negative, no workers": (MAP, {"num_workers": 0, "prefetch_factor": -1}),
    "prefetch_factor 0, no workers": (MAP, {"num_workers": 0, "prefetch_factor": 0}),
    "prefetch_factor a string, no workers": (MAP, {"num_workers": 0, "prefetch_factor": "2"}),
}


@pytest.mark.parametrize("case", NAMED)
def test_refusals_that_name_the_value_keep_torchs_words(case: str) -> None:
    dataset, options = NAMED[case]
    theirs, ours = (caught(cls, dataset, **options).error for cls in (DataLoader, candidate()))
    assert isinstance(theirs, ValueError)
    assert isinstance(ours, type(theirs))
    assert str(theirs) in str(ours)


@parity
def test_refused_without_a_dataset(cls: Loader) -> Any:
    return "dataset" in str(caught(cls).error)


LATE: dict[str, dict[str, Any]] = {
    "timeout without workers": {"timeout": 3},
    "collate_fn cannot be called": {"collate_fn": 5},
}


@HALF_BUILT
@pytest.mark.parametrize("case", LATE)
@parity
def test_refused_late(cls: Loader, case: str) -> Any:
    """Accepted by the constructor, refused by iter() or next(); the loader stays usable for another try."""
    loader = cls(MAP, **LATE[case])
    return [caught(lambda: next(iter(loader))) for _ in range(2)]


ODD: dict[str, dict[str, Any]] = {
    "num_workers True": {"num_workers": True},
    "num_workers a numpy integer": {"num_workers": np.int64(1)},
    "shuffle a number": {"shuffle": 1},
    "shuffle None": {"shuffle": None},
    "sampler a range": {"sampler": range(3, 7), "batch_size": 2},
    "sampler an empty list": {"sampler": []},
    "batch_sampler a list": {"batch_sampler": [[1, 2], [3]]},
    "batch_sampler with lists of different types": {"batch_sampler": [(1, 2), [3], range(4, 6)]},
    "timeout a float": {"num_workers": 1, "timeout": 60.5},
    "drop_last 0 workers": {"drop_last": True, "batch_size": 3},
    "prefetch_factor large": {"num_workers": 1, "prefetch_factor": 50},
}


@pytest.mark.parametrize("case", ODD)
@parity
def test_accepted(cls: Loader, case: str) -> Any:
    loader = cls(MAP, **ODD[case])
    return [caught(list, loader), caught(len, loader), loader.num_workers, loader.prefetch_factor]


@parity
def test_defaults_that_depend_on_others(cls: Loader) -> Any:
    plain = cls(MAP)
    working = cls(MAP, num_workers=1)
    batched = cls(MAP, batch_sampler=batches_of_three())
    return [
        (loader.prefetch_factor, loader.batch_size, loader.drop_last, type(loader.sampler), type(loader.batch_sampler))
        for loader in (plain, working, batched, cls(MAP, batch_size=None), cls(MAP, shuffle=True), cls(STREAM))
    ]


@parity
def test_the_constructor_draws_nothing_and_reads_nothing(cls: Loader) -> Any:
    generator = torch.Generator().manual_seed(3)
    for workers in (0, 2):
        for generator_or_none in (None, generator):
            cls(MAP, shuffle=True, num_workers=workers, generator=generator_or_none)
            cls(MAP, sampler=RandomSampler(MAP), num_workers=workers, generator=generator_or_none)
    cls(Stream(pair, 1), num_workers=2)
    return generator


@parity
def test_more_workers_than_processors_is_said_at_construction(cls: Loader) -> Any:
    cls(MAP, num_workers=1000)
    cls(MAP, num_workers=0)
    return caught(cls(MAP).check_worker_number_rationality)


@needs_cpu_count
def test_each_new_iterator_warns_of_more_workers_than_cpus() -> None:
    check_rationality()


@parity
def check_rationality(cls: Loader) -> Any:
    many = (torch._utils.cpu_count() or 1) + 1
    fresh = cls(MAP, num_workers=many, batch_size=10)
    kept = cls(MAP, num_workers=many, batch_size=10, persistent_workers=True)
    return [list(loader) for _ in range(2) for loader in (fresh, kept)]

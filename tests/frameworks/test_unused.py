"""A loader that ends without one ``iter()`` is warned of, once, unless a framework or the user has used its options."""

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from trainers import Forker, forker

from dpex import DpexDataLoader, WorkerConfig, serve
from dpex.loader.unused import ABOUT
from dpex.system import user_warnings

__all__ = ["forker"]
DATA = TensorDataset(torch.arange(8))


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    monkeypatch.setattr(user_warnings, "_said", user_warnings._said - {ABOUT})


def said(use: Callable[[Any], Any], dataset: Dataset[Any] = DATA, **options: Any) -> list[str]:
    """Return the warnings when a loader with these options ends after its ``use``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DpexDataLoader(dataset, **options)
        kept = use(loader)
        del loader
        del kept
        gc.collect()
    return [f"{one.filename == __file__}: {one.message}" for one in caught if "one iter()" in str(one.message)]


def as_torchs(loader: Any) -> Any:
    """As Accelerate and Ray Train build a loader."""
    return list(DataLoader(loader.dataset, num_workers=loader.num_workers))


OWN: list[dict[str, Any]] = [
    *({"num_workers": "auto"}, {"num_workers": 2, "seeding": "batch"}, {"name": "train"}, {"device": "cpu"}),
    {"worker_config": WorkerConfig(memory_budget="1G")},
]


@pytest.mark.parametrize("options", OWN, ids=str)
def test_options_that_do_nothing_are_warned_of_once(options: dict[str, Any]) -> None:
    (words,) = said(as_torchs, **options)
    assert words == (
        "True: a DpexDataLoader of a TensorDataset ended without one iter(), so its options did nothing. If a "
        "framework built another loader from it, call dpex.serve(that_loader, like=this_one) before that loader is "
        "iterated"
    )
    assert said(as_torchs, **options) == []


def again(loader: Any, **others: Any) -> Any:
    """As Lightning and Fabric call the class again: with the attributes that differ from the defaults."""
    names = ("num_workers", "autotune", "seeding", "name", "worker_config", "device")
    options = {name: getattr(loader, name) for name in names} | others
    return DpexDataLoader(loader.dataset, sampler=DistributedSampler(DATA, 2, 0), **options)


USES: dict[str, Callable[[Any], Any]] = {
    "iterated": list,
    "iterated once": lambda loader: next(iter(loader)),
    "its state is saved": lambda loader: loader.state_dict(),
    "served": lambda loader: serve(DataLoader(DATA), like=loader),
    "kept by the framework": lambda loader: serve(loader, like=loader),
    "built anew": lambda loader: list(again(loader)),
    "copied": lambda loader: list(copy.copy(loader)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("options", OWN, ids=str)
def test_options_that_were_used_are_not_warned_of(use: str, options: dict[str, Any]) -> None:
    assert said(USES[use], **options) == []


def test_a_loader_with_other_options_is_not_built_from_it() -> None:
    for other in (
        lambda loader: list(again(loader, name="validation")),
        lambda loader: list(DpexDataLoader([1], name="train")),
        lambda loader: list(DpexDataLoader(loader.dataset)),
    ):
        assert len(said(other, name="train")) == 1
        user_warnings._said.discard(ABOUT)


def test_a_loader_without_options_of_dpex_is_not_warned_of() -> None:
    assert said(as_torchs, num_workers=2, prefetch_factor=3, timeout=3, batch_size=2, shuffle=True) == []


def test_the_loader_behind_another_is_not_warned_of() -> None:
    assert said(lambda loader: [list(loader), serve(DataLoader(DATA), "auto", name="never iterated")][0]) == []


SCRIPT = "loader = DpexDataLoader([1], name='train')\n"
ENDS = {"": 1, "os.fork()": 1, "sys.exit(3)": 1, "1 / 0": 0, "list(loader)": 0}


@pytest.mark.parametrize(("end", "count"), ENDS.items(), ids=ENDS)
def test_the_end_of_a_script_tells_it_unless_a_traceback_does(forker: Forker, end: str, count: int) -> None:
    _, _, told = forker.run(SCRIPT + end)
    assert told.count("ended without one iter()") == told.count("trainer.py:1: UserWarning") == count, told

"""Loaders inside of functions that torch.compile compiles: it runs dpex as plain Python, as it runs torch's loader."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import dpex
from dpex import DpexDataLoader

DATA = torch.arange(48.0).reshape(24, 2)
TOTAL = float(DATA.sum())


def loop(loader: Any) -> Any:
    total = torch.zeros(())
    for batch in loader:
        total = total + batch.sum()
    return total


def first_batches(loader: Any) -> Any:
    """Drop two iterators in mid-epoch."""
    total = torch.zeros(())
    for batch in loader:
        total = total + batch.sum()
        break
    return total + next(iter(loader)).sum()


def with_methods(loader: Any) -> Any:
    total = torch.zeros(())
    for number, batch in enumerate(loader):
        total = total + batch.sum()
        if number == 2:
            loader.state_dict()
            assert loader.stats().batches == 3
    loader.close()
    return total


def made_inside(loader: Any) -> Any:
    return loop(DpexDataLoader(loader.dataset, batch_size=4, num_workers=loader.num_workers))


def served(**options: Any) -> Any:
    loader = DataLoader(DATA, **options)  # type: ignore[arg-type]
    dpex.serve(loader, 2)
    return loader


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Qualified names of the functions of dpex that are traced from now on."""
    from torch._dynamo import convert_frame

    names: list[str] = []
    convert = convert_frame.ConvertFrameAssert.__call__

    def noted(self: Any, frame: Any, *args: Any, **options: Any) -> Any:
        if frame.f_globals.get("__name__", "").startswith("dpex."):
            names.append(frame.f_code.co_name)
        return convert(self, frame, *args, **options)

    torch._dynamo.reset()
    monkeypatch.setattr(convert_frame.ConvertFrameAssert, "__call__", noted)
    return names


ENTRANCES = {"call", "__next__", "_next_data", "is_profiled", "__del__", "close"}
"""Functions that only ask whether they are traced, or call nothing else of dpex's; ``close`` is that of `Wakeup`."""


@pytest.mark.parametrize("function", [loop, first_batches, with_methods, made_inside])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_compiled_function_may_use_a_loader(function: Callable[[Any], Any], workers: int, traced: list[str]) -> None:
    loader = DpexDataLoader(DATA, batch_size=4, num_workers=workers, seeding="batch")
    loader.diagnose()  # from now on batches in this process are measured
    compiled = torch.compile(function, backend="eager")
    expected = float(DATA[:4].sum()) * 2 if function is first_batches else TOTAL
    assert [float(compiled(loader)), float(compiled(loader))] == [expected, expected]
    assert {name for name in traced if not name.startswith("torch_dynamo_resume_in_")} <= ENTRANCES


def test_a_compiled_function_may_use_a_served_loader(traced: list[str]) -> None:
    assert float(torch.compile(loop, backend="eager")(served(batch_size=4))) == TOTAL
    assert {name for name in traced if not name.startswith("torch_dynamo_resume_in_")} <= ENTRANCES

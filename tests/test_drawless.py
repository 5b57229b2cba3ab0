"""Batches that torch's own code makes alone: which they are, and that they are the same without states of their own."""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from dpex import DpexDataLoader
from dpex.worker import in_process
from dpex.worker.drawless import draws_nothing, is_torchs_alone
from dpex.worker.rng_state import located


class Own(TensorDataset):
    """A user's subclass, which might do anything."""


class Marked(torch.Tensor):
    """A user's tensors."""


class Index(int):
    """A user's integer."""


def columns() -> TensorDataset:
    return TensorDataset(torch.arange(60.0).view(20, 3), torch.arange(20))


def with_method() -> TensorDataset:
    dataset = columns()
    dataset.__getitems__ = lambda indices: [torch.rand(3) for _ in indices]  # type: ignore[attr-defined]
    return dataset


TORCHS: dict[str, Callable[[], Any]] = {
    "tensors": columns,
    "range": lambda: range(20),
    "subset": lambda: Subset(columns(), [3, 1, -1, 7]),
    "subset by a range": lambda: Subset(columns(), range(4, 9)),
    "concatenated": lambda: ConcatDataset([columns(), Subset(columns(), (1, 2))]),
    "stacked": lambda: StackDataset(columns(), range(20)),
    "stacked by name": lambda: StackDataset(a=columns(), b=columns()),
}
USERS: dict[str, Callable[[], Any]] = {
    "subclass": lambda: Own(torch.rand(4, 2)),
    "tensors of a subclass": lambda: TensorDataset(torch.rand(4, 2).as_subclass(Marked)),
    "method of one object": with_method,
    "list": lambda: [torch.rand(2)] * 4,
    "indices of a user's class": lambda: Subset(columns(), UserList([1, 2])),
    "an index of a user's class": lambda: Subset(columns(), [1, Index(2)]),
    "subset of a user's": lambda: Subset(Own(torch.rand(4, 2)), [1]),
    "concatenated with a user's": lambda: ConcatDataset([columns(), Own(torch.rand(4, 2))]),
    "stacked with a user's": lambda: StackDataset(a=columns(), b=Own(torch.rand(20, 2))),
}


@pytest.mark.parametrize("name", TORCHS)
def test_what_is_torchs_alone_draws_nothing(name: str) -> None:
    assert draws_nothing(TORCHS[name](), default_collate)


@pytest.mark.parametrize("name", USERS)
def test_whatever_is_a_users_may_draw(name: str) -> None:
    assert not draws_nothing(USERS[name](), default_collate)


def test_a_users_collate_function_may_draw() -> None:
    assert not draws_nothing(columns(), lambda batch: batch)


def test_a_method_that_was_replaced_may_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, index: torch.rand(3))
    assert not draws_nothing(columns(), default_collate)


class Looking(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_indices_modes_and_collate_functions_of_a_user_are_seen_at_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_torchs_alone([1, 2])
    for index in ([Index(1)], [1, True], (1, 2), 1, [], [torch.tensor(1)]):
        assert not is_torchs_alone(index)
    for mode in (Looking(), Dispatching()):
        with mode:
            assert not is_torchs_alone([1])
    assert is_torchs_alone([1])
    monkeypatch.setitem(default_collate_fn_map, Own, default_collate)
    assert not is_torchs_alone([1])


def batches(dataset: Any, **options: Any) -> list[Any]:
    return list(DpexDataLoader(dataset, 3, seeding="batch", **options))


@pytest.mark.parametrize("name", TORCHS)
def test_batches_are_those_of_a_worker_and_no_state_is_touched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = batches(TORCHS[name](), num_workers=1)
    generators = located()
    assert generators is not None
    iterator = iter(DpexDataLoader(TORCHS[name](), 3, seeding="batch"))
    before = generators.save()
    monkeypatch.setattr(in_process, "words_of", None)
    torch.testing.assert_close(list(iterator), expected, rtol=0, atol=0)
    assert generators.save() == before


def test_a_users_collate_function_that_comes_in_the_middle_has_its_states(monkeypatch: pytest.MonkeyPatch) -> None:
    def collate(batch: Any, *, collate_fn_map: Any = None) -> Any:
        return torch.rand(())

    def drawn() -> list[Any]:
        iterator = iter(DpexDataLoader(range(9), 3, seeding="batch", generator=torch.Generator()))
        first = [next(iterator)]
        with monkeypatch.context() as patch:
            patch.setitem(default_collate_fn_map, int, collate)
            return first + list(iterator)

    found, again = drawn(), drawn()
    assert found[1] != found[2]
    assert all(map(torch.equal, found, again))


def test_modes_are_those_of_the_iterator() -> None:
    with torch.inference_mode():
        iterator = iter(DpexDataLoader(columns(), 3, seeding="batch"))
    assert next(iterator)[0].is_inference()
    assert not torch.is_inference_mode_enabled()

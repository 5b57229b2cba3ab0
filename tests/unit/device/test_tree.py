"""Batches as trees: what belongs on a device goes there, containers as torch's ``pin_memory`` rebuilds them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, namedtuple
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.data._utils.pin_memory as torch_pinning
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch_features import needs_kept_tuples

from dpex.device import tree


class Point(NamedTuple):
    x: Any
    y: Any


Old = namedtuple("Old", ["a"])


class Tagged(dict[str, Any]):
    tag = "none"


class Frozen(Mapping[str, Any]):
    """Cannot be built from a mapping."""

    def __init__(self, one: Any, two: Any) -> None:
        self._items = {"one": one, "two": two}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return 2


class Own:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.moved = 0

    def to(self, device: torch.device) -> Own:
        made = Own(self.tensor.to(device))
        made.moved = self.moved + 1
        return made


def tagged() -> Tagged:
    made = Tagged(x=torch.arange(3))
    made.tag = "kept"
    return made


TREES: dict[str, Any] = {
    "tensor": torch.arange(3),
    "list": [torch.arange(3), "text", b"bytes", 3, None],
    "nested": {"a": [torch.arange(3), (torch.zeros(2), {"b": torch.ones(1)})]},
    "named tuple": Point(torch.arange(3), "y"),
    "old named tuple": Old(torch.arange(3)),
    "ordered": OrderedDict(b=torch.arange(3), a=torch.zeros(1)),
    "dict with more to it": tagged(),
    "frozen mapping": Frozen(torch.arange(3), 2),
    "user dict": UserDict(x=torch.arange(3)),
    "user list": UserList([torch.arange(3)]),
    "range": range(4),
    "array": [np.arange(3), np.float64(2.5)],
    "set": {1, 2},
}
MARKS = {"nested": needs_kept_tuples}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in TREES])
def test_containers_become_what_torch_s_pinning_makes_of_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    marked = torch.full((2,), 7)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: marked)  # torch 2.4 names the device
    expected = torch_pinning.pin_memory(TREES[name])
    found = tree.mapped(TREES[name], lambda tensor: marked, pytest.fail)
    assert type(found) is type(expected)
    assert getattr(found, "tag", None) == getattr(expected, "tag", None)
    assert repr(found) == repr(expected) or isinstance(found, Mapping)
    if isinstance(found, Mapping):
        assert repr(dict(found)) == repr(dict(expected))


def test_a_batch_is_left_as_it_was() -> None:
    """Unlike a container that is changed where it stands: the same one may be a worker's slot."""
    batch = {"x": [torch.arange(3)]}
    inner = batch["x"]
    tree.mapped(batch, lambda tensor: tensor + 1, pytest.fail)
    assert batch["x"] is inner
    assert inner[0].tolist() == [0, 1, 2]


def test_a_type_with_its_own_to_method_precedes_containers() -> None:
    moved = tree.on_device([Own(torch.arange(3)), "to"], torch.device("cpu"))
    assert (moved[0].moved, moved[1]) == (1, "to")
    packed = pack_sequence([torch.arange(3.0), torch.arange(2.0)])
    assert isinstance(tree.on_device(packed, torch.device("cpu")), PackedSequence)


def test_a_type_whose_to_returns_nothing_has_moved_in_place() -> None:
    class InPlace:
        def to(self, device: torch.device, non_blocking: bool = False) -> None:
            self.at = device

    batch = InPlace()
    assert tree.on_device(batch, torch.device("cpu")) is batch
    assert batch.at == torch.device("cpu")


def test_bytes_of_a_tree() -> None:
    batch = [torch.zeros(4), {"x": (torch.zeros(2, dtype=torch.uint8), "text")}, Own(torch.zeros(8))]
    assert tree.nbytes(batch) == 16 + 2 + 32
    assert tree.nbytes(torch.eye(4).to_sparse()) == 4 * 2 * 8 + 4 * 4


def test_attributes_in_slots_and_in_circles_are_found_once() -> None:
    class Slotted:
        __slots__ = ("me", "tensor")

        def __init__(self) -> None:
            self.me, self.tensor = self, torch.zeros(4)

        def to(self, device: torch.device) -> Slotted:
            return self

    assert tree.nbytes(Slotted()) == 16

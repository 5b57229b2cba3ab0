"""Rows of tensors, numbers and containers, put together as torch does."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from dpex.transport.arena import Arena
from dpex.worker.fetch import ArenaCollate

Pair = namedtuple("Pair", "x y")
ROWS: dict[str, list[Any]] = {
    "tensors": [torch.rand(3), torch.rand(3)],
    "pairs": [(torch.rand(3), torch.rand(2)), (torch.rand(3), torch.rand(2))],
    "pairs of a tensor and an integer": [(torch.rand(3), 4), (torch.rand(3), 5)],
    "numbers": [(1, 2.5, True), (2, 3.5, False)],
    "text": [("a", b"b"), ("c", b"d")],
    "arrays": [(np.ones(3), np.float32(2)), (np.zeros(3), np.float32(3))],
    "nested": [((torch.rand(2), 1), {"a": torch.rand(1)}), ((torch.rand(2), 2), {"a": torch.rand(1)})],
    "empty tuples": [(), ()],
    "named tuples": [Pair(torch.rand(2), 1), Pair(torch.rand(2), 2)],
    "lists": [[torch.rand(2), 1], [torch.rand(2), 2]],
    "a tuple and a list": [(torch.rand(2), 1), [torch.rand(2), 2]],
    "mappings": [OrderedDict(a=torch.rand(2)), OrderedDict(a=torch.rand(2))],
    "gradients": [(torch.rand(2, requires_grad=True),), (torch.rand(2),)],
    "several dtypes": [(torch.rand(2),), (torch.zeros(2, dtype=torch.float64),)],
}
BAD: dict[str, list[Any]] = {
    "tuples of unequal size": [(1, 2), (1,)],
    "unequal tensors": [(torch.rand(2),), (torch.rand(3),)],
    "sparse tensors": [(torch.rand(2).to_sparse(),)] * 2,
    "objects": [(object(),), (object(),)],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_rows_are_collated_as_torch_does(rows: list[Any]) -> None:
    found, expected = ArenaCollate(Arena(shared=False), 1 << 20, in_worker=False)(rows), default_collate(rows)
    assert repr(found) == repr(expected)


@pytest.mark.parametrize("rows", BAD.values(), ids=BAD)
def test_rows_that_torch_refuses_are_refused_in_its_words(rows: list[Any]) -> None:
    with pytest.raises((RuntimeError, TypeError)) as expected:
        default_collate(rows)
    with pytest.raises(expected.type) as found:
        ArenaCollate(Arena(shared=False), 1 << 20, in_worker=False)(rows)
    assert str(found.value) == str(expected.value)

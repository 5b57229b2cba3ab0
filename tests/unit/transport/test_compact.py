"""`dpex.compact`: items, lookups, copies and errors."""

import copy
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from dpex import compact
from dpex.errors import OptionError

ROWS = [{"path": f"{n}.jpg", "box": (n, n + 0.5)} for n in range(100)] + ["text", None, b"bytes", [1, [2]]]
KEYS: list[Any] = ["a", "b" * 1000, b"a", 1, 2.5, -1, None, ("a", (1, None)), np.int64(7), True + 1, 1j, "\udc80", ()]


@pytest.mark.parametrize("items", [ROWS, tuple(ROWS), [], [0]])
def test_items_equal_those_given(items: Any) -> None:
    found = compact(items)
    assert isinstance(found, Sequence)
    assert list(found) == list(items)
    assert [found[n] for n in range(-len(items), len(items))] == list(items) * 2
    assert len(found) == len(items)


def test_slices_are_lists() -> None:
    found = compact(ROWS)
    for part in (slice(None), slice(3, 9, 2), slice(None, None, -1), slice(90, 1000), slice(5, 5)):
        assert found[part] == ROWS[part]
    assert found[np.int64(3)] == ROWS[3]
    assert ROWS[5] in found
    assert found.index("text") == 100


@pytest.mark.parametrize("place", [len(ROWS), -len(ROWS) - 1])
def test_place_out_of_range_is_an_index_error(place: int) -> None:
    with pytest.raises(IndexError, match="104 items"):
        compact(ROWS)[place]


def test_mapping_finds_each_key() -> None:
    given = {key: [number] for number, key in enumerate(KEYS)}
    found = compact(given)
    assert isinstance(found, Mapping)
    assert found == given
    assert list(found) == list(given)
    assert found[1.0] == given[1]
    assert np.str_("a") in found
    assert "c" not in found
    assert frozenset() not in found
    assert len(found) == len(given)


def test_items_are_read_only() -> None:
    found: Any = compact(ROWS)
    with pytest.raises(TypeError):
        found[0] = 1
    found[0]["path"] = "changed"
    assert found[0] == ROWS[0]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_are_equal(duplicate: Any) -> None:
    assert list(duplicate(compact(ROWS))) == ROWS
    assert duplicate(compact({"a": 1})) == {"a": 1}


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ({1, 2}, "compact(set): give a list, a tuple or a dict"),
        ([0, lambda: 0], "item 1 is a function that cannot be pickled"),
        ({frozenset(): 1}, "the key frozenset() is a frozenset; keys may be str"),
    ],
)
def test_bad_input_names_value_and_remedy(items: Any, words: str) -> None:
    with pytest.raises(OptionError) as raised:
        compact(items)
    assert words in str(raised.value)

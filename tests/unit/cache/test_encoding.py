"""Samples become bytes and come back bit for bit; two samples are compared bit for bit."""

import warnings
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dpex.cache.encoding import ALIGNMENT, decoded, encoded, is_same

Pair = namedtuple("Pair", ["image", "label"])


@dataclass
class Box:
    corners: Any
    name: str


def there_and_back(sample: Any) -> Any:
    pieces = encoded(sample)
    memory = bytearray(b"".join(pieces.parts))
    assert len(memory) == pieces.nbytes
    return decoded(memory)


NUMBERS = np.random.default_rng(0)
SAMPLES = {
    "plain": [1, 2.5, "text", b"bytes", None, True, {"a": (1, [2])}, {3, 4}],
    "tensors": {
        "small": torch.arange(3),
        "large": torch.rand(3, 40, 50),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 7),
        "bool": torch.rand(700) > 0.5,
        "complex": torch.rand(100, dtype=torch.complex64),
        "turned": torch.rand(40, 30).T,
        "channels last": torch.rand(2, 3, 16, 16).to(memory_format=torch.channels_last),
        "expanded": torch.rand(1, 400).expand(3, 400),
        "part": torch.rand(50, 50)[::2, ::3],
        "nan": torch.full((300,), float("nan")),
    },
    "arrays": (
        NUMBERS.random((30, 40)),
        np.asfortranarray(NUMBERS.random((30, 40))),
        np.array([("a", 1)], dtype=[("name", "U8"), ("value", "i4")]),
        np.array([None, "text"], dtype=object),
        np.float32(2.5),
    ),
    "objects": Pair(Box(np.arange(1000), "box"), torch.nn.Parameter(torch.ones(3))),
    "other tensors": [torch.eye(20).to_sparse(), torch.rand(4, requires_grad=True).detach().requires_grad_()],
    "tensor with attributes": [vars(noted := torch.ones(3)).update(label="noted"), noted],
    "image": (Image.fromarray(NUMBERS.integers(0, 255, (20, 30, 3), dtype=np.uint8)), 3),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_comes_back_bit_for_bit(name: str) -> None:
    sample = SAMPLES[name]
    found = there_and_back(sample)
    assert is_same(sample, found)
    if name == "tensors":
        for key in ("large", "turned", "channels last"):
            assert found[key].stride() == sample[key].stride()
    if name == "tensor with attributes":
        assert found[1].label == "noted"


def test_large_arrays_are_views_and_small_ones_are_copies() -> None:
    memory = bytearray(b"".join(encoded((torch.zeros(1000), torch.zeros(2))).parts))
    large, small = decoded(memory)
    assert large.data_ptr() % ALIGNMENT == np.frombuffer(memory, np.uint8).ctypes.data % ALIGNMENT
    large += 1
    small += 1
    assert decoded(memory)[0].sum() == 1000
    assert not is_same(decoded(memory)[1], small)


def test_parts_of_a_large_memory_do_not_take_it_along() -> None:
    large = torch.rand(3, 1000, 1000)
    assert encoded(large[:, 10:20, 10:20]).nbytes < 2000
    assert encoded((large[0, 0], large[2, 5])).nbytes < 9000
    views = {"whole": large[0], "part": large[0, 5:15], "array": large[0].numpy()}
    assert is_same(there_and_back(views), views)


def test_nested_tensors_come_back() -> None:
    parts = [torch.rand(3), torch.rand(500)]
    with warnings.catch_warnings(action="ignore"):
        nested = torch.nested.nested_tensor(parts)
    for sample in (nested, torch.nested.nested_tensor(parts, layout=torch.jagged)):
        found = there_and_back({"nested": sample, "label": 3})
        assert [torch.equal(*pair) for pair in zip(found["nested"].unbind(), parts, strict=True)] == [True, True]


def test_arrays_without_bytes_come_back() -> None:
    found = there_and_back((np.empty((0, 3)), np.zeros(3, "V0")))
    assert (found[0].shape, found[1].dtype) == ((0, 3), "V0")


def test_a_sample_that_is_cut_off_is_refused() -> None:
    memory = bytearray(b"".join(encoded(torch.zeros(1000)).parts))
    for length in (3, 20, len(memory) - 1):
        with pytest.raises(ValueError, match="sample"):
            decoded(memory[:length])


def test_a_difference_of_one_bit_is_found() -> None:
    for one, other in (
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int32)),
        (torch.zeros(3), torch.zeros(1, 3)),
        (np.zeros(3), np.zeros(3, np.float32)),
        (np.zeros(3), torch.zeros(3)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([1], (1,)),
        ([1, 2], [1]),
        (1, True),
        (Box(np.zeros(3), "a"), Box(np.ones(3), "a")),
        (0.1 + 0.2, 0.3),
    ):
        assert not is_same(one, other), (one, other)


def test_equal_objects_are_the_same_whatever_they_share() -> None:
    text = "".join(["te", "xt"])
    assert is_same({"a": ("text", "text")}, {"a": (text, "".join(["te", "xt"]))})
    assert is_same({"a", "b", "c"}, {"c", "b", "a"})
    part = np.zeros(3)
    assert is_same(Box([part, part], "a"), Box([np.zeros(3), np.zeros(3)], "a"))
    assert is_same(float("nan"), float("nan"))

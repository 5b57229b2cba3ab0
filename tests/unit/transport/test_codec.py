"""Batches there and back: what they are, what they share, and that no slot stays behind."""

import gc
import marshal
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pairs import LARGE, Pair, Point

from dpex.transport.codec import _DTYPES, _PICKLE, INLINE_BYTES, LONG_LEAF, MANY_OBJECTS, MESSAGE_BYTES, slots_of


@dataclass
class Sample:
    image: torch.Tensor
    label: Any


class Text(str):
    __slots__ = ()


@pytest.fixture
def pair() -> Pair:
    return Pair()


def raw(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return same_tensor(a, b)
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape, a.tolist()) == (b.dtype, b.shape, b.tolist())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Sample):
        return same(a.image, b.image) and same(a.label, b.label)
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    def strides(tensor: torch.Tensor) -> list[int]:
        return [stride for stride, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1]

    described = (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
    return described and (a.numel() == 0 or (strides(a) == strides(b) and raw(a) == raw(b)))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as made": lambda t: t,
    "transposed": lambda t: t.t() if t.dim() == 2 else t,
    "every other": lambda t: t[::2] if t.dim() else t,
    "shifted": lambda t: t[1:] if t.dim() else t,
    "column": lambda t: t[:, 1:2] if t.dim() == 2 else t,
    "expanded": lambda t: t.unsqueeze(0).expand(3, *t.shape),
    "unsqueezed": lambda t: t.unsqueeze(-1),
}
DTYPES = [torch.float32, torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.complex64, torch.float16]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 90]), max_size=2))
    base = torch.arange(math.prod(shape)).reshape(shape).remainder(251).to(dtype)
    return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](base)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = draw(st.sampled_from(["f4", "i8", "u1", "?", "c16", "f2", "U3", "S2", "M8[s]", "O", "i4,f8", ">i4"]))
    shape = draw(st.lists(st.sampled_from([0, 1, 3, 40]), max_size=2))
    array = np.zeros(shape, dtype)
    if dtype in ("f4", "i8", "u1"):
        array.flat = np.arange(array.size) % 200
    return array.T if draw(st.booleans()) else array


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
ODD = st.sampled_from([np.float32(1.5), Text("own"), {1, 2}, range(3), torch.float16, torch.Size([2, 3]), b"", ()])
KEYS = st.integers() | st.text(max_size=5) | st.binary(max_size=3) | st.booleans()
ODD_KEYS = st.floats(allow_nan=False) | st.tuples(st.integers()) | st.none()
TREES = st.recursive(
    SCALARS | tensors() | arrays() | ODD,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(ODD_KEYS, inner, max_size=2)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.builds(Point, inner, inner)
        | st.builds(Sample, tensors(), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TREES)
@example([[]])
@example({True: 1, 0: [()]})
@example("\ud800")
def test_any_tree_arrives_as_it_was_and_leaves_no_slot_behind(tree: Any) -> None:
    pair = Pair()
    assert same(pair([torch.zeros(LARGE), tree])[1], tree)
    assert same(pair(tree), tree)
    assert pair.slots_held() == 0


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("nbytes", [48, LARGE])
def test_every_number_type(pair: Pair, dtype: torch.dtype, nbytes: int) -> None:
    tensor = torch.arange(nbytes, dtype=torch.int32).to(torch.uint8).view(dtype)
    again = pair(tensor)
    assert (again.dtype, again.shape) == (dtype, tensor.shape)
    assert torch.equal(again.view(torch.uint8), tensor.view(torch.uint8))


def test_strides_of_extent_one_are_kept(pair: Pair) -> None:
    """Grey images in channels_last: with other strides a convolution would choose another layout."""
    for channels in (1, 3):
        images = torch.rand(2, channels, 4, 4).to(memory_format=torch.channels_last)
        assert pair(images).stride() == images.stride()
        assert same(pair(images), images)


@pytest.mark.parametrize("count", [3, LARGE])
def test_what_arrives_can_be_written_and_is_nobody_elses(pair: Pair, count: int) -> None:
    for source in (torch.ones(count), np.ones(count, np.float32)):
        first, second = pair([source]), pair([source])
        first[0][:] = 5
        assert float(second[0][0]) == 1
        assert float(source[0]) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(LARGE),
        lambda: (lambda t: [t, t[3:9]])(torch.arange(20)),
        lambda: Point(torch.arange(LARGE), [torch.empty(0, 2)]),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.empty(0, requires_grad=True),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(prototype stage|invariant checks):UserWarning")
def test_a_default_device_around_the_loop_changes_nothing(pair: Pair, make: Any) -> None:
    batch = make()
    message = pair.encoder.encode(batch)
    with torch.device("meta"):
        again = pair.decode(message)
        encoded = marshal.dumps(pair.encoder.encode(batch))
    for value in (again, pair.decode(marshal.loads(encoded))):
        tensors = value if isinstance(value, list) else [value.x, *value.y] if isinstance(value, Point) else [value]
        assert all(tensor.device.type == "cpu" for tensor in tensors)


VIEWS: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    "second inside the first": lambda t: [t, t[3:9]],
    "first inside the second": lambda t: [t[3:9], t],
    "overlapping": lambda t: [t[:10], t[5:15]],
    "another shape": lambda t: [t, t.view(-1, 8).t()],
    "another type": lambda t: [t, t.view(torch.int16)],
    "same twice": lambda t: [t[3:5], t[3:5]],
    "same memory": lambda t: [t, t.view(-1)],
    "three": lambda t: [t, t[1::2], t[::2]],
}


@pytest.mark.parametrize("wrap", [list, tuple, lambda items: [*items, Point(1, 2)]], ids=["list", "tuple", "pickled"])
@pytest.mark.parametrize("count", [64, LARGE])
@pytest.mark.parametrize("kind", VIEWS)
def test_tensors_that_share_memory_share_it_afterwards(pair: Pair, kind: str, count: int, wrap: Any) -> None:
    tensors = VIEWS[kind](torch.arange(count))
    number = len(tensors)
    again = pair(wrap(tensors))[:number]
    assert all(map(same, again, tensors))
    for ours, theirs in zip(again, tensors, strict=True):
        ours.zero_()
        theirs.zero_()
    assert all(map(same, again, tensors))
    pointers = [t.data_ptr() - tensors[0].data_ptr() for t in tensors]
    assert [t.data_ptr() - again[0].data_ptr() for t in again] == pointers


def test_small_batches_need_no_memory(pair: Pair) -> None:
    pair([torch.ones(5), {"label": 3, "name": "x"}, [1.5] * 100])
    assert pair.arena.nbytes == 0


def test_many_small_tensors_do_not_swell_the_message(pair: Pair) -> None:
    batch = [torch.full((INLINE_BYTES,), n, dtype=torch.uint8) for n in range(100)]
    assert len(marshal.dumps(pair.encoder.encode(batch))) < MESSAGE_BYTES + 100 * 100
    assert same(pair(batch), batch)


def test_a_spilled_message_is_leased_once(pair: Pair) -> None:
    """Between two leases its maker could reuse the slot."""
    node = pair.encoder.spill(pair.encoder.encode(["x" * 2000 for _ in range(64)]))
    leased = []

    def lease(segment: int, slot: int, nbytes: int) -> Any:
        leased.append((segment, slot))
        return pair._lease(segment, slot, nbytes)

    found = slots_of(node, lease)
    assert len(leased) == len(set(leased)) == len(found)


@pytest.mark.parametrize(
    "batch",
    [["x" * 100] * 20_000, {"names": [f"sample {n}" for n in range(30_000)], "pixels": torch.ones(LARGE)}, "y" * 10**6],
    ids=["strings", "strings and pixels", "one string"],
)
def test_spill_of_a_huge_message(pair: Pair, batch: Any) -> None:
    spilled = pair.encoder.spill(pair.encoder.encode(batch))
    assert len(marshal.dumps(spilled)) < 200
    assert same(pair.decode(spilled), batch)
    assert pair.slots_held() == 0


def test_a_tensor_in_a_slot_is_not_copied(pair: Pair) -> None:
    tensor = pair.arena.tensor((LARGE,), torch.float32)
    tensor.fill_(3)
    again = pair({"x": tensor})["x"]
    tensor[0] = 8
    assert again[0] == 8
    del tensor
    assert pair.slots_held() == 1
    del again
    assert pair.slots_held() == 0


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: Point(t, 1)], ids=["plain", "pickled"])
@pytest.mark.parametrize("count", [8, LARGE])
def test_a_batchs_array_outlives_a_change_of_the_storage(pair: Pair, count: int, wrap: Any) -> None:
    """`share_memory_` gives the storage other memory; an array taken before still reads what it read."""
    batch = pair(wrap(torch.arange(count)))
    tensor = batch.x if isinstance(batch, Point) else batch
    array = tensor.numpy()
    tensor.share_memory_()
    del batch, tensor
    gc.collect()
    for _ in range(10):
        pair(wrap(torch.zeros(count, dtype=torch.int64)))
    assert array.tolist() == list(range(count))
    assert pair.slots_held() == (count == LARGE)
    del array
    gc.collect()
    assert pair.slots_held() == 0


def test_the_workers_own_array_outlives_a_change_of_its_storage(pair: Pair) -> None:
    """A collate function that keeps an array of a collated tensor and shares the tensor."""
    tensor = pair.arena.tensor((LARGE,), torch.int64)
    array = tensor.fill_(5).numpy()
    assert pair(tensor.share_memory_()).unique().tolist() == [5]
    del tensor
    for _ in range(10):
        pair.arena.tensor((LARGE,), torch.int64).zero_()
    assert set(array.tolist()) == {5}


def test_a_tensor_sent_twice_keeps_its_slot_for_both_batches(pair: Pair) -> None:
    """A collate function that returns its last batch again; the second one dies first, then the worker's own."""
    tensor = pair.arena.tensor((LARGE,), torch.float32)
    tensor.fill_(1)
    first = pair(tensor)
    second = pair(tensor)
    del second, tensor
    gc.collect()
    for _ in range(10):
        pair.arena.tensor((LARGE,), torch.float32).fill_(7)
    assert first.unique().tolist() == [1]


@pytest.mark.parametrize("placed", [True, False], ids=["made in a slot", "made elsewhere"])
def test_a_batch_that_cannot_be_pickled_holds_no_slot(pair: Pair, placed: bool) -> None:
    """Nor does it wait for a garbage collection."""
    gc.disable()
    try:
        for _ in range(3):
            tensor = pair.arena.tensor((LARGE,), torch.float32) if placed else torch.zeros(LARGE)
            with pytest.raises(Exception, match="pickle"):
                pair.encoder.encode([tensor, lambda: 0])
            del tensor
        assert pair.slots_held() == 0
    finally:
        gc.enable()
    assert pair([1, torch.ones(2)])[0] == 1


def test_nbytes_counts_buffers_of_the_last_batch(pair: Pair) -> None:
    pair([torch.zeros(LARGE, dtype=torch.uint8), torch.zeros(10, dtype=torch.uint8)])
    assert pair.encoder.nbytes == LARGE + 10
    pair([1])
    assert pair.encoder.nbytes == 0


@pytest.mark.parametrize("count", [MANY_OBJECTS // 8, 3 * MANY_OBJECTS])
def test_many_small_objects_are_pickled_at_once(pair: Pair, count: int) -> None:
    """Annotations of pictures: one by one they took five times what torch's pickle takes."""
    batch = {"boxes": [{"id": n, "label": f"kind {n}"} for n in range(count)], "images": torch.arange(5)}
    assert (pair.encoder.encode(batch)[0] == _PICKLE) == (count > MANY_OBJECTS)
    assert same(pair(batch), batch)


@pytest.mark.parametrize("kind", [bytes, str])
@pytest.mark.parametrize("wrap", [lambda text: text, lambda text: [text, 1], lambda text: [text, text[:3]]])
def test_a_long_text_does_not_pass_through_marshal(pair: Pair, kind: Any, wrap: Any) -> None:
    """`marshal` refuses what has 2 GiB or more."""
    text = bytes(LONG_LEAF + 1) if kind is bytes else "ä" * (LONG_LEAF + 1)
    batch = wrap(text)
    assert pair.encoder.encode(batch)[0] == _PICKLE
    assert same(pair(batch), batch)

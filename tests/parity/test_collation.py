"""Structures that cross from a worker: types, dtypes, strides, sharing, writability."""

import collections
import copy
import dataclasses
import enum
import gc
import io
import pickle
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data._utils.collate import default_collate_fn_map

from .datasets import Of, Stream, as_is, as_tensor
from .harness import WORKERS, Loader, caught, drain, parity


class Pair(NamedTuple):
    image: Any
    label: Any


class Deep(NamedTuple):
    pair: Pair
    name: str


class MyList(list[Any]):
    pass


class MyDict(dict[Any, Any]):
    pass


class ListWithAttributes(list[Any]):
    note = "class"


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    y: int


class Colour(enum.Enum):
    RED = 1


class MyTensor(torch.Tensor):
    pass


def noted(i: int) -> ListWithAttributes:
    value = ListWithAttributes([i, i + 1])
    value.note = f"item {i}"
    return value


def tagged(i: int) -> torch.Tensor:
    return torch.tensor([float(i)]).as_subclass(MyTensor)


def numpy_structure(i: int) -> np.ndarray[Any, Any]:
    return np.array([(i, i / 2)], dtype=[("a", "i4"), ("b", "f8")])


# Samples that default_collate accepts or refuses and default_convert passes on. What cannot be pickled has
# no place here: with torch the worker's sending thread dies of it and next() waits for ever.
SAMPLES: dict[str, Callable[[int], Any]] = {
    "int": int,
    "float": float,
    "big int": lambda i: 2**62 + i,
    "too big int": lambda i: 2**64 + i,
    "str": str,
    "bytes": lambda i: bytes([i]),
    "None": lambda i: None,
    "complex": lambda i: complex(i, -i),
    "tuple": lambda i: (i, float(i), str(i)),
    "tensor and int": lambda i: (torch.ones(3) * i, i),
    "tensors of two dtypes": lambda i: (torch.ones(2, dtype=[torch.float32, torch.float64][i]),),
    "tensors of two sizes": lambda i: (torch.ones(i + 1), i),
    "tuples of two sizes": lambda i: (1,) * (i + 1),
    "tuple and list": lambda i: [(torch.ones(2), 1), [torch.ones(2), 2]][i],
    "list": lambda i: [i, [i, i]],
    "empty tuple": lambda i: (),
    "empty list": lambda i: [],
    "empty dict": lambda i: {},
    "dict": lambda i: {"a": i, "b": torch.ones(2) * i, 3: "x"},
    "nested dict": lambda i: {"a": {"b": [i, {"c": (i, str(i))}]}},
    "defaultdict": lambda i: collections.defaultdict(int, a=i),
    "namedtuple": lambda i: Pair(torch.ones(2) * i, i),
    "deep namedtuple": lambda i: Deep(Pair(i, float(i)), str(i)),
    "own dict": lambda i: MyDict(a=i),
    "list with attributes": noted,
    "dataclass": lambda i: Sample(torch.ones(1) * i, i),
    "enum": lambda i: Colour.RED,
    "path": lambda i: PurePosixPath(f"/x/{i}"),
    "numpy array": lambda i: np.arange(6, dtype=np.int16).reshape(2, 3) * i,
    "numpy fortran": lambda i: np.asfortranarray(np.arange(6.0).reshape(2, 3) * i),
    "numpy reversed": lambda i: np.arange(6)[::-1],
    "numpy read-only": lambda i: np.broadcast_to(np.float32(i), (2, 2)),
    "numpy 0-d": lambda i: np.array(i),
    "numpy empty": lambda i: np.zeros((0, 3)),
    "numpy uint64": lambda i: np.array([2**63 + i], dtype=np.uint64),
    "numpy big endian": lambda i: np.array([i], dtype=">i4"),
    "numpy complex64": lambda i: np.array([complex(i, 1)], dtype=np.complex64),
    "numpy strings": lambda i: np.array(["a", "b"]),
    "numpy objects": lambda i: np.array([{"a": i}, None], dtype=object),
    "numpy dates": lambda i: np.array(["2020-01-01"], dtype="datetime64[D]"),
    "numpy structured": numpy_structure,
    "numpy float64 scalar": lambda i: np.float64(i),
    "numpy str scalar": lambda i: np.str_(i),
    "tensor": as_tensor,
    "tensor 0-d": lambda i: torch.tensor(i),
    "tensor empty": lambda i: torch.empty(0),
    "tensor zero-size": lambda i: torch.empty(3, 0, 2),
    "tensor bfloat16": lambda i: torch.tensor([i / 3], dtype=torch.bfloat16),
    "tensor float8": lambda i: torch.tensor([float(i)]).to(torch.float8_e4m3fn),
    "tensor uint64": lambda i: torch.tensor([i], dtype=torch.uint64),
    "tensor complex128": lambda i: torch.tensor([complex(i, 1)], dtype=torch.complex128),
    "tensor nan": lambda i: torch.tensor([float("nan"), -0.0, float("inf")]),
    "tensor transposed": lambda i: as_tensor(i).t(),
    "tensor strided": lambda i: torch.arange(20.0)[i::3][:3],
    "tensor expanded": lambda i: torch.tensor([float(i)]).expand(4, 3),
    "tensor channels_last": lambda i: torch.ones(1, 3, 4, 5).to(memory_format=torch.channels_last) * i,
    "tensor sparse": lambda i: torch.eye(3).to_sparse() * i,
    "own tensor": tagged,
    "parameter": lambda i: torch.nn.Parameter(torch.ones(2) * i),
    "uneven": lambda i: torch.zeros(i + 1),
    "mixed keys": lambda i: {"a": 1} if i else {"b": 1},
    "mixed types": lambda i: i if i else 1.5,
}


def sample(index: tuple[str, int]) -> Any:
    kind, i = index
    return SAMPLES[kind](i)


ONE_WORKER = pytest.mark.parametrize("workers", [0, 1])


@pytest.mark.smoke
@ONE_WORKER
@parity
def test_default_collate(cls: Loader, workers: int) -> Any:
    """A batch of two of each kind; what cannot be collated is refused with the same words."""
    batches = [[(kind, 0), (kind, 1)] for kind in SAMPLES]
    iterator = iter(cls(Of(sample, 0), batch_sampler=batches, num_workers=workers))
    return {kind: caught(next, iterator) for kind in SAMPLES}


@ONE_WORKER
@parity
def test_default_convert(cls: Loader, workers: int) -> Any:
    indices = [(kind, 1) for kind in SAMPLES]
    iterator = iter(cls(Of(sample, 0), batch_size=None, sampler=indices, num_workers=workers))
    return {kind: caught(next, iterator) for kind in SAMPLES}


BATCHES: dict[str, Callable[[list[int]], Any]] = {
    "list of samples": lambda b: [as_tensor(i) for i in b],
    "channels_last": lambda b: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda b: torch.arange(6.0).reshape(2, 3).t(),
    "expanded": lambda b: torch.arange(3.0).expand(4, 3),
    "narrowed": lambda b: torch.arange(100.0)[10:20:2],
    "overlapping": lambda b: torch.arange(10.0).as_strided((4, 3), (1, 1)),
    "0-d": lambda b: torch.tensor(float(b[0])),
    "zero-size": lambda b: torch.empty(0, 3, dtype=torch.int8),
    "zero-size strided": lambda b: torch.empty(4, 0, 3).transpose(0, 2),
    "float8": lambda b: torch.ones(3).to(torch.float8_e5m2),
    "leaf with grad": lambda b: torch.ones(2, requires_grad=True),
    "parameter": lambda b: torch.nn.Parameter(torch.ones(2)),
    "own tensor": lambda b: tagged(b[0]),
    "sparse coo": lambda b: torch.eye(3).to_sparse(),
    "sparse coo not coalesced": lambda b: torch.sparse_coo_tensor(
        torch.tensor([[0, 0], [1, 1]]), torch.ones(2), (2, 2)
    ),
    "sparse csr": lambda b: torch.eye(3).to_sparse_csr(),
    "packed sequence": lambda b: pack_sequence([torch.arange(3.0), torch.arange(2.0)]),
    "numpy": lambda b: np.arange(6).reshape(2, 3),
    "numpy strided": lambda b: np.arange(20)[::3],
    "numpy read-only": lambda b: np.broadcast_to(np.float32(1), (2, 2)),
    "numpy objects": lambda b: np.array([1, "a", None], dtype=object),
    "numpy structured": lambda b: numpy_structure(1),
    "numpy masked": lambda b: np.ma.masked_array([1, 2, 3], mask=[False, True, False]),
    "numpy empty": lambda b: np.empty((0, 2)),
    "numpy scalars": lambda b: [np.float32(1), np.int64(2), np.bool_(True)],
    "bytes": lambda b: b"x" * 100_000,
    "bytearray": lambda b: bytearray(b"abc"),
    "strings": lambda b: ["a" * 1000, "é", "\ud83d\ude00", ""],
    "numbers": lambda b: [1, 1.5, True, None, 2**70, 1j, float("nan")],
    "nested": lambda b: {"a": [Pair(torch.ones(1), {"b": (1, "x", np.ones(2))}), set(b)], ("k", 1): None},
    "own classes": lambda b: [MyList(b), MyDict(a=b), noted(1), Sample(torch.ones(1), 2), Colour.RED],
    "own dict with tensors": lambda b: MyDict(a=torch.ones(2), b=[torch.zeros(1)]),
    "defaultdict": lambda b: collections.defaultdict(list, a=[torch.ones(1)]),
    "an exception": lambda b: ValueError("as a value"),
    "a type": lambda b: torch.Tensor,
    "a dtype and a size": lambda b: [torch.float32, torch.Size([1, 2]), torch.device("cpu")],
    "a module": lambda b: torch.nn.Linear(1, 1, bias=False).weight.detach().shape,
    "a generator's state": lambda b: torch.Generator().manual_seed(1).get_state(),
    "many tensors": lambda b: [torch.ones(3) * i for i in range(300)],
    "large": lambda b: torch.arange(300_000, dtype=torch.float64),
    "large and small": lambda b: (torch.arange(300_000), torch.ones(1), "x", np.arange(200_000)),
}


def batch_of_kind(kinds: list[str]) -> Any:
    return BATCHES[kinds[0]]([0, 1])


@ONE_WORKER
@parity
def test_batches(cls: Loader, workers: int) -> Any:
    """What a collate function gives arrives as it is."""
    iterator = iter(cls(Of(as_is, 0), sampler=list(BATCHES), num_workers=workers, collate_fn=batch_of_kind))
    return {kind: caught(next, iterator) for kind in BATCHES}


def recursive(batch: list[int]) -> list[Any]:
    value: list[Any] = [torch.ones(1)]
    value.append(value)
    return value


@WORKERS
@parity
def test_a_value_that_holds_itself(cls: Loader, workers: int) -> Any:
    batch = next(iter(cls(Of(int, 1), collate_fn=recursive, num_workers=workers)))
    return [batch[1] is batch, batch[0]]


def twins(batch: list[int]) -> Any:
    t = torch.arange(4.0)
    inner = [1, 2]
    array, sample = np.ones(4), Sample(torch.ones(1), 1)
    return {
        "a": t,
        "b": t,
        "view": t[1:3],
        "row": t.reshape(2, 2),
        "l": inner,
        "m": inner,
        "arrays": [array, array],
        "samples": [sample, (sample,)],
        "other": t.clone(),
    }


@WORKERS
@parity
def test_what_is_shared_stays_shared(cls: Loader, workers: int) -> Any:
    batch = next(iter(cls(Of(int, 1), collate_fn=twins, num_workers=workers)))
    batch["a"][1] = 77
    batch["l"].append(3)
    same = [
        batch["a"] is batch["b"],
        batch["l"] is batch["m"],
        batch["arrays"][0] is batch["arrays"][1],
        batch["samples"][0] is batch["samples"][1][0],
    ]
    return [batch, same]


@WORKERS
@parity
def test_batches_can_be_written_to(cls: Loader, workers: int) -> Any:
    loader = cls(Of(as_tensor, 6), batch_size=2, num_workers=workers)
    batches = list(loader)
    for batch in batches:
        batch += 1
        batch[0].zero_()
        batch.numpy()[1, 0, 0] = -5
    batches[0].unsqueeze_(0)
    return [batches, list(loader), [batch.is_leaf for batch in batches]]


@WORKERS
@parity
def test_a_batch_is_no_larger_than_it_looks(cls: Loader, workers: int) -> Any:
    """A saved, pickled or copied batch carries its own bytes only."""
    batch = next(iter(cls(Of(as_tensor, 2), batch_size=2, num_workers=workers)))
    saved = io.BytesIO()
    torch.save(batch, saved)
    return [
        batch.untyped_storage().nbytes(),
        batch.storage_offset(),
        len(saved.getvalue()),
        len(pickle.dumps(batch)),
        pickle.loads(pickle.dumps(batch)),
        copy.deepcopy(batch),
        torch.load(io.BytesIO(saved.getvalue())),
    ]


@WORKERS
@parity
def test_batches_outlive_iterator_and_loader(cls: Loader, workers: int) -> Any:
    loader = cls(Of(as_tensor, 40), batch_size=2, num_workers=workers)
    iterator = iter(loader)
    kept = [next(iterator) for _ in range(5)]
    rows = [next(iterator)[0] for _ in range(3)]
    arrays = [next(iterator).numpy() for _ in range(3)]
    del iterator, loader
    gc.collect()
    again = list(cls(Of(as_tensor, 40), batch_size=2, num_workers=workers))
    return [kept, rows, arrays, again]


@WORKERS
@parity
def test_growing_batches(cls: Loader, workers: int) -> Any:
    """Sizes that change from batch to batch, by much, up and down."""
    sizes = [1, 10, 1000, 100_000, 10, 300_000, 0, 5, 20_000, 1]
    loader = cls(Of(lambda i: torch.full((sizes[i],), i), len(sizes)), num_workers=workers)
    return [(batch.shape, int(batch.sum())) for batch in loader]


class Special:
    def __init__(self, value: int) -> None:
        self.value = value


def collate_special(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return ("special", [item.value for item in batch])


@WORKERS
@parity
def test_edits_of_the_collate_map(cls: Loader, workers: int) -> Any:
    """They count for loaders made before, from the next iter() on."""
    loader = cls(Of(lambda i: {"x": Special(i)}, 4), batch_size=2, num_workers=workers)
    seen = [drain(iter(loader))]
    default_collate_fn_map[Special] = collate_special
    try:
        seen.append(drain(iter(loader)))
    finally:
        del default_collate_fn_map[Special]
    seen.append(drain(iter(loader)))
    return seen


@WORKERS
@parity
def test_elements_of_a_stream_keep_their_types(cls: Loader, workers: int) -> Any:
    stream = Stream(lambda worker, k: Pair(np.float32(k), [str(worker), {"k": torch.tensor(k)}]), 3)
    return [list(cls(stream, batch_size, num_workers=workers)) for batch_size in (None, 2)]

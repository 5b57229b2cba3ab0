"""What PyTorch alone can take apart travels by value: complete when it arrives, and no larger than what is viewed."""

import gc
import multiprocessing
import pickle
import re
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from families import descriptors, kill, living_workers
from pairs import LARGE, Pair, Point
from torch.utils.data import Dataset
from torch_features import SENDS_META
from waiting import until

from dpex import DpexDataLoader
from dpex.transport.codec import Encoder
from dpex.transport.pickling import SPAN_ALIGN, dump_remote

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(beta state|prototype stage|deprecated|TypedStorage|invariant checks):UserWarning"
)


class Labelled(torch.Tensor):
    """A subclass as people write them: its attributes belong to it."""


def labelled(data: torch.Tensor, **attributes: Any) -> Labelled:
    tensor = data.as_subclass(Labelled)
    vars(tensor).update(attributes)
    return tensor


def with_attribute() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.source = ["file", torch.arange(4)]  # type: ignore[attr-defined]
    return tensor


def grid() -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4)


EXOTIC: dict[str, Callable[[], torch.Tensor]] = {
    "coo": lambda: grid().to_sparse(),
    "coo, not coalesced": lambda: torch.sparse_coo_tensor([[1, 1], [2, 2]], [3.0, 4.0], (3, 4)),
    "coo, empty": lambda: torch.sparse_coo_tensor(size=(3, 4)),
    "csr": lambda: grid().to_sparse_csr(),
    "csc": lambda: grid().to_sparse_csc(),
    "bsr": lambda: torch.arange(16.0).reshape(4, 4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.arange(16.0).reshape(4, 4).to_sparse_bsc((2, 2)),
    "requires_grad": lambda: torch.ones(3, requires_grad=True),
    "requires_grad, empty": lambda: torch.ones(0, 3, requires_grad=True),
    "requires_grad, large": lambda: torch.ones(LARGE, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "parameter of integers": lambda: torch.nn.Parameter(torch.arange(3), requires_grad=False),
    "subclass": lambda: labelled(torch.ones(3), label="cat", box=torch.ones(4)),
    "subclass that requires grad": lambda: labelled(torch.ones(3, requires_grad=True).detach()).requires_grad_(),
    "subclass, a view": lambda: labelled(torch.arange(LARGE)[5::7]),
    "attribute": with_attribute,
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "quantised": lambda: torch.quantize_per_tensor(grid(), 0.1, 3, torch.qint8),
    "quantised by channel": lambda: torch.quantize_per_channel(
        grid(), torch.tensor([0.1, 0.2, 0.3]), torch.zeros(3), 0, torch.qint8
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.arange(3.0)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.arange(3.0)], layout=torch.jagged),
    **({"meta": lambda: torch.empty(3, 4, device="meta")} if SENDS_META else {}),
}


TORCH_LOSES = {"conjugate", "negative", "quantised", "quantised by channel", "subclass that requires grad"}
"""Of these PyTorch's workers deliver other numbers, tensors that no function takes, or what is no leaf any more."""


@pytest.fixture(params=["near", "far"])
def pair(request: pytest.FixtureRequest) -> Pair:
    """A worker of this machine, and one of another: one encoder but for what classes and functions travel as."""
    pair = Pair()
    if request.param == "far":
        pair.encoder = Encoder(pair.arena, dump_remote)
    return pair


def described(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All that must be kept of a tensor beside its numbers."""
    coalesced = tensor.is_coalesced() if tensor.layout is torch.sparse_coo else None
    stride = tensor.stride() if tensor.layout is torch.strided and not tensor.is_nested else None
    return (
        *(type(tensor), tensor.dtype, tensor.layout, tensor.device, tensor.requires_grad, tensor.is_leaf),
        *(tensor.is_conj(), tensor.is_neg(), tensor.is_quantized, tensor.is_nested, coalesced, stride),
        *(list(vars(tensor)) if not tensor.is_nested else (), tensor.size() if not tensor.is_nested else None),
    )


def numbers(tensor: torch.Tensor) -> list[Any]:
    if tensor.device.type == "meta":
        return []
    if tensor.is_nested:
        return [part.tolist() for part in tensor.unbind()]
    return [(tensor.dequantize() if tensor.is_quantized else tensor.detach().to_dense()).resolve_conj().tolist()]


def torchs_own(value: Any) -> Any:
    """What PyTorch's workers would have delivered."""
    return pickle.loads(ForkingPickler.dumps(value))


@pytest.mark.parametrize("kind", EXOTIC)
def test_everything_that_torch_keeps_is_kept(pair: Pair, kind: str) -> None:
    tensor = EXOTIC[kind]()
    (again,) = pair([tensor])
    assert described(again) == described(tensor)
    assert numbers(again) == numbers(tensor)
    if kind in TORCH_LOSES:
        return
    torchs = torchs_own(tensor)
    assert described(again)[:-2] == described(torchs)[:-2]
    assert numbers(again) == numbers(torchs)


def test_attributes_travel_with_what_they_hold(pair: Pair) -> None:
    (again,) = pair([labelled(torch.ones(2), box=torch.arange(LARGE), labels=["a"])])
    assert again.box.tolist() == list(range(LARGE))
    assert again.labels == ["a"]
    assert pair([with_attribute()])[0].source[1].tolist() == [0, 1, 2, 3]


def test_what_is_part_of_a_graph_is_refused_as_torch_refuses_it(pair: Pair) -> None:
    part = torch.ones(3, requires_grad=True) * 2
    with pytest.raises(RuntimeError) as theirs:
        torchs_own(part)
    with pytest.raises(Exception, match=re.escape(str(theirs.value))):
        pair([part])
    gc.collect()
    assert pair.slots_held() == 0


@pytest.mark.parametrize("kind", ["coo", "csr", "parameter", "subclass, a view", "attribute", "quantised", "nested"])
def test_nothing_of_it_stays_with_the_worker(pair: Pair, kind: str) -> None:
    """No descriptor is left open for the trainer to fetch, and the batch holds no memory of the worker's own."""
    tensor = EXOTIC[kind]()
    before = descriptors()
    message = pair.encoder.encode([tensor])
    assert descriptors() == before
    expected = numbers(tensor)
    for part in (tensor, *vars(tensor).values()):
        if isinstance(part, torch.Tensor) and part.layout is torch.strided and not part.is_nested:
            torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage(), 0, (part.nbytes,), (1,)).zero_()
    assert numbers(pair.decode(message)[0]) == expected


def test_sparse_tensors_are_not_queued_for_torchs_validation(pair: Pair) -> None:
    waiting = torch._utils._sparse_tensors_to_validate
    before = len(waiting)
    pair([grid().to_sparse(), grid().to_sparse_csr()])
    assert len(waiting) == before


def test_modules_and_storages(pair: Pair) -> None:
    layer, storage = torch.nn.Linear(3, 2), torch.arange(5).untyped_storage()
    again, (raw, typed) = pair([layer, (storage, torch.arange(3.0)._typed_storage())])
    assert all(map(torch.equal, again.parameters(), layer.parameters()))
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in again.parameters())
    assert raw.tolist() == storage.tolist()
    assert (typed.dtype, typed._untyped_storage.nbytes()) == (torch.float32, 12)


def test_what_shares_memory_shares_it_afterwards(pair: Pair) -> None:
    base = torch.arange(100.0)
    mine = [base[:50], labelled(base[40:60]), base[90:], base[45:46].detach().requires_grad_(), base.untyped_storage()]
    theirs = pair([mine])[0]
    assert len({part.data_ptr() for part in (theirs[-1], theirs[0])}) == 1
    theirs[0].zero_()
    assert theirs[1].tolist() == [0.0] * 10 + list(range(50, 60))
    assert theirs[3].tolist() == [0]
    assert theirs[2].tolist() == list(range(90, 100))


def test_views_far_apart_share_a_storage_as_torchs_do(pair: Pair) -> None:
    base = torch.arange(1 << 16)
    parts = pair(Point(base[10:20], [base[60_000:60_010], base[30_000:30_010:3]]))
    together = [parts.x, *parts.y]
    assert len({part.untyped_storage().data_ptr() for part in together}) == 1
    assert [part.tolist() for part in together] == [
        [*range(10, 20)],
        [*range(60_000, 60_010)],
        [*range(30_000, 30_010, 3)],
    ]


def test_views_of_a_large_tensor_bring_their_spans_only(pair: Pair) -> None:
    data = torch.arange(1 << 20)
    rows = [data[n * 1000 : n * 1000 + 10] for n in range(8)]
    again = pair([rows])[0]
    assert [row.tolist() for row in again] == [row.tolist() for row in rows]
    assert again[0].untyped_storage().nbytes() <= 8 * (80 + 2 * SPAN_ALIGN)
    assert pair.encoder.nbytes < 10_000


@pytest.mark.parametrize("dtype", [torch.uint8, torch.complex128])
def test_spans_keep_their_alignment(pair: Pair, dtype: torch.dtype) -> None:
    data = torch.arange(4096).to(dtype)
    starts = [1, 77, 203, 1001, 4090]
    again = pair([[data[start : start + 3] for start in starts]])[0]
    for start, part in zip(starts, again, strict=True):
        assert torch.equal(part, data[start : start + 3])
        assert part.storage_offset() * part.itemsize % SPAN_ALIGN == start * part.itemsize % SPAN_ALIGN


def test_slots_come_back(pair: Pair) -> None:
    data = torch.zeros(1 << 20)
    for _ in range(3):
        batch = pair([[data[:LARGE], data[-LARGE:]], labelled(torch.ones(LARGE)), torch.eye(60).to_sparse()])
        assert pair.slots_held()
        del batch
        gc.collect()
        assert pair.slots_held() == 0


class Kinds(Dataset[Any]):
    """Samples of one exotic kind, and how many of them were made."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.made = multiprocessing.Value("i", 0)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        with self.made.get_lock():
            self.made.value += 1
        dense = torch.eye(40) * (index + 1)
        kinds = {
            "sparse": dense.to_sparse,
            "grad": dense.requires_grad_,
            "subclass": lambda: labelled(dense, number=index),
        }
        return kinds[self.kind]()


def first(samples: list[Any]) -> Any:
    return samples[0]


def number_of(sample: Any) -> int:
    return int((sample.to_dense() if sample.layout is not torch.strided else sample)[0, 0]) - 1


@pytest.mark.parametrize(("kind", "end"), [("sparse", "killed"), ("grad", "killed"), ("subclass", "resized")])
@pytest.mark.filterwarnings("ignore:.*is killed by signal:RuntimeWarning")
def test_batches_outlive_the_worker_that_made_them(kind: str, end: str) -> None:
    dataset = Kinds(kind)
    loader = DpexDataLoader(dataset, batch_size=1, num_workers=2, collate_fn=first, prefetch_factor=12, seeding="batch")
    iterator = iter(loader)
    got = [number_of(next(iterator))]
    until(lambda: dataset.made.value >= len(dataset))
    if end == "killed":
        for pid in living_workers(iterator):
            kill(pid)
    else:
        loader.resize(local=1)
        until(lambda: len(living_workers(iterator)) == 1)
    got += [number_of(sample) for sample in iterator]
    assert got == list(range(len(dataset)))

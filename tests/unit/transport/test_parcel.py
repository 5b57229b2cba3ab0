"""Parcels: what comes out is what went in, buffers lie outside, and what cannot travel is named."""

import functools
import threading

import numpy as np
import pytest
import torch

from dpex.errors import ShippingError
from dpex.transport.pickling import cloud_dumps, pack, unpack


class Holder:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def method(self):
        return self


def carry(obj):
    parcel = pack(obj)
    return unpack(parcel.header, [bytearray(buffer) for buffer in parcel.buffers])


def test_arrays_and_tensors_lie_outside_the_header():
    obj = Holder(array=np.arange(100_000), tensor=torch.arange(100_000))
    parcel = pack(obj)
    assert len(parcel.header) < 2000
    assert [buffer.nbytes for buffer in parcel.buffers] == [800_000, 800_000]


def test_buffers_are_views_not_copies():
    array = np.arange(100_000)
    parcel = pack(array)
    assert np.shares_memory(parcel.buffers[0], array)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3000.0).view(30, 100).t(),
        torch.arange(3000.0)[10:2000:7],
        torch.zeros(0, 4),
        torch.tensor(3.5),
        torch.ones(2000, dtype=torch.bfloat16),
        torch.ones(2000, requires_grad=True),
        torch.ones(100).to_sparse(),
        torch.nn.Parameter(torch.ones(2000)),
    ],
    ids=["transposed", "strided", "empty", "scalar", "bfloat16", "requires_grad", "sparse", "parameter"],
)
def test_tensors_keep_their_nature(tensor):
    out = carry(tensor)
    assert type(out) is type(tensor)
    assert (out.dtype, out.shape, out.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert out.requires_grad == tensor.requires_grad
    if tensor.layout is torch.strided:
        assert out.stride() == tensor.stride()
    assert torch.equal(out.to_dense(), tensor.to_dense())


def test_shared_storages_travel_once_and_stay_shared():
    whole = torch.zeros(10_000)
    parcel = pack([whole, whole[5:10]])
    assert len(parcel.buffers) == 1
    first, second = unpack(parcel.header, [bytearray(parcel.buffers[0])])
    second[0] = 1
    assert first[5] == 1


def test_a_bound_method_stays_bound_to_the_same_dataset():
    dataset = Holder(x=1)
    out, method = carry((dataset, dataset.method))
    assert method() is out


def test_a_lock_is_named_by_its_attribute():
    with pytest.raises(ShippingError, match=r"^dataset\.parts\['a'\]\[1\] \(a _thread\.lock\) cannot be pickled"):
        pack(Holder(setup=Holder(dataset=Holder(fine=1, parts={"a": [1, threading.Lock()]}))))


def test_the_culprit_behind_a_closure_and_a_partial_is_named():
    lock = threading.Lock()

    def collate_fn(batch):
        return lock, batch

    with pytest.raises(ShippingError, match=r"collate_fn\.func\.lock \(a _thread\.lock\)"):
        pack(Holder(collate_fn=functools.partial(collate_fn, 1)))


def test_a_cycle_does_not_hide_the_culprit():
    dataset = Holder(fine=1)
    dataset.transform = dataset.method
    dataset.lock = threading.Lock()
    with pytest.raises(ShippingError, match=r"^dataset\.lock"):
        pack(Holder(dataset=dataset))


def test_an_object_that_refuses_is_named_itself():
    class Proud:
        def __reduce__(self):
            raise RuntimeError("not me")

    with pytest.raises(ShippingError, match=r"^dataset \(a .*Proud\) cannot be pickled: not me"):
        pack(Holder(dataset=Proud()))


def test_cloud_dumps_names_the_culprit_too():
    with pytest.raises(ShippingError, match=r"dataset\.lock"):
        cloud_dumps(Holder(dataset=Holder(lock=threading.Lock())))

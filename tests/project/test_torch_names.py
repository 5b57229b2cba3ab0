"""Private names of torch and of Ray have the shape that dpex relies on, in the releases that are installed."""

import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset, StackDataset, TensorDataset, get_worker_info

from dpex import _torch

SEEN = f"looked at in torch 2.13; this is {torch.__version__}"
"""What a failure says first."""


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_instances_have_the_attributes() -> None:
    data = TensorDataset(torch.arange(4))
    loader = DataLoader(data)
    here = iter(loader)
    workers = iter(DataLoader(data, num_workers=1))
    instances = {
        DataLoader: loader,
        _torch.BaseDataLoaderIter: here,
        _torch.SingleProcessDataLoaderIter: here,
        _torch.MultiProcessingDataLoaderIter: workers,
        torch.Tensor: torch.zeros(1),
        torch.TypedStorage: torch.zeros(1).storage(),
        torch.Generator: torch.Generator(),
        torch.nn.Module: torch.nn.Identity(),
        StackDataset: StackDataset(data),
    }
    try:
        assert instances.keys() == _torch.ATTRIBUTES.keys()
        for kind, names in _torch.ATTRIBUTES.items():
            missing = {name for name in names if not hasattr(instances[kind], name)}
            assert missing == set(), f"{kind.__name__}: {SEEN}"
    finally:
        workers._shutdown_workers()


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (_torch.BaseDataLoaderIter.__init__, ["self", "loader"]),
        (_torch.BaseDataLoaderIter._next_index, ["self"]),
        (_torch.BaseDataLoaderIter._next_data, ["self"]),
        (_torch.BaseDataLoaderIter._reset, ["self", "loader", "first_iter"]),
        (_torch.MultiProcessingDataLoaderIter._shutdown_workers, ["self"]),
        (DataLoader._get_iterator, ["self"]),
        (_torch.pinning.pin_memory, ["data", "device"]),
        (_torch.generate_numpy_seed, ["base_seed", "worker_id"]),
        (_torch.ExceptionWrapper.__init__, ["self", "exc_info", "where"]),
        (_torch.collate.collate, ["batch", "collate_fn_map"]),
        (_torch.collate.collate_tensor_fn, ["batch", "collate_fn_map"]),
        (_torch.rebuild_from_type, ["func", "new_type", "args", "state"]),
        (_torch.rebuild_sparse_tensor, ["layout", "data"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_functions_take_what_dpex_gives_them(function: Any, names: list[str]) -> None:
    assert parameters(function) == names, SEEN


class IterableStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_a_fetcher_keeps_what_dpex_replaces() -> None:
    assert _torch.DatasetKind.Map != _torch.DatasetKind.Iterable
    batches: Any = iter(DataLoader([5, 6], batch_size=2, collate_fn=list))  # type: ignore[arg-type]
    fetcher = batches._dataset_fetcher
    assert vars(fetcher).keys() >= {"dataset", "collate_fn"}, SEEN
    assert fetcher.fetch([1, 0]) == [6, 5]
    streamed: Any = iter(DataLoader(IterableStream(), batch_size=2))
    assert vars(streamed._dataset_fetcher).keys() >= {"dataset", "collate_fn", "dataset_iter", "ended"}, SEEN


def test_an_exception_is_wrapped_as_torch_wraps_it() -> None:
    try:
        raise KeyError("lost")
    except KeyError:
        wrapped = _torch.ExceptionWrapper(where="in a test")
    assert (wrapped.exc_type, wrapped.where) == (KeyError, "in a test"), SEEN
    with pytest.raises(KeyError, match="Caught KeyError in a test"):
        wrapped.reraise()


def test_worker_info_is_what_workers_are_given() -> None:
    info = _torch.WorkerInfo(id=1, num_workers=2, seed=3, dataset=[])
    _torch.set_worker_info(info)
    try:
        assert get_worker_info() is info
    finally:
        _torch.set_worker_info(None)
    assert get_worker_info() is None
    assert len(_torch.generate_numpy_seed(11, 0)) == 4, SEEN


def test_the_table_of_collate_functions_is_there() -> None:
    collate = _torch.collate
    names = ("tensor", "numpy_array", "numpy_scalar", "float", "int", "str")
    functions = {getattr(collate, f"collate_{name}_fn") for name in names}
    assert functions == set(collate.default_collate_fn_map.values()), SEEN
    assert collate.default_collate is torch.utils.data.default_collate


def test_tensors_are_pickled_by_functions_that_dpex_knows() -> None:
    class Sub(torch.Tensor):
        pass

    assert torch.zeros(2).as_subclass(Sub).__reduce_ex__(5)[0] is _torch.rebuild_from_type, SEEN
    assert torch.eye(2).to_sparse().__reduce_ex__(5)[0] is _torch.rebuild_sparse_tensor, SEEN
    _, (_, offset, shape, stride, requires_grad, *_) = torch.zeros(2, 3)[1:].__reduce_ex__(5)
    assert (offset, tuple(shape), tuple(stride), requires_grad) == (3, (1, 3), (3, 1), False), SEEN


def test_modes_of_the_thread_are_seen() -> None:
    assert (_torch.count_function_modes(), _torch.count_dispatch_modes()) == (0, 0)
    with TorchFunctionMode(), TorchDispatchMode():
        assert (_torch.count_function_modes(), _torch.count_dispatch_modes()) == (1, 1)
    assert not _torch.is_any_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert _torch.is_any_autocast_enabled()
    assert not _torch.is_profiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert _torch.is_profiled()
    with _torch.DisableTorchFunctionSubclass():
        assert torch.zeros(1).requires_grad_().is_leaf


@pytest.mark.skipif(not hasattr(torch.multiprocessing, "_set_thread_name"), reason="this torch names no threads")
def test_a_thread_gets_its_name() -> None:
    names: list[str] = []

    def name_thread() -> None:
        _torch.set_thread_name("pt_data_pin")
        names.append(Path("/proc/thread-self/comm").read_text().strip())

    thread = threading.Thread(target=name_thread)
    thread.start()
    thread.join()
    assert names == ["pt_data_pin"], SEEN


@pytest.mark.ray
def test_ray_has_what_dpex_asks_for() -> None:
    pytest.importorskip("ray")
    from ray._private import state
    from ray.util.placement_group import placement_group

    seen = "looked at in Ray 2.60"
    assert parameters(state.available_resources_per_node) == [], seen
    assert callable(getattr(state.state, "get_draining_nodes", None)), seen
    assert {"_soft_target_node_id", "bundle_label_selector"} <= set(parameters(placement_group)), seen

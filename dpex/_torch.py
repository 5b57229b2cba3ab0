"""Every private name of torch that dpex uses, once, with its purpose.

Other modules import these names from this one, because ruff fails on a private name in any other (`banned-api` in
pyproject.toml). `tests/project/test_torch_names.py` checks the presence and shape of each name in the installed torch.
Importing this module imports torch.

Methods and attributes cannot be imported. `ATTRIBUTES` lists the ones that dpex overrides, replaces or reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing
from torch._tensor import _rebuild_from_type_v2 as rebuild_from_type
from torch._utils import ExceptionWrapper
from torch._utils import _rebuild_sparse_tensor as rebuild_sparse_tensor
from torch.autograd import profiler
from torch.utils.data import DataLoader, StackDataset
from torch.utils.data._utils import collate, worker
from torch.utils.data._utils import pin_memory as pinning
from torch.utils.data._utils.worker import WorkerInfo
from torch.utils.data._utils.worker import _generate_state as generate_numpy_seed
from torch.utils.data.dataloader import _BaseDataLoaderIter as BaseDataLoaderIter
from torch.utils.data.dataloader import _DatasetKind as DatasetKind
from torch.utils.data.dataloader import _InfiniteConstantSampler as InfiniteConstantSampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as MultiProcessingDataLoaderIter
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter as SingleProcessDataLoaderIter

__all__ = [
    "HAS_IN_ORDER",
    "BaseDataLoaderIter",
    "DatasetKind",
    "DisableTorchFunctionSubclass",
    "ExceptionWrapper",
    "InfiniteConstantSampler",
    "MultiProcessingDataLoaderIter",
    "SingleProcessDataLoaderIter",
    "WorkerInfo",
    "collate",
    "count_dispatch_modes",
    "count_function_modes",
    "generate_numpy_seed",
    "has_cuda_context",
    "is_any_autocast_enabled",
    "is_profiled",
    "pin_memory",
    "rebuild_from_type",
    "rebuild_sparse_tensor",
    "set_thread_name",
    "set_worker_info",
]

HAS_IN_ORDER = "in_order" in inspect.signature(DataLoader.__init__).parameters
"""True for torch 2.6 and later. For earlier releases, dpex implements ``in_order`` itself."""

# -- iterators ---------------------------------------------------------------------------------------------------------
# BaseDataLoaderIter: base class of dpex's iterators, so that length warnings, seeds and pinning rules are torch's.
# SingleProcessDataLoaderIter, MultiProcessingDataLoaderIter: torch's iterators, from which dpex derives the iterators
#     that make batches with torch's code.
# DatasetKind: distinguishes streams (`Iterable`) from map-style datasets (`Map`).


# -- workers -----------------------------------------------------------------------------------------------------------
# ExceptionWrapper: carries an exception from a worker to the training process, which raises it as torch does.
# WorkerInfo: what `get_worker_info()` returns.
# generate_numpy_seed: makes the seed of numpy's global generator in a worker.
# collate: the module; dpex changes its `default_collate_fn_map` and `collate_*_fn`, and sends them to other machines.


def set_worker_info(info: WorkerInfo | None) -> None:
    """Set the return value of ``get_worker_info()`` in this process."""
    worker._worker_info = info


def pin_memory(data: Any, device: str | None = None) -> Any:
    """Copy a batch into page-locked memory. torch's function is looked up at each call, because another library may
    replace it."""
    return pinning.pin_memory(data, device)


set_thread_name: Callable[[str], None] = getattr(torch.multiprocessing, "_set_thread_name", lambda name: None)
"""Set the name of the calling thread in the operating system; does nothing in torch releases without this function."""

# -- pickles of tensors ------------------------------------------------------------------------------------------------
# rebuild_from_type: rebuilds a pickled tensor of a subclass, or one with attributes.
# rebuild_sparse_tensor: rebuilds a pickled sparse tensor.

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""Context manager that disables ``__torch_function__`` of tensor subclasses, so that torch's own methods run."""

# -- modes of the calling thread ---------------------------------------------------------------------------------------

is_any_autocast_enabled: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
"""Return True if autocast is on for any kind of device. A query for a single kind takes five times as long."""
count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""Count the active `TorchFunctionMode` contexts."""
count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Count the active `TorchDispatchMode` contexts."""
_is_profiled_here: Callable[[], bool] = torch._C._autograd._profiler_enabled


def is_profiled() -> bool:
    """Return True if a profiler is on, in this thread or in another."""
    return _is_profiled_here() or profiler._is_profiler_enabled


# -- CUDA --------------------------------------------------------------------------------------------------------------


def has_cuda_context(ordinal: int) -> bool:
    """Return True if this process has a context on GPU ``ordinal``, but create none. CUDA must be initialised."""
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)  # not in a build without CUDA
    return ask is None or bool(ask(ordinal))


# -- methods and attributes --------------------------------------------------------------------------------------------

ATTRIBUTES: dict[type[Any], dict[str, str]] = {
    DataLoader: {
        "_get_iterator": "overridden, and replaced on loaders that dpex serves: makes the iterator",
        "_iterator": "set to None when workers are shut down: the iterator of persistent workers",
        "_dataset_kind": "read, and copied to stand-ins: whether the dataset is a stream",
        "_IterableDataset_len_called": "read, and copied to stand-ins: where set, torch warns of more samples",
        "_index_sampler": "read: what draws the index of each batch",
        "_auto_collation": "compared: a subclass may define its own",
    },
    BaseDataLoaderIter: {
        "_auto_collation": "read: whether an index is a list of samples",
        "_IterableDataset_len_called": "read: where set, torch warns of more samples",
        "_base_seed": "read: what seeds of workers and batches are made from",
        "_collate_fn": "read, and replaced: makes a batch from samples",
        "_dataset": "read, and replaced by one whose steps are timed",
        "_dataset_kind": "read: whether the dataset is a stream",
        "_drop_last": "read: whether a stream's last, smaller batch is dropped",
        "_index_sampler": "read: whether it may be drawn ahead",
        "_next_data": "overridden: makes the next batch",
        "_next_index": "overridden, and called: draws the next index",
        "_num_workers": "set: torch's warnings name it",
        "_num_yielded": "read and set: batches delivered in this pass",
        "_persistent_workers": "read: whether workers stay for the next pass",
        "_pin_memory": "read: whether batches are pinned",
        "_pin_memory_device": "read: for which device",
        "_profile_name": "read: the mark of a call for profilers",
        "_rank": "read: of a sharded DataPipe",
        "_reset": "overridden, and called: begins a pass",
        "_sampler_iter": "read and set: the iterator of `_index_sampler`",
        "_timeout": "read: seconds to wait for a batch",
    },
    SingleProcessDataLoaderIter: {
        "_dataset_fetcher": "read, and replaced: gets a batch from the dataset; `fetch` is wrapped to seed each batch",
        "_next_data": "overridden, and called: makes the next batch",
    },
    MultiProcessingDataLoaderIter: {
        "_shutdown_workers": "called, and a method of dpex's iterators: ends the workers",
        "_worker_init_fn": "overridden: called in each worker before its first batch",
        "_workers": "read: the processes, and their numbers in the system",
    },
    torch.Tensor: {"_backward_hooks": "read: a tensor that has some is pickled by torch"},
    torch.TypedStorage: {"_untyped_storage": "read: the bytes of a storage with a number type"},
    torch.Generator: {"_cdata": "read: the generator's address in memory, where its state is read and written"},
    torch.nn.Module: {"_modules": "read and copied: a module's parts, which are timed one by one"},
    StackDataset: {"_length": "compared: an attribute that torch sets, not the user"},
}
"""Private methods and attributes of torch's classes that dpex relies on, each with its purpose."""

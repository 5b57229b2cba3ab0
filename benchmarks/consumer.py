"""What a consumer does with each batch: the same code for every contestant.

A batch that nobody reads has no cost of its own: pages that were never touched, or that lie in another processor's
cache, are paid for by whoever reads them first. Every consumer of the benchmark therefore reads one byte of every
page of every array in the batch, or, where the row says so, copies all of it.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch

PAGE_BYTES = 4096
Use = Literal["read", "copy"]


def read_pages(batch: Any) -> None:
    """Read one byte of every page of every array in `batch`, whatever its nesting. Raises TypeError off the CPU."""
    if isinstance(batch, torch.Tensor):
        _read_tensor(batch)
    elif isinstance(batch, np.ndarray):
        _read_array(batch)
    else:
        for value in _children(batch):
            read_pages(value)


def copy_all(batch: Any) -> None:
    """Copy every array in `batch` in full, as a training step that keeps its batch would."""
    if isinstance(batch, torch.Tensor):
        batch.clone()
    elif isinstance(batch, np.ndarray):
        batch.copy()
    else:
        for value in _children(batch):
            copy_all(value)


USES: dict[Use, Callable[[Any], None]] = {"read": read_pages, "copy": copy_all}


def _children(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return batch.values()
    return batch if isinstance(batch, (list, tuple)) else ()


def _read_tensor(tensor: torch.Tensor) -> None:
    """By address, which takes 0.3 µs for a small tensor; an operation of torch would take 7."""
    if not tensor.is_cpu:
        raise TypeError(f"the consumer reads tensors on the CPU, not on {tensor.device}")
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    size = tensor.nbytes
    if size > PAGE_BYTES:
        _read_bytes(np.frombuffer((ctypes.c_ubyte * size).from_address(tensor.data_ptr()), np.uint8))
    elif size:
        ctypes.c_ubyte.from_address(tensor.data_ptr()).value  # noqa: B018 - reading is the point


def _read_array(array: np.ndarray) -> None:
    if array.size and array.dtype != object:
        _read_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _read_bytes(flat: np.ndarray) -> int:
    """The largest of one byte per page: numpy cannot know it without reading them."""
    return int(flat[::PAGE_BYTES].max()) | int(flat[-1])

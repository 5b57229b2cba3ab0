"""torch's ``default_collate``, with its tensors stacked straight into shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dpex._torch import collate as torch_collate
from dpex.transport.arena import Arena


class ArenaCollate:
    """torch's ``default_collate`` with its tensors stacked straight into an arena.

    A user's own entry for ``torch.Tensor`` in ``default_collate_fn_map`` is respected.

    Args:
        arena: The memory of large batches.
        least_bytes: Bytes above which a batch is large.
        in_worker: True in a worker, False in the training process.
        threads: Returns the number of torch's threads that stack large tensors in a batch that is otherwise made by
            one. A copy does not depend on their number.
    """

    def __init__(
        self, arena: Arena, least_bytes: int, *, in_worker: bool, threads: Callable[[], int] = lambda: 1
    ) -> None:
        self._arena = arena
        self._least_bytes = least_bytes
        self._in_worker = in_worker
        self._threads = threads

    def stack(self, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        """Stack equal, plain CPU tensors into a slot; leave everything else to torch.

        In a worker torch's result is always contiguous, in the training process it follows its inputs' strides.
        """
        first = batch[0]
        if not _plain(first):
            stacked: torch.Tensor = _torch_stack(batch, collate_fn_map=collate_fn_map)
            return stacked
        large = first.numel() * first.itemsize * len(batch) > self._least_bytes
        strided = not first.is_contiguous()
        if (large and (self._in_worker or not strided)) or (strided and self._in_worker):
            shape, dtype = first.shape, first.dtype
            alike = set(map(type, batch)) == _TENSOR_ONLY if self._in_worker else all(map(_like(first), batch))
            if alike and first.device.type == "cpu":
                size = (len(batch), *shape)
                if large:
                    return self._stack_large(batch, self._arena.tensor(size, dtype))
                return torch.stack(batch, 0, out=torch.empty(size, dtype=dtype, device="cpu"))
        return torch.stack(batch, 0)

    def _stack_large(self, batch: Any, out: torch.Tensor) -> torch.Tensor:
        threads = self._threads()
        if threads == 1 or torch.get_num_threads() != 1:
            return torch.stack(batch, 0, out=out)
        torch.set_num_threads(threads)
        try:
            return torch.stack(batch, 0, out=out)
        finally:
            torch.set_num_threads(1)

    def install(self) -> None:
        """Make ``default_collate`` itself use the arena, for collate functions that call it (worker processes only)."""
        table = torch_collate.default_collate_fn_map
        if table.get(torch.Tensor) is _torch_stack:
            table[torch.Tensor] = self.stack

    def __call__(self, batch: Any) -> Any:
        """``default_collate(batch)`` without touching torch's table (for use in the training process)."""
        table = torch_collate.default_collate_fn_map
        if type(batch) is list and batch and table.get(_Tensor) is _torch_stack:
            first = batch[0]
            if type(first) is _Tensor:
                return self._stack_here(batch, first)
            if type(first) is tuple and table == _AS_IMPORTED and _are_alike(batch, len(first)):
                return [self._column(samples, table) for samples in zip(*batch, strict=True)]
        return torch_collate.collate(batch, collate_fn_map=self._with_arena(table))

    def _stack_here(self, batch: Any, first: torch.Tensor) -> torch.Tensor:
        """In the training process; small tensors without a look at each of them."""
        is_dense = first.layout is _strided and not first.is_nested
        if is_dense and first.nbytes * len(batch) <= self._least_bytes:
            return torch.stack(batch, 0)
        return self.stack(batch)

    def _column(self, samples: Any, table: Any) -> Any:
        first = samples[0]
        if type(first) is _Tensor:
            return self._stack_here(samples, first)
        return torch_collate.collate(samples, collate_fn_map=self._with_arena(table))

    def _with_arena(self, table: Any) -> Any:
        return {**table, _Tensor: self.stack} if table.get(_Tensor) is _torch_stack else table


_Tensor, _strided = torch.Tensor, torch.strided
_TUPLE_ONLY = {tuple}
_AS_IMPORTED = dict(torch_collate.default_collate_fn_map)


def _are_alike(rows: Any, size: int) -> bool:
    """Return True if these samples are plain tuples of that size, which torch's function collates by columns."""
    return set(map(type, rows)) == _TUPLE_ONLY and set(map(len, rows)) == {size}


_TENSOR_ONLY = {torch.Tensor}


_torch_stack = torch_collate.collate_tensor_fn


def _plain(tensor: Any) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.requires_grad
    )


def _like(first: torch.Tensor) -> Callable[[Any], bool]:
    """Return a test of an item: stacked into memory of ``first``'s dtype, do the two give what torch gives?"""
    dtype = first.dtype
    return lambda item: _plain(item) and item.dtype == dtype and item.is_contiguous() and not item.is_conj()

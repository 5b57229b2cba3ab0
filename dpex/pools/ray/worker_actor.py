"""Body of a remote worker: runs inside a Ray actor, knows nothing of Ray but the one call that fetches the parcel.

The parcel's buffers exist once per node: the first worker of a node writes them into an anonymous shared file, and the
others open that file through ``/proc``. Everybody maps it privately, so what a dataset writes into its arrays stays its
own, as in a forked worker. Where that does not work a worker keeps a copy.

One call brings a group of tickets and takes their results back: small buffers inside one marshalled header, large ones
on a connection of their own (see `stream`) or, where there is none, as raw arrays beside the header.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import marshal
import mmap
import os
import pickle
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from dpex.pools.ray.tcp_stream import Sender, Target
from dpex.system.run_queue import OwnQueue
from dpex.transport.arena import Arena, SlotRef
from dpex.transport.codec import _DTYPES, _INLINE, _PICKLE, INLINE_BYTES, Encoder
from dpex.transport.out_of_band import Memories
from dpex.transport.pickling import cloud_dumps, dump_batch, pristine_collate_map, unpack
from dpex.worker.core import (
    ArenaCollate,
    Failure,
    StreamEnd,
    WorkerCore,
    WorkerSetup,
    get_rng_state,
    prepare_process,
    set_rng_state,
    where,
)

BATCH, ERROR, END = 0, 1, 2
_SHARED_BYTES = 1 << 20
"""A parcel smaller than this is copied by each worker; sharing it would not be worth the trouble."""
_ALIGN = 64
_TOKEN_BYTES = 16
_SNAPSHOT_S = 0.25
_SNAPSHOT_TICKETS = 1024


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What is in a parcel: the setup, and what the user changed in torch's ``default_collate_fn_map``."""

    setup: WorkerSetup
    collate_entries: dict[Any, Any]


class Source(NamedTuple):
    """Where on this node the parcel's bytes can be opened: a process, its descriptor, and what the file begins with."""

    pid: int
    fd: int
    token: bytes


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the trainer tells a worker when it prepares it."""

    shared_queue: bool
    host_index: int
    probe: bool
    probe_index: Any
    source: Source | None
    codec: str
    target: Target | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """How preparing went; ``unfit`` says why this node cannot serve, ``unreached`` why no connection could be made."""

    unfit: str | None = None
    source: Source | None = None
    unreached: str | None = None


# -- the parcel on this node -----------------------------------------------------------------------------------------


class Baggage:
    """The parcel's bytes on this node; every `open` unpacks it anew, with private, writable buffers."""

    def __init__(self, fetch: Callable[[], Sequence[Any]], source: Source | None) -> None:
        self._fd = -1
        self._token = b""
        self._layout: list[tuple[int, int]] = []
        self._arrays: list[bytes] = []
        if source is not None:
            with contextlib.suppress(OSError, ValueError):
                self._join(source)
        if self._fd < 0:
            self._take(fetch())

    @property
    def source(self) -> Source | None:
        """For the other workers of this node."""
        return Source(os.getpid(), self._fd, self._token) if self._fd >= 0 else None

    def open(self) -> Contents:
        """The contents, with buffers of their own."""
        if self._fd >= 0:
            memory = mmap.mmap(self._fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            parts: list[Any] = [np.frombuffer(memory, np.uint8, size, at) for at, size in self._layout]
        else:
            parts = [bytearray(array) for array in self._arrays]
        return unpack(memoryview(parts[0]), parts[1:])  # type: ignore[no-any-return]

    def close(self) -> None:
        """Forget the bytes; what was opened stays valid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._arrays = []

    def _take(self, arrays: Sequence[Any]) -> None:
        if sum(array.nbytes for array in arrays) < _SHARED_BYTES or not hasattr(os, "memfd_create"):
            self._arrays = [array.tobytes() for array in arrays]
            return
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._layout, size = _lay_out([array.nbytes for array in arrays])
        table = marshal.dumps(self._layout)
        self._fd = os.memfd_create("dpex-parcel")
        os.ftruncate(self._fd, size + len(table))
        memory = mmap.mmap(self._fd, 0)
        memory[:_TOKEN_BYTES] = self._token
        memory[_TOKEN_BYTES : _TOKEN_BYTES + 8] = size.to_bytes(8, "little")
        memory[size:] = table
        for (at, nbytes), array in zip(self._layout, arrays, strict=True):
            np.frombuffer(memory, np.uint8, nbytes, at)[:] = array

    def _join(self, source: Source) -> None:
        fd = os.open(f"/proc/{source.pid}/fd/{source.fd}", os.O_RDWR)
        head = os.pread(fd, _TOKEN_BYTES + 8, 0)
        if head[:_TOKEN_BYTES] != source.token:
            os.close(fd)  # another process of that number, in another container
            return
        size = int.from_bytes(head[_TOKEN_BYTES:], "little")
        self._layout = marshal.loads(os.pread(fd, os.fstat(fd).st_size - size, size))
        self._fd, self._token = fd, source.token


def _lay_out(sizes: list[int]) -> tuple[list[tuple[int, int]], int]:
    """Offset and size of each buffer, and where they end."""
    layout, at = [], _ALIGN
    for size in sizes:
        layout.append((at, size))
        at += -(-size // _ALIGN) * _ALIGN
    return layout, at


# -- results ---------------------------------------------------------------------------------------------------------


class Outbox(Arena):
    """Private memory, faulted in once, from which Ray copies results; a slot is free again when Ray has done so."""

    def __init__(self) -> None:
        super().__init__(shared=False)
        self.lent: dict[SlotRef, Any] = {}
        self._bases: weakref.WeakValueDictionary[SlotRef, Any] = weakref.WeakValueDictionary()

    def array(self, nbytes: int) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], SlotRef]:
        """See `Arena.array`."""
        base, ref = super().array(nbytes)
        self._bases[ref] = base
        return base, ref

    def find(self, address: int) -> SlotRef | None:
        """See `Arena.find`."""
        ref = super().find(address)
        return ref if ref in self._bases else None

    def lend(self, ref: SlotRef) -> None:
        """The slot's array belongs to the ticket that is being encoded."""
        self.lent[ref] = self._bases[ref]

    def take_back(self, ref: SlotRef) -> None:
        """See `Arena.take_back`."""
        self.lent.pop(ref, None)


class FarEncoder(Encoder):
    """As `Encoder`, for a trainer on another machine: classes and functions travel by value where they must."""

    def _dump(self, batch: Any, stream: io.BytesIO, memories: Memories) -> None:
        dump_batch(batch, stream, memories)


class RemoteWorker:
    """Serves one loader; a later loader gets a new one in the same process."""

    _outbox: Outbox | None = None
    """Of the process: its memory stays faulted in from one loader to the next."""

    def __init__(self, order: Order, fetch: Callable[[], Sequence[Any]]) -> None:
        prepare_process()
        _restore_torch()
        self._baggage = Baggage(fetch, order.source)
        if order.probe:
            _probe(self._baggage.open().setup, order.probe_index)
        contents = self._baggage.open()
        if RemoteWorker._outbox is None:
            RemoteWorker._outbox = Outbox()
        self._box = RemoteWorker._outbox
        self._encoder = FarEncoder(self._box)
        torch_collate.default_collate_fn_map.update(contents.collate_entries)
        ArenaCollate(self._box, INLINE_BYTES, in_worker=True).install()
        self._core = WorkerCore(contents.setup)
        self._fresh = True
        self._logical = order.host_index if order.shared_queue else None
        self._snapshot_at, self._since_snapshot = time.perf_counter(), 0
        if order.shared_queue:
            self._core.adopt(order.host_index)
        self._queue = OwnQueue()
        self._sender: Sender | None = None
        unreached = None
        if order.target is not None:
            try:
                self._sender = Sender(order.target)
            except OSError as error:
                unreached = f"{order.target.address}:{order.target.port}: {error}"
        self.report = Report(source=self._baggage.source, unreached=unreached)

    def close(self) -> None:
        """Let go of the parcel and the connection."""
        self._baggage.close()
        self._queue.close()
        if self._sender is not None:
            self._sender.close()

    def adopt(self, logical: int, state: bytes | None) -> None:
        """Host a logical worker, with a dataset of its own."""
        setup = None if self._fresh else self._baggage.open().setup
        self._fresh = False
        self._core.adopt(logical, state, setup)

    def release(self, logical: int) -> bytes:
        """Give a logical worker up; returns its random state."""
        return self._core.release(logical)

    def work(self, message: bytes) -> Any:
        """Make a group of tickets: a marshalled header, or a list of it and the large buffers.

        The header says how long this thread was on a run queue meanwhile, too, or None.
        """
        queued_s = self._queue.seconds()
        epoch, queue, tickets = pickle.loads(message)
        logical = queue if self._logical is None else self._logical
        arrays: list[Any] = []
        results = [self._make(epoch, number, index, logical, arrays) for number, index in tickets]
        queued_s = _grown(queued_s, self._queue.seconds())
        snapshot = self._maybe_snapshot(logical, epoch, tickets[-1][0], len(tickets))
        frame = self._sender.send(arrays) if arrays and self._sender is not None else None
        header = marshal.dumps((results, snapshot, frame, queued_s))
        return [header, *arrays] if arrays and frame is None else header

    def _make(self, epoch: int, number: int, index: Any, logical: int, arrays: list[Any]) -> tuple[Any, ...]:
        cpu_began = self._core.cpu()
        made, stages = self._core.make(number, index, logical, epoch)
        began = time.perf_counter()
        kind, node = self._encoded(made, logical)
        slots = []
        for ref, base in self._box.lent.items():
            slots.append((*ref, len(arrays)))
            arrays.append(base)
        self._box.lent.clear()
        encode_s, cpu_s = time.perf_counter() - began, self._core.cpu() - cpu_began
        return (epoch, number, kind, node, tuple(stages), cpu_s, encode_s, self._encoder.nbytes, slots)

    def _encoded(self, made: Any, logical: int) -> tuple[int, Any]:
        if isinstance(made, StreamEnd):
            return END, None
        if isinstance(made, Failure):
            return ERROR, _failure(made.wrapper)
        try:
            node = self._encoder.encode(made)
            if node[0] not in (_INLINE, _PICKLE):
                marshal.dumps(node)
        except Exception:
            self._box.lent.clear()
            return ERROR, _failure(ExceptionWrapper(where=where(logical)))
        return BATCH, node

    def _maybe_snapshot(self, logical: int, epoch: int, last: int, made: int) -> tuple[Any, ...] | None:
        if self._logical is not None:
            return None
        self._since_snapshot += made
        now = time.perf_counter()
        if now - self._snapshot_at <= _SNAPSHOT_S and self._since_snapshot < _SNAPSHOT_TICKETS:
            return None
        self._snapshot_at, self._since_snapshot = now, 0
        return logical, epoch, last, get_rng_state()


def _grown(then: float | None, now: float | None) -> float | None:
    return None if then is None or now is None else max(0.0, now - then)


def _failure(wrapper: ExceptionWrapper) -> bytes:
    """The error for the trainer; classes of the trainer's ``__main__`` travel by value and find themselves again."""
    try:
        return cloud_dumps(wrapper)
    except Exception:
        text = f"{wrapper.exc_type.__name__} (its type cannot be pickled)\n{wrapper.exc_msg}"
        return pickle.dumps(ExceptionWrapper((RuntimeError, RuntimeError(text), None), wrapper.where), 5)


# -- preparing -------------------------------------------------------------------------------------------------------


class UnfitError(Exception):
    """This node lacks what the dataset needs."""


def prepare(order: Order, fetch: Callable[[], Sequence[Any]]) -> tuple[RemoteWorker | None, Report]:
    """A worker that is ready for tickets, or the reason why there can be none on this node."""
    if order.codec != codec_signature():
        return None, Report(unfit=f"torch {torch.__version__} there has other number types than the trainer's torch")
    try:
        worker = RemoteWorker(order, fetch)
    except UnfitError as error:
        return None, Report(unfit=str(error))
    except Exception as error:
        return None, Report(unfit=f"the dataset cannot be opened there: {type(error).__name__}: {error}")
    return worker, worker.report


def _probe(setup: WorkerSetup, index: Any) -> None:
    """Get one sample of a dataset that is thrown away afterwards, without a trace in the random state."""
    if setup.iterable or index is None:
        return
    state = get_rng_state()
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=0, num_workers=setup.num_workers, seed=setup.base_seed, dataset=setup.dataset
    )
    try:
        setup.dataset[index]
    except (ImportError, OSError) as error:
        raise UnfitError(f"a sample cannot be fetched there: {type(error).__name__}: {error}") from error
    except Exception:
        pass  # the dataset's own affair: it will show where the sample is wanted
    finally:
        torch_worker._worker_info = None
        set_rng_state(state)


def _restore_torch() -> None:
    """What an earlier loader left in this process: worker info, collate functions, number type, gradients."""
    torch_worker._worker_info = None
    table = torch_collate.default_collate_fn_map
    table.clear()
    table.update(pristine_collate_map())
    torch.set_grad_enabled(True)


def codec_signature() -> str:
    """What both ends of the codec must agree on: the number types that their torch has."""
    return ",".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)


def get_from_ray(refs: list[Any]) -> Sequence[Any]:
    """The parcel's arrays, as Ray's object store has them."""
    return importlib.import_module("ray").get(refs[0])  # type: ignore[no-any-return]

"""An asynchronous device that is not there: torch believes in a "cuda" whose work is done later, by another thread.

Operations on its tensors (`DeviceTensor`) are queued on the calling thread's current stream. A thread performs them,
those of one stream in order, streams in any order, and none of a stream that is held. Its memory is handed out anew as
torch's allocator does it: at once to the stream it was allocated on, unless ``record_stream`` says who else uses it.

What real hardware would punish now and then is noted each time, in ``hazards``: an operation that reads what was not
waited for, memory that is handed out while somebody may read it, and a copy that reads memory of the host which was
given back. What the host writes too early is seen in the values, as copies read the host's memory when they happen.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.data._utils.pin_memory as torch_pinning
from accelerator import tell_torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import dpex.device.devices

Clock = dict[int, int]
CUDA = torch.device("cuda", 0)
_WAIT_S = 30.0
"""No test waits so long for the device unless it is stuck."""


def _merge(into: Clock, other: Clock) -> None:
    for stream, count in other.items():
        into[stream] = max(into.get(stream, 0), count)


class Event:
    """As `torch.cuda.Event`. ``clock``: what has happened before it, by stream."""

    def __init__(self, gpu: AsyncDevice) -> None:
        self._gpu = gpu
        self.clock: Clock = {}
        self.at_s: float | None = None

    def record(self, stream: Stream) -> None:
        self.at_s = None
        stream.put(self._pass)
        self.clock = dict(stream.clock)

    def _pass(self) -> None:
        self.at_s = time.monotonic()

    def query(self) -> bool:
        if self.at_s is None:
            return False
        self._gpu.host_saw(self.clock)
        return True

    def synchronize(self) -> None:
        self._gpu.wait_until(lambda: self.at_s is not None)
        self._gpu.host_saw(self.clock)

    def elapsed_time(self, other: Event) -> float:
        assert self.at_s is not None
        assert other.at_s is not None
        return (other.at_s - self.at_s) * 1e3


class Stream:
    """As `torch.cuda.Stream`. ``clock``: what has happened before an operation that is queued now, by stream."""

    def __init__(self, gpu: AsyncDevice) -> None:
        self._gpu = gpu
        self.number = gpu.count_stream(self)
        self.clock: Clock = {}
        self.queued = self.done = 0
        self.operations: deque[tuple[Event | None, Callable[[], None]]] = deque()

    def put(self, operation: Callable[[], None], after: Event | None = None) -> int:
        """Queue an operation; its number on this stream."""
        with self._gpu.changed:
            _merge(self.clock, self._gpu.host_clock)
            if after is not None:
                _merge(self.clock, after.clock)
            self.queued += 1
            self.clock[self.number] = self.queued
            self.operations.append((after, operation))
            self._gpu.changed.notify_all()
            return self.queued

    def wait_event(self, event: Event) -> None:
        self.put(lambda: None, after=event)

    def knows(self, stream: int, number: int) -> bool:
        """Whether that operation of that stream has happened before what is queued here now."""
        _merge(self.clock, self._gpu.host_clock)
        return self.clock.get(stream, 0) >= number

    def synchronize(self) -> None:
        queued, clock = self.queued, dict(self.clock)
        self._gpu.wait_until(lambda: self.done >= queued)
        self._gpu.host_saw(clock)

    @property
    def runnable(self) -> bool:
        if not self.operations or self in self._gpu.held:
            return False
        after, _ = self.operations[0]
        return after is None or after.at_s is not None


class Block:
    """Memory of the device. ``written``: by which operation last; ``used``: operations since it was handed out."""

    def __init__(self, nbytes: int, home: Stream) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8)
        self.home = home
        self.written: tuple[int, int] | None = None
        self.used: list[tuple[Stream, int]] = []
        self.also: set[Stream] = set()


class _Lease:
    """What tensors hold of a block; when the last is gone, the allocator has it back."""

    def __init__(self, gpu: AsyncDevice, block: Block) -> None:
        self.gpu, self.block = gpu, block

    def __del__(self) -> None:
        self.gpu.free(self.block)


class DeviceTensor(torch.Tensor):
    """A tensor of the device; ``stored`` is where its values will be."""

    stored: torch.Tensor
    lease: _Lease
    device = CUDA  # type: ignore[assignment]

    @staticmethod
    def over(real: torch.Tensor, lease: _Lease) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            DeviceTensor, real.shape, strides=real.stride(), storage_offset=0, dtype=real.dtype
        )
        made.stored, made.lease = real, lease
        return made

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.lease.block.also.add(stream)

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.lease.gpu.fetched(self)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def item(self) -> Any:
        return self.cpu().item()

    def pin_memory(self, device: Any = None) -> torch.Tensor:
        raise AssertionError("only memory of the host can be pinned")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu = next(leaf for leaf in torch.utils._pytree.tree_leaves(args) if type(leaf) is DeviceTensor).lease.gpu
        return gpu.perform(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"


def _real(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.stored if type(leaf) is DeviceTensor else leaf, value)


def _meta(value: Any) -> Any:
    def one(leaf: Any) -> Any:
        if type(leaf) is DeviceTensor:
            return torch.empty_strided(leaf.stored.shape, leaf.stored.stride(), dtype=leaf.stored.dtype, device="meta")
        return leaf

    return tree_map(one, value)


class _Commands(TorchFunctionMode):
    """What a thread asks for with ``device="cuda"`` while it feeds a stream of the device."""

    def __init__(self, gpu: AsyncDevice) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to and type(args[0]) is not DeviceTensor and self._is_there(args[1:], kwargs):
            return self._gpu.upload(args[0], non_blocking=kwargs.get("non_blocking", False))
        if func in (torch.rand, torch.randn) and self._is_there((), kwargs):
            return self._gpu.drawn(func, *args, **{k: v for k, v in kwargs.items() if k != "device"})
        return func(*args, **kwargs)

    def _is_there(self, args: Any, kwargs: Any) -> bool:
        named = [kwargs.get("device"), *args[:1]]
        return any(isinstance(one, (str, torch.device)) and torch.device(one).type == "cuda" for one in named)


class _Runtime:
    """As ``torch.cuda.cudart()``: page locks by address."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.answer = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 1
        assert address not in self.locked
        if not self.answer:
            self.locked[address] = nbytes
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


class AsyncDevice:
    """See the module; it is a module such as `torch.cuda`, too.

    held: streams that do nothing for now. uploads: copies that were begun. pinned: tensors that were pinned.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.hazards: list[str] = []
        self.held: set[Stream] = set()
        self.holds_new_streams = False
        self.streams: list[Stream] = []
        self.host_clock: Clock = {}
        self.uploads = self.pinned = 0
        self.reused = 0
        self.before_pin: Callable[[torch.Tensor], None] = lambda tensor: None
        self.is_capturing = False
        self.runtime = _Runtime()
        self._pins: list[tuple[int, int, StorageWeakRef]] = []
        self._free: list[tuple[Block, list[Event]]] = []
        self._generator = torch.Generator()
        self._current = threading.local()
        self._random = random.Random(0)
        self._ends = False
        self.training = Stream(self)
        self._thread = threading.Thread(target=self._run, name="dpex-async-device", daemon=True)
        self._thread.start()

    # -- as torch.cuda -------------------------------------------------------------------------------------------------

    def Stream(self, device: torch.device) -> Stream:
        assert device == CUDA
        made = Stream(self)
        if self.holds_new_streams:
            self.held.add(made)
        return made

    def Event(self, *, enable_timing: bool = False) -> Event:
        assert enable_timing
        return Event(self)

    def current_stream(self, device: torch.device = CUDA) -> Stream:
        assert device == CUDA
        stream: Stream = getattr(self._current, "stream", self.training)
        return stream

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        try:
            with _Commands(self):
                yield
        finally:
            self._current.stream = before

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def get_rng_state(self) -> torch.Tensor:
        return self._generator.get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._generator.set_state(state)

    def manual_seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def cudart(self) -> _Runtime:
        return self.runtime

    def pin(self, tensor: torch.Tensor, device: str | None = None) -> torch.Tensor:
        """In place of torch's ``pin_memory``."""
        assert device in ("cuda", None)
        assert type(tensor) is torch.Tensor
        self.before_pin(tensor)
        copy = tensor.clone()
        if copy.layout is torch.strided:
            storage = copy.untyped_storage()
            self._pins.append((storage.data_ptr(), storage.nbytes(), StorageWeakRef(storage)))
        self.pinned += 1
        return copy

    # -- memory --------------------------------------------------------------------------------------------------------

    def _allocate(self, nbytes: int, stream: Stream) -> Block:
        with self.changed:
            for place, (block, events) in enumerate(self._free):
                if block.home is stream and block.memory.nbytes == nbytes and all(e.at_s is not None for e in events):
                    del self._free[place]
                    for user, number in block.used:
                        if user.done < number and not stream.knows(user.number, number):
                            self.hazards.append("memory was used anew while an operation of another stream may read it")
                    block.used, block.also, block.written = [], set(), None
                    self.reused += 1
                    return block
        return Block(nbytes, stream)

    def free(self, block: Block) -> None:
        with self.changed:
            events = []
            for stream in block.also:
                events.append(Event(self))
                events[-1].record(stream)
            self._free.append((block, events))

    def _new(self, like: torch.Tensor, stream: Stream) -> DeviceTensor:
        """Uninitialised, of that shape."""
        count = 1 + sum((extent - 1) * step for extent, step in zip(like.shape, like.stride(), strict=True))
        block = self._allocate(max(1, count * like.dtype.itemsize), stream)
        real = block.memory.view(like.dtype)[:count].as_strided(like.shape, like.stride())
        return DeviceTensor.over(real, _Lease(self, block))

    # -- operations ----------------------------------------------------------------------------------------------------

    def _reads(self, tensor: DeviceTensor, stream: Stream) -> None:
        block = tensor.lease.block
        if block.written is not None and not stream.knows(*block.written):
            self.hazards.append("a tensor was read before the copy or operation that fills it was waited for")

    def _used(self, tensors: list[DeviceTensor], stream: Stream, number: int) -> None:
        for tensor in tensors:
            tensor.lease.block.used.append((stream, number))

    def perform(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation of torch's on tensors of the device, queued on the current stream."""
        stream = self.current_stream()
        inputs = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if type(leaf) is DeviceTensor]
        returned = func._schema.returns
        if any(one.alias_info is not None and not one.alias_info.is_write for one in returned):
            return DeviceTensor.over(func(*_real(args), **_real(kwargs)), inputs[0].lease)
        for tensor in inputs:
            self._reads(tensor, stream)
        kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        writes = [one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments]
        if any(writes):
            number = stream.put(partial(func, *_real(args), **_real(kwargs)))
            self._used(inputs, stream, number)
            target = args[writes.index(True)]
            target.lease.block.written = (stream.number, number)
            return target
        made = self._new(func(*_meta(args), **_meta(kwargs)), stream)
        number = stream.put(partial(_fill, made.stored, partial(func, *_real(args), **_real(kwargs))))
        self._used([*inputs, made], stream, number)
        made.lease.block.written = (stream.number, number)
        return made

    def upload(self, host: torch.Tensor, *, non_blocking: bool) -> DeviceTensor:
        """A copy of a tensor of the host; it is read when the copy happens, and that does not keep it alive."""
        stream = self.current_stream()
        made = self._new(host, stream)
        source = StorageWeakRef(host.untyped_storage())
        meta = (host.data_ptr(), host.dtype, host.shape, host.stride())

        def copy(out: torch.Tensor = made.stored) -> None:
            if source.expired():
                self.hazards.append("memory of the host was given back before the copy out of it")
            else:
                out.copy_(_at(*meta))

        number = stream.put(copy)
        made.lease.block.written = (stream.number, number)
        self._used([made], stream, number)
        self.uploads += 1
        if not non_blocking or not self._is_locked(meta[0]):
            stream.synchronize()  # as the driver does with memory that can be paged out
        return made

    def _is_locked(self, address: int) -> bool:
        locked = [(start, nbytes) for start, nbytes, storage in self._pins if not storage.expired()]
        return any(start <= address < start + nbytes for start, nbytes in (*locked, *self.runtime.locked.items()))

    def drawn(self, func: Any, *args: Any, **kwargs: Any) -> DeviceTensor:
        """Random numbers of the device's generator, which moves when they are asked for."""
        values, stream = func(*args, generator=self._generator, **kwargs), self.current_stream()
        made = self._new(values, stream)
        number = stream.put(partial(_fill, made.stored, lambda: values))
        made.lease.block.written = (stream.number, number)
        return made

    def fetched(self, tensor: DeviceTensor) -> torch.Tensor:
        """Its values on the host, once the current stream is done."""
        stream = self.current_stream()
        self._reads(tensor, stream)
        stream.synchronize()
        return tensor.stored.clone()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def count_stream(self, stream: Stream) -> int:
        self.streams.append(stream)
        return len(self.streams)

    def host_saw(self, clock: Clock) -> None:
        with self.changed:
            _merge(self.host_clock, clock)

    def release(self) -> None:
        """No stream is held any more."""
        with self.changed:
            self.held.clear()
            self.holds_new_streams = False
            self.changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, _WAIT_S), "the device is stuck"

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._ends or any(stream.runnable for stream in self.streams))
                if self._ends:
                    return
                stream = self._random.choice([stream for stream in self.streams if stream.runnable])
                _, operation = stream.operations.popleft()
            operation()
            del operation
            with self.changed:
                stream.done += 1
                self.changed.notify_all()

    def end(self) -> None:
        with self.changed:
            self._ends = True
            self.changed.notify_all()
        self._thread.join(_WAIT_S)


def _fill(out: torch.Tensor, make: Callable[[], torch.Tensor]) -> None:
    out.copy_(make())


def _at(address: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor over memory that somebody else owns."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    count = 1 + sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True))
    memory = (ctypes.c_ubyte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncDevice]:
    """The body of a fixture: the device is there, and it has seen no hazard in the end."""
    made = AsyncDevice()
    tell_torch(monkeypatch, lambda: 0, lambda index: None)
    monkeypatch.setattr(dpex.device.devices, "device_module", lambda kind: made)
    monkeypatch.setattr(torch_pinning, "pin_memory", made.pin)
    yield made
    made.release()
    made.end()

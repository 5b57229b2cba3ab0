"""Shared memory that is faulted in once and reused for batch after batch.

A *segment* is one anonymous shared file (`dpex.transport.memory.memory_file`), divided into
equal *slots*. Its first pages hold two bytes per slot: "held by the maker" and "held by the taker". A slot is free when
both are zero. The maker (a worker) sets both; each side clears its own byte when its last tensor or array that views
the slot dies. No lock is needed, because every byte has one writer at a time.

The maker owns the arena. The taker maps a segment once and closes the descriptor, so no descriptor stays open. When
the maker dies, the memory lives on until the taker's last view is gone.

A process forked from either side inherits its views, and may read them as long as it lives. So the child never clears
a byte, and the slots in use at the fork stay in use until the child and its own children have ended. To detect their
end, dpex opens a pipe at each fork with slots in use. The children inherit the writing end, and the reading end reports
a hang-up once all of them have ended. The parent polls it, one descriptor per living fork, when it takes or releases a
slot. An executed program does not inherit the pipe. If no descriptor is free for the pipe, dpex never releases the
slots in use at the fork, because reusing a slot might change a batch that a child reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import operator
import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from dpex.transport.memory import LARGEST_LEARNT, advise, keep_heap, map_memory, memory_file

PAGE_BYTES = mmap.PAGESIZE
# Advice of linux/mman.h, for which Python has no names. `_MADV_REMOVE` takes the pages away from all processes.
_MADV_REMOVE, _MADV_HUGEPAGE, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 9, 14, 22, 23
_SEGMENT_BYTES = 4 << 20
"""Maximum bytes of the slots that share a segment. They share it because each segment costs a map on either side."""
_LARGE_BYTES = 1 << 20
"""From this size on, `slot_class` rounds up less, to save memory."""
_TRIM_EVERY = 128
"""Slots taken between two searches for unused segments."""
_MAKER, _TAKER = 0, 1


class SlotRef(NamedTuple):
    """The place of a buffer: segment id and slot number."""

    segment: int
    slot: int


class SegmentSpec(NamedTuple):
    """What the taker (the process that receives the batches) must know of a segment to map it."""

    segment: int
    size: int
    slot_bytes: int
    slots: int


def slot_class(nbytes: int) -> int:
    """Return the slot size for ``nbytes``: whole pages, and a multiple of 1/8 of the largest power of two up to
    ``nbytes``. From 1 MiB on, it is a multiple of 1/32, which wastes less memory."""
    nbytes = max(nbytes, PAGE_BYTES)
    parts = 6 if nbytes >= _LARGE_BYTES else 4
    step = max(PAGE_BYTES, 1 << max(0, nbytes.bit_length() - parts))
    return -(-nbytes // step) * step


def tensor_over(base: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor over the bytes of ``base``. The tensor's storage keeps ``base`` alive.

    `torch.frombuffer` alone is not enough: ``share_memory_``, or putting the tensor in a queue, moves the storage to
    other memory and would release ``base``, although an array from an earlier ``numpy()`` may still read its bytes.
    """
    flat = torch.frombuffer(base, dtype=dtype)
    flat.untyped_storage()._dpex_base = base  # type: ignore[attr-defined]
    return flat


def memory_behind(tensor: torch.Tensor) -> Any | None:
    """Return the whole map of the segment that contains a tensor's bytes; None if no segment contains them."""
    if tensor.layout is not torch.strided:
        return None
    memory = getattr(getattr(tensor.untyped_storage(), "_dpex_base", None), "base", None)
    return memory if isinstance(memory, ctypes.Array) else None


class _Hold(weakref.ref):  # type: ignore[type-arg]
    """Weak reference to the base array of a view. Its callback clears the slot's byte when the array dies.

    The callback is `operator.setitem` with this reference as the value, which ``__index__`` turns into 0. Both are
    implemented in C, because Python only prints an exception that is raised in the Python code of a callback. One
    Ctrl-C in 300 was lost in this way, and the slot was never free again. ``born``: see `_age`.
    """

    __slots__ = ("born",)
    __index__ = staticmethod(int)
    born: float


class Segment:
    """A mapped file with slots. This process clears the byte ``side`` of the two bytes of each slot.

    ``shared``: False if the memory is private, so that forks copy it.
    """

    def __init__(self, spec: SegmentSpec, memory: Any, side: int, *, shared: bool = True) -> None:
        self.spec = spec
        self.flags: memoryview[int] = memoryview(memory).cast("B")[: 2 * spec.slots]
        self._memory = memory
        self._side = side
        self._data = _flag_bytes(spec.slots)
        self._holds: dict[int, _Hold] = {}
        self._next = 0
        self._shared = shared
        if shared:
            _shared_segments.add(self)

    def view(self, slot: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the first ``nbytes`` of a slot as a writable uint8 array. Its deletion clears this side's byte."""
        base = np.frombuffer(self._memory, np.uint8, nbytes, self.offset(slot))
        at, born = 2 * slot + self._side, _age
        self._hold(slot, base, partial(operator.setitem, self.flags, at), born)
        if forks and self._shared:  # tested after `_hold`, so that a concurrent fork finds this view or is in `forks`
            release_after_forks()
            self._hold(slot, base, partial(_clear, self.flags, at, born), born)
        return base

    def _hold(self, slot: int, base: Any, clear: Callable[[_Hold], None], born: float) -> None:
        hold = _Hold(base, clear)
        hold.born = born
        self._holds[slot] = hold

    def keep_for_fork(self) -> None:
        """Delay the release of slots with existing views until the processes of the coming fork have ended."""
        for slot, hold in list(self._holds.items()):
            base, at = hold(), 2 * slot + self._side
            if base is not None:
                self._hold(slot, base, partial(_clear, self.flags, at, hold.born), hold.born)

    def offset(self, slot: int) -> int:
        return self._data + slot * self.spec.slot_bytes

    def free_slot(self) -> int | None:
        """Return a slot that neither side holds; None if all are held. The search starts after the previous result."""
        flags, at = self.flags, self._next
        if flags[2 * at] or flags[2 * at + 1]:
            if b"\0\0" not in bytes(flags):
                return None
            slots = self.spec.slots
            free = (n % slots for n in range(at + 1, at + slots) if self.is_free(n % slots))
            at = next(free, -1)
            if at < 0:
                return None
        self._next = (at + 1) % self.spec.slots
        return at

    def is_free(self, slot: int) -> bool:
        return not self.flags[2 * slot] and not self.flags[2 * slot + 1]

    def advise(self, slot: int, advice: int) -> bool:
        """Advise the kernel about the pages of a slot. Return False if the kernel refused."""
        return advise(self._memory, advice, self.offset(slot), self.spec.slot_bytes)


def _flag_bytes(slots: int) -> int:
    return -(-2 * slots // PAGE_BYTES) * PAGE_BYTES


def open_segment(spec: SegmentSpec, fd: int) -> Segment:
    """Map a segment that the maker announced; the descriptor is closed."""
    try:
        memory = map_memory(fd, spec.size)
    finally:
        os.close(fd)
    advise(memory, _MADV_POPULATE_READ)
    return Segment(spec, memory, _TAKER)


class Arena:
    """The maker's slots. `announce` is called once for each new segment with its spec and an open descriptor.

    With ``shared=False`` the memory is private (huge pages where the kernel has them), maker and taker are the same
    process, and nothing is announced.
    """

    def __init__(self, announce: Callable[[SegmentSpec, int], None] | None = None, *, shared: bool = True) -> None:
        self._announce = announce
        self._shared = shared
        self._segments: dict[int, Segment] = {}
        self._by_size: dict[int, deque[Segment]] = {}
        self._placed: dict[int, SlotRef] = {}
        self._last_id = 0
        self._taken = 0
        self._used: set[int] = set()
        self._retired: list[int] = []
        self._empty: set[SlotRef] = set()
        """Free slots that have no pages."""

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in a slot of its own."""
        base, _ = self.array(math.prod(shape) * dtype.itemsize)
        return tensor_over(base, dtype).view(shape)

    def array(self, nbytes: int) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], SlotRef]:
        """Return an uninitialised uint8 array of ``nbytes`` (at least 1) in a slot of its own, and its place."""
        ref = self._free_slot(slot_class(nbytes))
        segment = self._segments[ref.segment]
        if ref in self._empty:
            self._empty.remove(ref)
            segment.advise(ref.slot, _MADV_POPULATE_WRITE)
        segment.flags[2 * ref.slot + _MAKER] = 1
        base = segment.view(ref.slot, nbytes)
        self._placed[base.__array_interface__["data"][0]] = ref
        return base, ref

    def slot_at(self, address: int) -> SlotRef | None:
        """Return the slot that starts at ``address`` if only the maker holds it, else None."""
        ref = self._placed.get(address)
        if ref is None:
            return None
        flags = self._segments[ref.segment].flags
        return ref if flags[2 * ref.slot + _MAKER] and not flags[2 * ref.slot + _TAKER] else None

    def hand_over(self, ref: SlotRef) -> None:
        """Mark the slot as held by the taker, which clears the mark when its last view of the slot is gone."""
        self._segments[ref.segment].flags[2 * ref.slot + _TAKER] = 1

    def take_back(self, ref: SlotRef) -> None:
        """Undo `hand_over` for a batch that was not sent."""
        self._segments[ref.segment].flags[2 * ref.slot + _TAKER] = 0

    def retired(self) -> list[int]:
        """Return the ids of segments given up since the last call; the taker forgets them too."""
        gone, self._retired = self._retired, []
        return gone

    def release_free_pages(self) -> None:
        """Give the pages of free slots back to the kernel. A slot gets pages again when it is taken."""
        for number, segment in self._segments.items() if self._shared else ():
            for ref in (SlotRef(number, slot) for slot in range(segment.spec.slots)):
                is_full = segment.is_free(ref.slot) and ref not in self._empty
                if is_full and segment.advise(ref.slot, _MADV_REMOVE):
                    self._empty.add(ref)

    @property
    def nbytes(self) -> int:
        return sum(segment.spec.size for segment in self._segments.values())

    def _free_slot(self, slot_bytes: int) -> SlotRef:
        self._taken += 1
        if self._taken % _TRIM_EVERY == 0:
            self._trim()
        ref = self._reuse(slot_bytes) or self._grow(slot_bytes)
        self._used.add(ref.segment)
        return ref

    def _reuse(self, slot_bytes: int) -> SlotRef | None:
        """Return a free slot; None if there is none. The search starts with the segment that last had a free slot.

        Large slots have a segment each. For them, the search starts with the oldest segment, so that surplus segments
        stay unused and `_trim` gives them up.
        """
        for size in sorted(s for s in self._by_size if slot_bytes <= s <= slot_bytes + slot_bytes // 2):
            segments = self._by_size[size]
            if 2 * size > _SEGMENT_BYTES:
                free = next((segment for segment in segments if segment.is_free(0)), None)
                if free is not None:
                    return SlotRef(free.spec.segment, 0)
                continue
            for _ in range(len(segments)):
                slot = segments[0].free_slot()
                if slot is not None:
                    return SlotRef(segments[0].spec.segment, slot)
                segments.rotate(-1)
        return None

    def _grow(self, slot_bytes: int) -> SlotRef:
        segments = self._by_size.get(slot_bytes, deque())
        held = sum(segment.spec.slots for segment in segments)
        slots = max(1, min(_SEGMENT_BYTES // slot_bytes, max(2, held)))
        size = _flag_bytes(slots) + slots * slot_bytes
        memory, fd = _map_segment(size, self._shared)
        self._last_id += 1
        spec = SegmentSpec(self._last_id, size, slot_bytes, slots)
        segment = self._segments[spec.segment] = Segment(spec, memory, _MAKER, shared=self._shared)
        segments.insert(len(segments) if slots == 1 else 0, segment)
        self._by_size[slot_bytes] = segments
        if fd >= 0 and self._announce is not None:
            self._announce(spec, fd)
        return SlotRef(spec.segment, 0)

    def _trim(self) -> None:
        """Give up segments that no batch used since the last trim."""
        for number in [n for n, s in self._segments.items() if n not in self._used and not any(s.flags)]:
            segment = self._segments.pop(number)
            segments = self._by_size[segment.spec.slot_bytes]
            segments.remove(segment)
            if not segments:
                del self._by_size[segment.spec.slot_bytes]
            self._placed = {a: p for a, p in self._placed.items() if p.segment != number}
            self._empty = {ref for ref in self._empty if ref.segment != number}
            self._retired.append(number)
        self._used.clear()


class ArenaCache:
    """Private arenas of one loader. Each iterator borrows one, so that no two iterators use an arena at the same time.

    With a new arena for each iterator, page faults made an epoch of eight batches of 38 MB take 1.6 times the CPU time.
    """

    def __init__(self) -> None:
        self._idle: list[Arena] = []

    def borrow(self, owner: Any) -> Arena:
        """Return an arena for ``owner``; it comes back when the owner dies."""
        arena = self._idle.pop() if self._idle else Arena(shared=False)
        weakref.finalize(owner, self._idle.append, arena).atexit = False
        return arena


def _map_segment(size: int, shared: bool) -> tuple[Any, int]:
    if not shared:
        keep_heap(LARGEST_LEARNT)  # batches are not on the heap, so freeing them raises no threshold of glibc
        memory = map_memory(-1, size)
        advise(memory, _MADV_HUGEPAGE)
        advise(memory, _MADV_POPULATE_WRITE)
        return memory, -1
    fd = memory_file("dpex", size)
    try:
        memory = map_memory(fd, size)
    except BaseException:
        os.close(fd)
        raise
    advise(memory, _MADV_POPULATE_WRITE)
    return memory, fd


# -- forks -------------------------------------------------------------------------------------------------------------


class Fork:
    """A fork, and the slots that this process has released and the child may still read."""

    def __init__(self) -> None:
        self.age: float = math.inf
        """The child inherits the views whose ``born`` is smaller. Infinite during the fork, so that all views count."""
        self.thread: int = threading.get_ident()
        self.kept: list[tuple[float, Any, int]] = []
        self.reading: int = -1
        self.writing: int = -1
        with contextlib.suppress(OSError):
            self.reading, self.writing = os.pipe()


forks: list[Fork] = []
"""The forks whose child, or a descendant of the child, may still run."""
_age = 0.0
"""The number of forks so far, which a new view gets as ``born``."""
_shared_segments: weakref.WeakSet[Segment] = weakref.WeakSet()
_inherited: list[int] = []
_looking = threading.Lock()


def _clear(flags: Any, at: int, born: float, _: _Hold) -> None:
    release_after_forks()
    _clear_once_unread(born, flags, at)


def _clear_once_unread(born: float, flags: Any, at: int) -> None:
    """Set ``flags[at]`` to 0 once all processes that were forked since the view was made have ended."""
    for fork in forks:
        if born < fork.age:
            fork.kept.append((born, flags, at))
            return
    flags[at] = 0


def release_after_forks() -> None:
    """Release the slots that were kept for processes that are gone."""
    if not _looking.acquire(blocking=False):
        return
    try:
        for fork in _ended_forks():
            forks.remove(fork)
            os.close(fork.reading)
            for born, flags, at in fork.kept:
                _clear_once_unread(born, flags, at)
    finally:
        _looking.release()


def _ended_forks() -> list[Fork]:
    watched = {fork.reading: fork for fork in forks if fork.reading >= 0 and fork.writing < 0}
    poller = select.poll()
    for fd in watched:
        poller.register(fd, 0)  # only a hang-up is waited for
    return [watched[fd] for fd, _ in poller.poll(0)]


def forget_inherited() -> None:
    """Close the pipes to the parent, because dpex's own processes do not read slots that they inherited."""
    while _inherited:
        os.close(_inherited.pop())


def _before_fork() -> None:
    if any(1 in bytes(segment.flags) for segment in list(_shared_segments)):
        forks.append(Fork())
        for segment in list(_shared_segments):
            segment.keep_for_fork()


def _after_fork_here() -> None:
    global _age
    _age += 1
    for fork in forks:
        if fork.age == math.inf and fork.thread == threading.get_ident():
            fork.age = _age
            if fork.writing >= 0:
                os.close(fork.writing)
                fork.writing = -1


def _after_fork_there() -> None:
    """In the child, keep only the pipes to the parent. When they close, the parent releases the slots that it kept."""
    global _looking
    _looking = threading.Lock()
    for fork in forks:
        with contextlib.suppress(OSError):
            os.close(fork.reading)
        if fork.writing >= 0:
            _inherited.append(fork.writing)
    forks.clear()
    for segment in list(_shared_segments):
        segment._holds.clear()
    _shared_segments.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_here, after_in_child=_after_fork_there)

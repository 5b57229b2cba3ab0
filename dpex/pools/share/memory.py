"""Workers' memory as the producer holds it, and as a training reads it.

The producer keeps the descriptor of each segment that a batch may lie in, and sends it to a training with the first
batch there. A training maps it and copies each batch out: it may write into what it gets, and the others must not see
that. So no training holds memory of the producer's but while it copies.
"""

from __future__ import annotations

import itertools
import marshal
import os
import socket
import weakref
from typing import Any, ClassVar, NamedTuple

import numpy as np

from dpex.pools.local.handles import LocalWorkerHandle, ProcessHandle
from dpex.transport.arena import Arena, Segment, SegmentSpec
from dpex.transport.codec import slots_of
from dpex.transport.memory import map_memory

DESCRIPTORS_A_MESSAGE = 32
"""As many as a worker sends at once; the kernel takes 253."""
_numbers = itertools.count(1)


class SharedSegment:
    """A segment of a worker, under a number of its own. ``gone`` gets that once no batch and no worker has it."""

    def __init__(self, spec: SegmentSpec, fd: int, gone: list[int]) -> None:
        self.number = next(_numbers)
        self.size = spec.size
        self.fd = fd
        self._ends = weakref.finalize(self, _give_up, fd, self.number, gone)


def _give_up(fd: int, number: int, gone: list[int]) -> None:
    os.close(fd)
    gone.append(number)


class SharingHandle(LocalWorkerHandle):
    """A worker whose segments can be sent on. ``gone``: numbers of those that cannot any more."""

    gone: ClassVar[list[int]] = []

    def __init__(self, number: int, worker_id: int, process: ProcessHandle, sock: socket.socket, row: int) -> None:
        super().__init__(number, worker_id, process, sock, row)
        self.shared: dict[int, SharedSegment] = {}

    def open_segment(self, spec: SegmentSpec, fd: int) -> Segment:
        """See `LocalWorkerHandle.open_segment`."""
        try:
            kept = os.dup(fd)
        except OSError:
            os.close(fd)
            raise
        try:
            segment = super().open_segment(spec, fd)
        except BaseException:
            os.close(kept)
            raise
        self.shared[spec.segment] = SharedSegment(spec, kept, self.gone)
        return segment

    def forget_retired(self) -> None:
        """Forget the segments that the worker has given up. Batches may still keep them."""
        if len(self.shared) > len(self.segments):
            self.shared = {number: one for number, one in self.shared.items() if number in self.segments}


class SlotPlace(NamedTuple):
    """The place of a slot of a batch: its name in the batch, and the place of its bytes."""

    segment: int
    slot: int
    shared: int
    offset: int
    nbytes: int


class MadeBatch:
    """A batch that a worker made, undecoded. ``data`` is what every training is sent; ``nbytes`` what it takes here.

    Its slots are the worker's again when it dies.
    """

    __slots__ = ("_slots", "data", "nbytes", "segments")

    def __init__(
        self, worker: SharingHandle, key: tuple[int, int], kind: int, node: Any, rest: tuple[Any, ...]
    ) -> None:
        self._slots = slots_of(node, worker.lease) if node is not None else {}
        worker.leased = {}
        worker.forget_retired()
        self.segments = {number: worker.shared[number] for number, _ in self._slots}
        places = [tuple(self._place(worker, *at, base.nbytes)) for at, base in self._slots.items()]
        self.data = marshal.dumps((*key, worker.number, kind, node, rest, places))
        self.nbytes = len(self.data) + sum(base.nbytes for base in self._slots.values())

    @property
    def is_lent(self) -> bool:
        """True if the batch lies in slots, which must stay as they are while a training copies them."""
        return bool(self._slots)

    def _place(self, worker: SharingHandle, segment: int, slot: int, nbytes: int) -> SlotPlace:
        offset = worker.segments[segment].offset(slot)
        return SlotPlace(segment, slot, self.segments[segment].number, offset, nbytes)


class SharedMemory:
    """A training's maps of the producer's segments, and the memory that batches are copied to."""

    def __init__(self) -> None:
        self._maps: dict[int, Any] = {}
        self._arena = Arena(shared=False)

    def map(self, segments: list[tuple[int, int]], fds: list[int]) -> None:
        """Map segments (number and size), and close their descriptors. Raises OSError."""
        try:
            for (number, size), fd in zip(segments, fds, strict=True):
                self._maps[number] = map_memory(fd, size)
        finally:
            for fd in fds:
                os.close(fd)

    def forget(self, numbers: list[int]) -> None:
        """Nothing lies there any more."""
        for number in numbers:
            self._maps.pop(number, None)

    def clear(self) -> None:
        """Nothing lies anywhere any more."""
        self._maps.clear()

    def copied(self, places: list[tuple[int, int, int, int, int]]) -> dict[tuple[int, int], Any]:
        """Arrays of this process's own with the bytes of these slots, by segment and slot."""
        found = {}
        for place in places:
            segment, slot, shared, offset, nbytes = place
            array, _ = self._arena.array(nbytes)
            array[:] = np.frombuffer(self._maps[shared], np.uint8, nbytes, offset)
            found[segment, slot] = array
        return found


def send_segments(sock: socket.socket, segments: list[SharedSegment]) -> None:
    """Send descriptors in a message of their own. Raises BlockingIOError where the socket is full."""
    message = marshal.dumps(("segments", [(segment.number, segment.size) for segment in segments]))
    socket.send_fds(sock, [message], [segment.fd for segment in segments])

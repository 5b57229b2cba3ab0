"""Batches as the producer keeps them, in the memory of its workers, and as a training copies them.

The producer keeps the descriptor of each segment that a batch may lie in. A training reads a batch through the
producer's entry in ``/proc`` into memory of its own: it may write into what it gets, and the others must not see that.
The batch stays as it is until the training says that it has its copy.
"""

from __future__ import annotations

import marshal
import os
import socket
import weakref
from typing import Any, NamedTuple

from dpex.pools.local.handles import LocalWorkerHandle, ProcessHandle
from dpex.transport.arena import Arena, Segment, SegmentSpec
from dpex.transport.codec import slots_of


class KeptDescriptor:
    """A descriptor that is closed once nothing refers to this."""

    def __init__(self, fd: int) -> None:
        self.fd = os.dup(fd)
        self._end = weakref.finalize(self, os.close, self.fd)


class SharingHandle(LocalWorkerHandle):
    """A worker whose segments others may read."""

    def __init__(self, number: int, worker_id: int, process: ProcessHandle, sock: socket.socket, row: int) -> None:
        super().__init__(number, worker_id, process, sock, row)
        self.kept: dict[int, KeptDescriptor] = {}

    def open_segment(self, spec: SegmentSpec, fd: int) -> Segment:
        """See `LocalWorkerHandle.open_segment`."""
        try:
            kept = KeptDescriptor(fd)
        except OSError:
            os.close(fd)
            raise
        segment = super().open_segment(spec, fd)
        self.kept = {number: one for number, one in self.kept.items() if number in self.segments}
        self.kept[spec.segment] = kept
        return segment


class SlotPlace(NamedTuple):
    """The place of a slot of a batch: its name in the batch, and the place of its bytes in a file of the producer's."""

    segment: int
    slot: int
    fd: int
    offset: int
    nbytes: int


class MadeBatch:
    """A batch that a worker made, undecoded. ``data`` is what every training is sent; ``nbytes`` what it takes here.

    Its slots are the worker's again when it dies.
    """

    __slots__ = ("_kept", "_slots", "data", "nbytes")

    def __init__(
        self, worker: SharingHandle, key: tuple[int, int], kind: int, node: Any, rest: tuple[Any, ...]
    ) -> None:
        self._slots = slots_of(node, worker.lease) if node is not None else {}
        worker.leased = {}
        self._kept = {number: worker.kept[number] for number, _ in self._slots}
        places = [tuple(self._place(worker, *at, base.nbytes)) for at, base in self._slots.items()]
        self.data = marshal.dumps((*key, worker.number, kind, node, rest, places))
        self.nbytes = len(self.data) + sum(base.nbytes for base in self._slots.values())

    @property
    def is_lent(self) -> bool:
        """True if the batch lies in slots, which must stay as they are while a training copies them."""
        return bool(self._slots)

    def _place(self, worker: SharingHandle, segment: int, slot: int, nbytes: int) -> SlotPlace:
        return SlotPlace(segment, slot, self._kept[segment].fd, worker.segments[segment].offset(slot), nbytes)


def copied(places: list[tuple[int, int, int, int, int]], producer: int, arena: Arena) -> dict[tuple[int, int], Any]:
    """Return arrays in ``arena`` with the bytes of these slots, by segment and slot; ``producer``: its process.

    Raises:
        OSError: The producer has ended.
    """
    found = {}
    for segment, slot, fd, offset, nbytes in places:
        array, _ = arena.array(nbytes)
        with open(f"/proc/{producer}/fd/{fd}", "rb", buffering=0) as file:  # noqa: PTH123  (no path of the file system)
            file.seek(offset)
            view = memoryview(array.data)
            while len(view):
                came = file.readinto(view)
                if not came:
                    raise OSError("the memory of a batch ended before the batch")
                view = view[came:]
        found[segment, slot] = array
    return found

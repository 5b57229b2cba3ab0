"""A file in memory that holds a shipped pickle and its buffers, once for all processes of a node.

Each process that opens it maps it privately, so what a dataset writes into its arrays stays its own, as in a forked
worker. This module imports no torch, so that a guardian, which fetches the bytes, need not either.
"""

from __future__ import annotations

import marshal
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any

_ALIGN = 64
"""Bytes of a cache line; what begins at one can be read as an array of any type."""
_LENGTH_BYTES = 8
"""The file begins with the length of its table."""


class ShippedFiles:
    """The file of the latest shipment to this process. Shipments are numbered upwards, and may be put and forgotten in
    any order, by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._number, self._fd = -1, -1

    def expect(self, number: int) -> None:
        """Forget what was shipped before this one, also if it comes later. Processes that opened it keep it."""
        with self._lock:
            self._wanted = max(self._wanted, number)
            if self._number < self._wanted:
                self._close()

    def put(self, number: int, parts: Sequence[Any]) -> str:
        """Keep a shipment; return where processes of this machine can open it, "" if it is not wanted any more."""
        fd = write_shipped(parts)
        with self._lock:
            if number < self._wanted:
                os.close(fd)
                return ""
            self._close()
            self._number, self._fd = number, fd
            return f"/proc/{os.getpid()}/fd/{fd}"

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._number, self._fd = -1, -1


def write_shipped(parts: Sequence[Any]) -> int:
    """Put the parts (uint8 arrays: the pickle, then its buffers) into a file; return its descriptor."""
    layout, size = [], _ALIGN
    for part in parts:
        layout.append((size, part.nbytes))
        size += -(-part.nbytes // _ALIGN) * _ALIGN
    table = marshal.dumps(layout)
    fd = os.memfd_create("dpex-shipped")
    os.ftruncate(fd, size + len(table))
    with mmap.mmap(fd, 0) as memory:
        memory[:_LENGTH_BYTES] = size.to_bytes(_LENGTH_BYTES, "little")
        memory[size:] = table
        for (at, nbytes), part in zip(layout, parts, strict=True):
            memory[at : at + nbytes] = memoryview(part).cast("B")
    return fd


def map_shipped(fd: int) -> list[memoryview]:
    """Return the parts of such a file, private and writable; it may be closed afterwards."""
    memory = memoryview(mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    size = int.from_bytes(memory[:_LENGTH_BYTES], "little")
    return [memory[at : at + nbytes] for at, nbytes in marshal.loads(memory[size:])]

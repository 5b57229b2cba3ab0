"""Maps that keep no file descriptor, files in memory, and the freed memory that the heap of the C library keeps.

Python's ``mmap.mmap(fd)`` keeps a duplicate of the descriptor for as long as the map lives, and a loader may have
hundreds of maps. ``trackfd=False`` avoids the duplicate, but only from Python 3.13 on.

A file in memory (``memfd_create``) has no name that could leak, and only the machine's memory limits it.

glibc maps each block above a threshold (128 KiB at first) separately, unmaps the block when it is freed, and returns
free memory at the end of the heap to the kernel. So each decoded sample faults its pages in anew. When a program frees
a mapped block of up to 32 MiB, glibc raises the threshold to the size of the block, and keeps twice that size at the
end of the heap (mallopt(3)). A batch in shared memory is not such a block, so `keep_heap` allocates and frees a block
of the batch's size. The next batch then reuses the memory of freed samples. Settings of the user (``mallopt``,
``GLIBC_TUNABLES``) end glibc's adaptation. If the environment contains them, `keep_heap` does not call ``mallopt``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import marshal
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

_LIBC: Any = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value

HUGE_PAGE = 2 << 20
"""Bytes of a huge page, on most machines."""


def map_memory(fd: int, size: int, *, offset: int = 0, private: bool = False, at_huge: bool = False) -> Any:
    """Map ``size`` writable bytes of the file ``fd`` from ``offset`` on. If ``fd`` is -1, map memory without a file.

    The result offers the buffer protocol. It is unmapped when its last view is gone. The caller keeps the descriptor.
    ``offset`` is page-aligned. ``private``: Pages that are written become copies. ``at_huge``: The map begins at a
    multiple of `HUGE_PAGE`.

    Raises:
        OSError: mmap(2) failed.
        ValueError: The file ends before the last byte of the map.
    """
    if fd >= 0 and os.fstat(fd).st_size < offset + size:
        raise ValueError(
            f"cannot map {size} bytes at {offset} of a file of {os.fstat(fd).st_size}: the rest would be a bus error"
        )
    flags = mmap.MAP_PRIVATE if private or fd < 0 else mmap.MAP_SHARED
    flags |= mmap.MAP_ANONYMOUS if fd < 0 else 0
    address = _LIBC.mmap(
        _free_place(size) if at_huge else None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset
    )
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: cannot map {size} bytes of memory")
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _LIBC.munmap, address, size).atexit = False
    return memory


def _free_place(size: int) -> int | None:
    """Return a multiple of `HUGE_PAGE` from which ``size`` bytes of the address space are free, or None."""
    found = _LIBC.mmap(None, size + HUGE_PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if found == _FAILED:
        return None
    _LIBC.munmap(found, size + HUGE_PAGE)
    return int(found + -found % HUGE_PAGE)


def advise(memory: Any, advice: int, start: int = 0, nbytes: int | None = None) -> bool:
    """Call madvise(2) for ``nbytes`` of the map (None: all) from ``start`` on, both in whole pages.

    Return False if the kernel refused. Older kernels refuse some advice.
    """
    length = ctypes.sizeof(memory) if nbytes is None else nbytes
    return int(_LIBC.madvise(ctypes.addressof(memory) + start, length, advice)) == 0


# -- files -------------------------------------------------------------------------------------------------------------

_ALIGN = 64
"""Bytes of a cache line. Data that begins at a multiple can be read as an array of any type."""
_LENGTH_BYTES = 8
"""Bytes at the beginning of a file that contain the offset of its table."""
_REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS)
"""Errors of memfd_create(2) if a container or a kernel refuses the call."""


def memory_file(name: str, size: int = 0) -> int:
    """Return the descriptor of a new in-memory file of ``size`` bytes. It is freed with its last descriptor and map.

    Raises OSError if no descriptor or memory is left, or the system refuses memfd_create(2).
    """
    try:
        fd = os.memfd_create(name)
    except OSError as error:
        if error.errno in _REFUSALS:
            why = "this container refuses memfd_create, which dpex needs for batches: allow the call (seccomp)"
            raise OSError(error.errno, why) from error
        raise
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_parts(parts: Sequence[Any]) -> int:
    """Write uint8 arrays to a new in-memory file, which is not mapped, to avoid page faults. Return its descriptor."""
    layout, size = [], _ALIGN
    for part in parts:
        layout.append((size, part.nbytes))
        size += -(-part.nbytes // _ALIGN) * _ALIGN
    table = marshal.dumps(layout)
    fd = memory_file("dpex-shipped", size + len(table))
    try:
        _write_at(fd, 0, size.to_bytes(_LENGTH_BYTES, "little"))
        _write_at(fd, size, table)
        for (at, _), part in zip(layout, parts, strict=True):
            _write_at(fd, at, part)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write_at(fd: int, at: int, data: Any) -> None:
    left = memoryview(data).cast("B")
    while left:
        count = os.pwrite(fd, left, at)
        left, at = left[count:], at + count


def map_parts(fd: int) -> list[memoryview]:
    """Return the parts of a file of `write_parts`, private to this process and writable. ``fd`` may then be closed."""
    memory = memoryview(map_memory(fd, os.fstat(fd).st_size, private=True)).cast("B")
    size = int.from_bytes(memory[:_LENGTH_BYTES], "little")
    return [memory[at : at + nbytes] for at, nbytes in marshal.loads(memory[size:])]


# -- the heap ----------------------------------------------------------------------------------------------------------

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of ``mallopt``, from malloc.h."""
LARGEST_LEARNT = (32 << 20) - (1 << 16)
"""Largest block, in bytes, whose release raises glibc's mmap threshold (64 bits); without header and rounding."""
_MOST_KEPT = 512 << 20
"""The maximum number of bytes that are kept at the end of the heap."""
_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
"""Environment variables of glibc that have the effect of `mallopt`."""
_learnt = 0


def keep_heap(nbytes: int) -> None:
    """Have the heap keep up to twice ``nbytes`` of freed memory at its end. Later, only a larger ``nbytes`` counts."""
    global _learnt
    if nbytes <= _learnt:
        return
    _learnt = nbytes
    with contextlib.suppress(MemoryError):
        np.empty(min(nbytes, LARGEST_LEARNT), np.uint8)  # never written to, so that it costs no memory; freed at once
    if nbytes > LARGEST_LEARNT and (mallopt := getattr(_LIBC, "mallopt", None)) is not None and not _is_set_by_user():
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, min(2 * nbytes, _MOST_KEPT))


def trim_heap() -> None:
    """Return all free pages of the heap to the kernel, which takes milliseconds. Later use faults pages in again."""
    if (malloc_trim := getattr(_LIBC, "malloc_trim", None)) is not None:
        malloc_trim(ctypes.c_size_t(0))


def _is_set_by_user() -> bool:
    return "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") or any(name in os.environ for name in _USERS)

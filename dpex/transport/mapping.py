"""Memory maps that keep no file descriptor, and huge pages for those that are shared.

``mmap.mmap(fd)`` keeps a duplicate of the descriptor for as long as the map lives (``trackfd=False`` ends that, but
only from Python 3.13 on), and a loader may have hundreds of maps. These go to the C library directly.

Shared memory gets no huge pages by itself, as almost every system has ``shmem_enabled`` set to ``never``. Asked for by
MADV_COLLAPSE (Linux 6.1), it does, unless that is ``deny``: they are filled in a quarter of the time, mapped by the
other side in a hundredth, and copied out of in two thirds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from pathlib import Path
from typing import Any

_LIBC: Any = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value
MADV_HUGEPAGE, MADV_POPULATE_READ, MADV_POPULATE_WRITE, _MADV_COLLAPSE = 14, 22, 23, 25
_PROT_NONE, _MAP_NORESERVE, _MAP_FIXED = 0, 0x4000, 0x10
_LARGEST_HUGE_BYTES = 32 << 20
"""Where a huge page is larger (512 MiB on some ARM kernels), no batch has use for one."""
_AT_ONCE_BYTES = 16 << 20
"""Asked for at once: each question makes all CPUs give up pages that they have set aside."""
_PATIENCE_S_PER_BYTE = 4.0 / (1 << 30)
"""CPU time. Filling small pages takes 0.5 s to 2 s for each GiB. Where memory is so fragmented that the kernel moves
pages about for longer than this, huge pages are not worth it."""


def map_memory(fd: int, size: int) -> Any:
    """``size`` writable bytes of the file behind ``fd`` (shared), or for ``fd=-1`` private ones.

    The result offers the buffer protocol; it is unmapped when the last view of it is gone. The descriptor stays the
    caller's. Raises OSError as mmap(2) does, and ValueError where the file is shorter than ``size``.
    """
    if fd >= 0 and os.fstat(fd).st_size < size:
        raise ValueError(f"cannot map {size} bytes of a file of {os.fstat(fd).st_size}: the rest would be a bus error")
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if fd >= 0 and 0 < _HUGE_BYTES <= size:
        address = _map_aligned(fd, size)
    else:
        address = _map(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd)
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _LIBC.munmap, address, size).atexit = False
    return memory


def _map(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    found: int = _LIBC.mmap(address, size, protection, flags, fd, 0)
    if found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: cannot map {size} bytes of memory")
    return found


def _map_aligned(fd: int, size: int) -> int:
    """Map a shared file where a huge page of it can be one in the page table: in a stretch of addresses that is held
    for it, whose ends are given back."""
    stretch = size + _HUGE_BYTES
    held = _map(None, stretch, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = -(-held // _HUGE_BYTES) * _HUGE_BYTES
    try:
        _map(address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _LIBC.munmap(held, stretch)
        raise
    end = -(-(address + size) // mmap.PAGESIZE) * mmap.PAGESIZE
    if address > held:
        _LIBC.munmap(held, address - held)
    if held + stretch > end:
        _LIBC.munmap(end, held + stretch - end)
    return address


def populate(memory: Any) -> None:
    """Fault in a new shared map for writing, in huge pages as far as the kernel has them at hand."""
    global _gives_huge_pages
    if _gives_huge_pages and 0 < _HUGE_BYTES <= ctypes.sizeof(memory):
        _gives_huge_pages = _collapse(memory)
    advise(memory, MADV_POPULATE_WRITE)


def _collapse(memory: Any) -> bool:
    """Back all whole huge pages of a map with such; False where the kernel will not, or only slowly."""
    whole_bytes = ctypes.sizeof(memory) // _HUGE_BYTES * _HUGE_BYTES
    for at in range(0, whole_bytes, _AT_ONCE_BYTES):
        nbytes, began = min(_AT_ONCE_BYTES, whole_bytes - at), time.thread_time()
        for touched in range(at, at + nbytes, _HUGE_BYTES):  # of a page of which nothing is there, nothing is made
            memory[touched] = 0
        if _LIBC.madvise(ctypes.addressof(memory) + at, nbytes, _MADV_COLLAPSE):
            return False
        if time.thread_time() - began > nbytes * _PATIENCE_S_PER_BYTE:
            return False
    return True


def _huge_bytes() -> int:
    """The size of a huge page; 0 where there are none, or only too large ones."""
    try:
        size = int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0
    return size if size <= _LARGEST_HUGE_BYTES else 0


_HUGE_BYTES = _huge_bytes()
_gives_huge_pages = True


def advise(memory: Any, advice: int) -> None:
    """madvise(2) over the whole map. Older kernels refuse some advice, and nothing depends on it."""
    _LIBC.madvise(ctypes.addressof(memory), ctypes.sizeof(memory), advice)

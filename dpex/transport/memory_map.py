"""Memory maps that keep no file descriptor.

``mmap.mmap(fd)`` keeps a duplicate of the descriptor for as long as the map lives (``trackfd=False`` ends that, but
only from Python 3.13 on), and a loader may have hundreds of maps. These go to the C library directly.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
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


def map_memory(fd: int, size: int) -> Any:
    """``size`` writable bytes of the file behind ``fd`` (shared), or for ``fd=-1`` private ones.

    The result offers the buffer protocol; it is unmapped when the last view of it is gone. The descriptor stays the
    caller's. Raises OSError as mmap(2) does, and ValueError where the file is shorter than ``size``.
    """
    if fd >= 0 and os.fstat(fd).st_size < size:
        raise ValueError(f"cannot map {size} bytes of a file of {os.fstat(fd).st_size}: the rest would be a bus error")
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: cannot map {size} bytes of memory")
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _LIBC.munmap, address, size).atexit = False
    return memory


def advise(memory: Any, advice: int, start: int = 0, nbytes: int | None = None) -> bool:
    """madvise(2) over ``nbytes`` of the map from ``start`` on, both in whole pages; None: all of it.

    Returns False where the kernel refused. Older ones refuse some advice.
    """
    length = ctypes.sizeof(memory) if nbytes is None else nbytes
    return int(_LIBC.madvise(ctypes.addressof(memory) + start, length, advice)) == 0

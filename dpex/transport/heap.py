"""How much freed memory glibc's heap keeps, in place of giving it back to the kernel at once.

Blocks over a threshold of 128 KiB are mapped one by one and unmapped when they are freed, and what is free at the end
of the heap is given back, so that each decoded sample faults its pages in anew. glibc learns: it raises the threshold
to the size of a mapped block that is freed, of up to 32 MiB, and then keeps twice as much at the end of the heap; see
mallopt(3).

A batch that is made in shared memory is no such block. So a block of its size is taken and freed for glibc to see: what
the samples of a batch freed is there for the next batch, and what one unusual sample freed goes back to the kernel.
Settings of the user's (``mallopt``, ``GLIBC_TUNABLES``) prevail: glibc learns nothing after those, and `mallopt` is not
called beside those that the environment shows.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from functools import cache
from typing import Any

import numpy as np

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of malloc.h."""
LARGEST_LEARNT = (32 << 20) - (1 << 16)
"""Bytes of the largest block that glibc learns from on 64-bit systems, less its header and whatever rounds it up."""
_MOST_KEPT = 512 << 20
"""Bytes at the end of the heap that are kept at most, for batches however large."""
_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
"""Environment variables of glibc that say what `mallopt` would."""
_learnt = 0


def learn(nbytes: int) -> None:
    """Have the heap keep up to twice ``nbytes`` that are freed at its end; less than before changes nothing."""
    global _learnt
    if nbytes <= _learnt:
        return
    _learnt = nbytes
    with contextlib.suppress(MemoryError):
        np.empty(min(nbytes, LARGEST_LEARNT), np.uint8)  # never written to, so that it costs no memory; freed at once
    if nbytes > LARGEST_LEARNT and (mallopt := _function("mallopt")) is not None and not _is_set_by_user():
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, min(2 * nbytes, _MOST_KEPT))


def give_back() -> None:
    """Give all free pages of the heap back to the kernel. Takes milliseconds; what needs pages then faults them in."""
    if (malloc_trim := _function("malloc_trim")) is not None:
        malloc_trim(ctypes.c_size_t(0))


def _is_set_by_user() -> bool:
    return "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") or any(name in os.environ for name in _USERS)


@cache
def _function(name: str) -> Any:
    """A function of the C library; None where it has none such."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None

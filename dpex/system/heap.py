"""How glibc's heap is brought to keep freed memory in place of giving it back to the kernel.

Blocks over a threshold of 128 KiB are mapped one by one and unmapped when they are freed, and what is free at the end
of the heap is given back, so that each decoded sample faults its pages in anew. glibc raises the threshold to the size
of a mapped block that is freed, of up to 32 MiB, and keeps twice as much at the end of the heap; see mallopt(3).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

import numpy as np

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
"""Of malloc.h."""
_LARGEST_LEARNT = (32 << 20) - (1 << 16)
"""Bytes of the largest block that glibc learns from on 64-bit systems, less its header and whatever rounds it up."""
_has_learnt = False


def keep_freed_memory() -> None:
    """Keep all that is freed, for processes of dpex's own, which do nothing but make batches."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, 32 << 20)
            mallopt(_M_TRIM_THRESHOLD, 512 << 20)
            mallopt(_M_TOP_PAD, 16 << 20)


def learn_large_blocks() -> None:
    """Let glibc see a large block freed, once in a process, for the user's own.

    torch's batches, where large, are such blocks. Where batches lie in other memory nothing would tell glibc to keep
    what samples free. Settings of the user's (``mallopt``, ``GLIBC_TUNABLES``) prevail: glibc learns nothing then.
    """
    global _has_learnt
    if not _has_learnt:
        _has_learnt = True
        with contextlib.suppress(MemoryError):
            np.empty(_LARGEST_LEARNT, np.uint8)  # never written to, so that it costs no memory; freed at once

"""A trainer as in `benchmarks.network.measure`, to which one compressed buffer comes damaged."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable
from unittest.mock import patch

from benchmarks.network.measure import Request, measure
from dpex.pools.agent import frames
from dpex.transport.compression import decompress

NODES = 2
DAMAGED = 3
"""The number of the buffer since both nodes compress: all workers run by then."""
_receivers: set[int] = set()
_numbers = itertools.count()


def damaged(read: Callable[[int], bytes], travelling_bytes: int, into: memoryview) -> bool:
    """As `decompress`, with a bit of that buffer turned over."""
    _receivers.add(threading.get_ident())
    if len(_receivers) < NODES or next(_numbers) != DAMAGED:
        return decompress(read, travelling_bytes, into)

    def turned(most: int) -> bytes:
        data = bytearray(read(most))
        data[len(data) // 2] ^= 1
        return bytes(data)

    return decompress(turned, travelling_bytes, into)


if __name__ == "__main__":
    with patch.object(frames, "decompress", damaged):
        print(json.dumps(measure(Request(**json.loads(sys.argv[1])))), flush=True)

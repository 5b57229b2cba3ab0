"""Whether the buffers of a frame are as large as its batches are said to be.

A few bytes of a compressed buffer may become very many, so that memory is taken only for what a batch needs: the worker
that made it counted its bytes, which is another count than the sizes that stand in the frame's table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpex.pools.agent.frames import FrameError
from dpex.transport.codec import spilled_bytes


def check_sizes(header: Any, sizes: Sequence[int]) -> None:
    """Look at what an agent told (see `dpex.pools.agent.serving`) before its buffers are received.

    Raises:
        FrameError: A batch has more bytes than its worker counted, or a buffer is no batch's.
    """
    try:
        batches = [(nbytes + spilled_bytes(node), places) for *_, node, _, _, _, nbytes, places, _ in header[2]]
        found = [sum(sizes[which] for *_, which in places) for _, places in batches]
    except (IndexError, TypeError, ValueError) as error:
        raise FrameError(f"compressed buffers that are no batch's: {error}") from error
    for number, (promised, _) in zip(found, batches, strict=True):
        if number > promised:
            raise FrameError(f"buffers of {number} bytes for a batch of {promised}")
    if sum(len(places) for _, places in batches) != len(sizes):
        raise FrameError(f"{len(sizes)} buffers, of which some are no batch's")

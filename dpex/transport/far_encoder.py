"""Encodes batches for a trainer on another machine."""

from __future__ import annotations

import io

from dpex.transport.codec import Encoder
from dpex.transport.out_of_band import BufferTable
from dpex.transport.pickling import dump_batch


class FarEncoder(Encoder):
    """As `Encoder`; classes and functions travel by value where they must."""

    def _dump(self, batch: object, stream: io.BytesIO, memories: BufferTable) -> None:
        dump_batch(batch, stream, memories)
